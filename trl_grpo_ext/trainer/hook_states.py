"""States that survive a checkpoint, in its `trainer_state.json`, where transformers keeps those of callbacks."""

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..credit.flow import plugin_label
from ..guard.calls import unique_names
from ..types import implements
from .plugin_records import ManifestWarning
from .upstream import reading


class KeptState(TrainerCallback, ExportableState):
    """A callback whose state stands in a class of its own, from which transformers may make another instance."""

    @classmethod
    def of(cls, **attributes: Any) -> Self:
        made: Self = type(cls.__name__, (cls,), attributes)()
        return made

    def saved_in(self, state: Any) -> Any:
        """What the checkpoint has of it; None without a checkpoint, or where it was written without this callback."""
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("saved")
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())  # else transformers cannot save
        return saved


class AdvantageHookStates(KeptState):
    """Saves the states of the hooks that have `state_dict` and `load_state_dict`, and restores them at resumption."""

    hooks: ClassVar[Sequence[Any]] = ()

    def state(self) -> dict[str, Any]:
        states = [dict(hook.state_dict()) if has_state(hook) else None for hook in self.hooks]
        saved = [{"hook": plugin_label(hook), "state": one} for hook, one in zip(self.hooks, states, strict=True)]
        return {"args": {}, "attributes": {"saved": saved}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Load each hook's state, found by its label; say which start over, and which states are of none."""
        saved = [entry for entry in self.saved_in(state) or [] if entry["state"] is not None]
        states = dict(zip(unique_names([entry["hook"] for entry in saved]), saved, strict=True))
        hooks = [*filter(has_state, self.hooks)]
        for name, hook in zip(unique_names([*map(plugin_label, hooks)]), hooks, strict=True):
            if name in states:
                hook.load_state_dict(states.pop(name)["state"])
            elif state.global_step:
                warn_on_main(args, f"The checkpoint has no state of the advantage hook {name!r}: it starts over.")
        if states:
            names = " and ".join(map(repr, states))
            warn_on_main(args, f"Not used is the checkpoint's state of the advantage hook {names}.")


class UnusedStates(TrainerCallback):
    """Says which states of a checkpoint are of a kind of which this run keeps none, and forgets them."""

    def __init__(self, trainer: Any) -> None:
        self._used = {type(callback).__name__ for callback in trainer.callback_handler.callbacks}

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        for name, owners in (("AdvantageHookStates", "advantage hooks"), ("PromptsState", "the prompt sampler")):
            if name not in self._used and state.stateful_callbacks.pop(name, None) is not None:
                warn_on_main(args, f"Not used is the checkpoint's state of {owners}.")


class BatchPlace(TrainerCallback):
    """Says in the state, for `PromptsState` and `SaveOnSignal`, whether a run could resume after this step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        state.inside_a_batch = reading.inside_a_batch(self._trainer)


def warn_on_main(args: Any, text: str) -> None:
    """Warn on rank 0 of what a resumed run does not continue."""
    if args.process_index == 0:
        warnings.warn(text, ManifestWarning, stacklevel=3)


def has_state(hook: Any) -> bool:
    return implements(hook, "state_dict") and implements(hook, "load_state_dict")
