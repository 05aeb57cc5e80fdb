"""States that survive a checkpoint, in its `trainer_state.json`, where transformers keeps those of callbacks."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..credit.flow import plugin_label
from ..errors import ConfigurationError
from ..types import implements


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
        saved = self.saved_in(state) or []
        there = [entry["hook"] for entry in saved]
        if saved and there != (here := [plugin_label(hook) for hook in self.hooks]):
            raise ConfigurationError(f"The checkpoint has the states of the advantage hooks {there}, not of {here}.")
        for hook, entry in zip(self.hooks, saved, strict=bool(saved)):
            if entry["state"] is not None:
                hook.load_state_dict(entry["state"])


def has_state(hook: Any) -> bool:
    return implements(hook, "state_dict") and implements(hook, "load_state_dict")
