"""Hooks' states, such as an adaptive coefficient, survive a checkpoint.

They are written into the checkpoint's `trainer_state.json`, where transformers keeps the states of callbacks, and read
back when the run resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..credit.flow import plugin_label
from ..errors import ConfigurationError
from ..types import implements


class AdvantageHookStates(TrainerCallback, ExportableState):
    """Saves the states of the hooks that have `state_dict` and `load_state_dict`, and restores them at resumption.

    transformers may make an instance of its own from what `state` returns, which is why the hooks are an attribute of
    the class that `states_of` makes for each trainer.
    """

    hooks: ClassVar[Sequence[Any]] = ()

    def state(self) -> dict[str, Any]:
        """What transformers writes into the checkpoint."""
        return {"args": {}, "attributes": {"saved": [_state_of(hook) for hook in self.hooks]}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Restore each hook's state from the checkpoint; without a checkpoint hooks keep what they have."""
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("saved", [])
        here, there = [plugin_label(hook) for hook in self.hooks], [entry["hook"] for entry in saved]
        if saved and here != there:
            raise ConfigurationError(
                f"The checkpoint was written with the advantage hooks {there}, this run has {here}. Select the same, "
                "or start from the checkpoint's model instead of resuming."
            )
        for hook, entry in zip(self.hooks, saved, strict=bool(saved)):
            if entry["state"] is not None:
                hook.load_state_dict(entry["state"])


def states_of(hooks: Sequence[Any]) -> AdvantageHookStates | None:
    """The callback for these hooks, or None if none has a state."""
    if not any(has_state(hook) for hook in hooks):
        return None
    states: AdvantageHookStates = type(AdvantageHookStates.__name__, (AdvantageHookStates,), {"hooks": list(hooks)})()
    return states


def has_state(hook: Any) -> bool:
    """Whether a hook has a state to save."""
    return implements(hook, "state_dict") and implements(hook, "load_state_dict")


def _state_of(hook: Any) -> dict[str, Any]:
    return {"hook": plugin_label(hook), "state": dict(hook.state_dict()) if has_state(hook) else None}
