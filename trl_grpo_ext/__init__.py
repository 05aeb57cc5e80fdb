"""Plugins for TRL's `GRPOTrainer`: rewards, token-level advantage hooks, loss aggregations, group filters.

What most people need is here, and loaded on first use, so that importing the package, or listing plugins, costs no
torch. Errors are in `errors`, all that plugins are handed, and the protocols that they fit, in `types`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import TRLGRPOExtError as TRLGRPOExtError
    from .guard.guarded import guarded as guarded
    from .guard.messages import completion_text as completion_text
    from .guard.outcomes import Judgement as Judgement
    from .guard.outcomes import Outcome as Outcome
    from .guard.outcomes import OutcomePolicy as OutcomePolicy
    from .launch.checkpoints import SafeCheckpoints as SafeCheckpoints
    from .launch.engine import EngineCheck as EngineCheck
    from .launch.engine import ExpectedRun as ExpectedRun
    from .launch.engine import check_launch as check_launch
    from .plugins.loading import available as available
    from .plugins.loading import load_advantage_hooks as load_advantage_hooks
    from .plugins.loading import load_group_filter as load_group_filter
    from .plugins.loading import load_loss_aggregation as load_loss_aggregation
    from .plugins.loading import load_rewards as load_rewards
    from .plugins.loading import load_token_losses as load_token_losses
    from .trainer.config import GRPOExtConfig as GRPOExtConfig
    from .trainer.mixin import GRPOExtMixin as GRPOExtMixin
    from .trainer.mixin import GRPOExtTrainer as GRPOExtTrainer
    from .types import Forward as Forward
    from .types import Parts as Parts
    from .types import Rollout as Rollout
    from .types import Totals as Totals

__version__ = "0.1.0"

_HOME_OF = {
    "GRPOExtConfig": "trainer.config",
    "ExpectedRun": "launch.engine",
    "EngineCheck": "launch.engine",
    "check_launch": "launch.engine",
    "TRLGRPOExtError": "errors",
    "guarded": "guard.guarded",
    "Judgement": "guard.outcomes",
    "Outcome": "guard.outcomes",
    "OutcomePolicy": "guard.outcomes",
    "available": "plugins.loading",
    "load_advantage_hooks": "plugins.loading",
    "load_group_filter": "plugins.loading",
    "load_loss_aggregation": "plugins.loading",
    "load_rewards": "plugins.loading",
    "load_token_losses": "plugins.loading",
    "completion_text": "guard.messages",
    "SafeCheckpoints": "launch.checkpoints",
    "GRPOExtMixin": "trainer.mixin",
    "GRPOExtTrainer": "trainer.mixin",
    "Forward": "types",
    "Parts": "types",
    "Rollout": "types",
    "Totals": "types",
}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
