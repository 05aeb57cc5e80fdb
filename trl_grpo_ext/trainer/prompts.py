"""Which training prompts a generation batch is sampled for, drawn here instead of by TRL's data loader.

TRL's loader asks for batches ahead of time, before anything is known of the ones under way. Drawing at the moment of
generation is what lets `resample` replace groups.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import ConfigurationError
from .facts import RunFacts
from .hook_states import KeptState
from .upstream import reading


@dataclass(frozen=True)
class Drawn:
    """The prompts of one round."""

    prompts: list[int]  # row numbers in the training data, over all ranks
    row_numbers: list[int]  # of this rank's completions
    rows: list[Any]  # this rank's inputs, each prompt as often as it is sampled


class Prompts:
    """The training prompts in the order of TRL's sampler."""

    def __init__(self, trainer: Any, facts: RunFacts) -> None:
        self._trainer, self._facts = trainer, facts
        self.start_at(0)

    def start_at(self, drawn: int) -> None:
        """Continue after this many rounds."""
        self.drawn, self._rounds = drawn, itertools.islice(self._all(), drawn, None)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs for a run to continue as if it had not stopped."""
        return {"rounds_drawn": self.drawn, "inside_a_batch": not reading.between_batches(self._trainer)}

    def resume(self, saved: dict[str, Any] | None, step: int) -> None:
        """Continue at a checkpoint; one without a state is of a run whose prompts TRL's loader dealt."""
        if saved is not None and saved["inside_a_batch"]:
            raise ConfigurationError(
                "resample: the checkpoint was saved inside a generation batch, which is not in it and would be sampled "
                "again from other weights. Resume from a checkpoint between generation batches."
            )
        self.start_at(reading.batches_done(self._trainer, step) if saved is None else saved["rounds_drawn"])

    def draw(self) -> Drawn:
        """The next round's prompts."""
        prompts = next(self._rounds)
        self.drawn += 1
        indices = [index for index in prompts for _ in range(self._facts.num_generations)]
        rows = len(indices) // self._facts.ranks
        mine = indices[self._facts.rank * rows : (self._facts.rank + 1) * rows]
        return Drawn(prompts, mine, list(self._trainer.data_collator([self._rows[index] for index in mine])))

    def _all(self) -> Iterator[list[int]]:
        """Each round's prompts."""
        # Read when a training begins: callers may still change the trainer's data after construction.
        self._rows, make_sampler = reading.training_data_of(self._trainer)
        size = int(self._trainer.args.generation_batch_size) // self._facts.num_generations
        sampler = make_sampler()
        for passes in itertools.count():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(passes)
            order = list(dict.fromkeys(sampler))
            yield from (order[start : start + size] for start in range(0, len(order) - size + 1, size))


class PromptsState(KeptState):
    """Keeps in a checkpoint what was drawn."""

    prompts: ClassVar[Prompts]

    def state(self) -> dict[str, Any]:
        """What transformers writes into the checkpoint."""
        return {"args": {}, "attributes": {"saved": self.prompts.state()}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Continue where the checkpoint was."""
        if state.global_step:
            self.prompts.resume(self.saved_in(state), state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Tell the callbacks that end the step, such as `SaveOnSignal`, whether a run could resume after it."""
        state.inside_a_batch = self.prompts.state()["inside_a_batch"]
