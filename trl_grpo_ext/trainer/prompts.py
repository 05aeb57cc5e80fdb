"""Which training prompts a generation batch is sampled for: dealt by TRL's data loader, or drawn here.

TRL's loader asks ahead of time, before anything is known of the batches under way. A prompt sampler, on rank 0, draws
at the moment of generation; a round is drawn as soon as the one before it has been observed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from accelerate.utils import broadcast_object_list

from ..credit.flow import checked_draw, named, plugin_label
from ..credit.groups import weighted_rewards
from ..errors import ConfigurationError
from ..plugins.loading import load_prompt_sampler
from ..types import PromptOutcome, PromptPool, Rollout, implements
from .facts import RunFacts
from .hook_states import KeptState
from .selected import SelectedPlugins
from .upstream import reading


@dataclass(frozen=True)
class Drawn:
    """The prompts of one round."""

    rows: list[Any]  # this rank's inputs, each prompt as often as it is sampled
    prompts: Sequence[int] = ()  # row numbers in the training data, over all ranks
    row_numbers: Sequence[int] | None = None  # of this rank's completions


class DealtPrompts:
    """TRL's loader deals the prompts."""

    def begin(self) -> None:
        """Nothing is drawn."""

    def look_ahead(self) -> bool:
        return True

    def next_round(self, inputs: list[Any]) -> Drawn:
        return Drawn(inputs)

    def observe(self, drawn: Drawn, rollout: Rollout, verdicts: Mapping[int, bool | str]) -> None:
        """Nobody wants to know."""


class DrawnPrompts:
    """A prompt sampler draws them."""

    def __init__(
        self, trainer: Any, facts: RunFacts, sampler: Any, drawing: str, log: Callable[[Mapping[str, float]], None]
    ) -> None:
        self._trainer = trainer
        self._facts = facts
        self._sampler = sampler
        self._drawing = drawing
        self._log = log
        self._label = f"prompt sampler {plugin_label(sampler)!r}"
        self._started = False
        self._drawn = 0
        self._ahead: list[list[int]] = []  # the next round, drawn ahead
        self._last: list[int] = []  # the round before it
        self._rows: Any = ()

    def begin(self) -> None:
        self._started, self._drawn, self._ahead = False, 0, []

    @property
    def inside_a_batch(self) -> bool:
        """Whether a checkpoint would fall inside a generation batch, and so could not be resumed from."""
        return not reading.between_batches(self._trainer)

    def state(self) -> dict[str, Any]:
        return {
            "rounds_drawn": self._drawn,
            "ahead": self._ahead,
            "sampler": dict(self._sampler.state_dict()) if self._started and self._facts.rank == 0 else {},
            "inside_a_batch": self.inside_a_batch,
        }

    def resume(self, saved: Mapping[str, Any] | None, step: int) -> None:
        """Continue at a checkpoint; one without a state is of a run whose prompts TRL's loader dealt."""
        if saved is not None and saved["inside_a_batch"]:
            raise ConfigurationError(
                f"{self._drawing}: the checkpoint was saved inside a generation batch, which is not in it and would be "
                "sampled again from other weights. Resume from a checkpoint between generation batches."
            )
        with self._plugin_code():
            self._start()
            if saved is not None and self._facts.rank == 0:
                self._sampler.load_state_dict(saved["sampler"])
        if saved is None:
            args = self._trainer.args  # one generation batch feeds so many micro-steps
            block = int(args.num_iterations) * int(args.steps_per_generation)
            self._drawn = -(-step * int(args.gradient_accumulation_steps) // block)
        else:
            self._drawn, self._ahead = saved["rounds_drawn"], [list(prompts) for prompts in saved["ahead"]]

    @contextmanager
    def _plugin_code(self) -> Iterator[None]:
        """What the sampler raises on rank 0 in this block, all ranks raise, with its name."""
        with self._facts.agreement.section(), named(self._label, self._sampler):
            yield

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        self._rows, make_sampler = reading.training_data_of(self._trainer)
        if self._facts.rank == 0:
            orders = _Orders(make_sampler)
            pool = PromptPool(rows=self._rows, seed=int(self._trainer.args.seed), order=orders.of)
            self._sampler.start(pool)

    def next_round(self, inputs: list[Any]) -> Drawn:
        """The next round's prompts. What TRL's loader dealt is not used.

        Prompts that are exhausted inside an optimizer step, which needs several rounds, leave it those of its last one.
        """
        if self.look_ahead():
            self._last = self._ahead.pop()
        prompts = self._last
        indices = [index for index in prompts for _ in range(self._facts.num_generations)]
        rows = len(indices) // self._facts.ranks
        mine = indices[self._facts.rank * rows : (self._facts.rank + 1) * rows]
        inputs = list(self._trainer.data_collator([self._rows[index] for index in mine]))
        return Drawn(inputs, prompts, mine)

    def look_ahead(self) -> bool:
        if self._ahead:
            return True
        found: list[Any] = [None]
        with self._plugin_code():
            self._start()
            if self._facts.rank == 0:
                count = int(self._trainer.args.generation_batch_size) // self._facts.num_generations
                drawn = self._sampler.draw(count, self._drawn)
                found = [checked_draw(drawn, count, len(self._rows), self._label)]
        if self._facts.ranks > 1:
            broadcast_object_list(found, from_process=0)
        if found[0] is None:
            return False
        self._drawn += 1
        self._ahead.append(found[0])
        return True

    def observe(self, drawn: Drawn, rollout: Rollout, verdicts: Mapping[int, bool | str]) -> None:
        rewards_N_K = rollout.gather(rollout.rewards_B_K)[:, : len(self._facts.reward_names)]
        lengths_N = rollout.gather(rollout.completion_mask_B_T.sum(dim=1))
        with self._plugin_code():
            if self._facts.rank == 0:
                names, weights_K = self._facts.reward_names, rollout.reward_weights_K[: rewards_N_K.size(1)]
                outcomes = outcomes_of(drawn.prompts, rewards_N_K, weights_K, lengths_N, names, verdicts)
                self._sampler.observe(outcomes)
                metrics = {"drawn": self._drawn * len(drawn.prompts) / len(self._rows)}
                if implements(self._sampler, "metrics"):
                    metrics |= self._sampler.metrics()
                self._log({f"prompts/{name}": float(value) for name, value in metrics.items()})


def prompts_of(
    trainer: Any, facts: RunFacts, plugins: SelectedPlugins, log: Callable[[Mapping[str, float]], None]
) -> DealtPrompts | DrawnPrompts:
    """Where the prompts of a run come from."""
    if plugins.resample is None and plugins.prompt_sampler is None:
        return DealtPrompts()
    drawing = "prompt_sampler" if plugins.resample is None else "resample"
    dataset, args = trainer.train_dataset, trainer.args
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigurationError(
            f"{drawing} draws prompts from train_dataset, but {type(dataset).__name__} has no rows to choose from (a "
            f"stream). Load it as a Dataset, or remove {drawing}."
        )
    block, per_step = int(args.steps_per_generation * args.num_iterations), int(args.gradient_accumulation_steps)
    if args.save_strategy == "steps" and args.save_steps >= 1 and args.save_steps * per_step % block:
        raise ConfigurationError(
            f"{drawing}: save_steps={args.save_steps} has to be a multiple of {math.lcm(block, per_step) // per_step} "
            "here: a checkpoint inside a generation batch could not be resumed from."
        )
    sampler = plugins.prompt_sampler or load_prompt_sampler("trl-grpo-ext:in_order")
    prompts = DrawnPrompts(trainer, facts, sampler, drawing, log)
    trainer.add_callback(PromptsState.of(prompts=prompts))
    return prompts


def outcomes_of(
    prompts: Sequence[int],
    rewards_N_K: torch.Tensor,
    weights_K: torch.Tensor,
    lengths_N: torch.Tensor,
    names: Sequence[str],
    verdicts: Mapping[int, bool | str],
) -> list[PromptOutcome]:
    """What came of each prompt of a round, in the order drawn."""
    size = len(rewards_N_K) // len(prompts)
    columns_N_C = torch.cat([rewards_N_K, weighted_rewards(rewards_N_K, weights_K).unsqueeze(1)], dim=1).double()
    found = []
    for place, (row, values_G_C) in enumerate(zip(prompts, columns_N_C.view(len(prompts), size, -1), strict=True)):
        means_C = values_G_C.nanmean(dim=0).tolist()
        deviations_C = [_deviation(values_G[~torch.isnan(values_G)]) for values_G in values_G_C.T]
        found.append(
            PromptOutcome(
                row=row,
                means=dict(zip(names, means_C[:-1], strict=True)),
                deviations=dict(zip(names, deviations_C[:-1], strict=True)),
                reward=means_C[-1],
                deviation=deviations_C[-1],
                length=float(lengths_N[place * size : (place + 1) * size].double().mean()),
                verdict=verdicts.get(place),
            )
        )
    return found


def _deviation(values: torch.Tensor) -> float:
    if len(values) < 2:
        return 0.0 if len(values) else float("nan")
    # Equal numbers have none, whatever rounding does to their mean.
    return 0.0 if bool((values == values[0]).all()) else float(values.std())


class _Orders:
    """The order of TRL's sampler in each pass, which is known only after the passes before it."""

    def __init__(self, make_sampler: Callable[[], Any]) -> None:
        self._sampler, self._passes = make_sampler(), list[list[int]]()

    def of(self, passes: int) -> list[int]:
        while len(self._passes) <= passes:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(len(self._passes))
            self._passes.append(list(dict.fromkeys(self._sampler)))
        return self._passes[passes]


class PromptsState(KeptState):
    """Keeps in a checkpoint what was drawn, and ends the training when the prompts are exhausted."""

    prompts: ClassVar[DrawnPrompts]

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"saved": self.prompts.state()}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Continue where the checkpoint was, and draw the first round."""
        if state.global_step:
            self.prompts.resume(self.saved_in(state), state.global_step)
        if not self.prompts.look_ahead():
            raise ConfigurationError("prompt_sampler: it has no prompts to begin with. Give it some, or remove it.")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Tell `launch`'s `SaveOnSignal`, by the state, whether a run could resume after this step."""
        state.inside_a_batch = self.prompts.inside_a_batch

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Before a generation batch, draw its first round; without one the training is over."""
        if not state.inside_a_batch and not self.prompts.look_ahead():
            control.should_training_stop = True
