"""Which training prompts a generation batch is sampled for: dealt by TRL's loader, or drawn here, on rank 0."""

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from accelerate.utils import broadcast_object_list

from ..credit.flow import checked_draw, named, plugin_label, sampler_metrics
from ..credit.groups import weighted_rewards
from ..errors import ConfigurationError
from ..plugins.loading import load_prompt_sampler
from ..types import PromptOutcome, PromptPool, Rollout
from .hook_states import KeptState, warn_on_main
from .selected import SelectedPlugins
from .upstream import reading
from .upstream.reading import RunFacts


@dataclass(frozen=True)
class Drawn:
    """The prompts of one round."""

    rows: list[Any]  # this rank's inputs, each prompt as often as it is sampled
    prompts: Sequence[int] = ()  # row numbers in the training data, over all ranks
    row_numbers: Sequence[int] | None = None  # of this rank's completions


@dataclass
class DrawnPrompts:
    """A prompt sampler draws them."""

    trainer: Any
    facts: RunFacts
    sampler: Any
    drawing: str  # the setting that asks for it
    on_changes: str  # "stop" or "warn", if a checkpoint is of other plugins
    log: Callable[[Mapping[str, float]], None]

    def __post_init__(self) -> None:
        self._label = f"prompt sampler {plugin_label(self.sampler)!r}"
        self._last: list[int] = []  # the round before the next one
        self._rows: Any = ()
        self.begin()

    def begin(self) -> None:
        """A training begins. The data are read at its first draw: callers may change them after construction."""
        self._started = False
        self._drawn = 0
        self._ahead: list[list[int]] = []  # the next round, drawn ahead
        self._pool: list[Any] = []  # rows, prompts of a round, and a digest of the prompts

    def state(self) -> dict[str, Any]:
        return {
            "of": plugin_label(self.sampler),
            "pool": self._pool,
            "rounds_drawn": self._drawn,
            "ahead": self._ahead,
            "sampler": dict(self.sampler.state_dict()) if self._started and self.facts.rank == 0 else {},
            "inside_a_batch": reading.inside_a_batch(self.trainer),
        }

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Continue at a checkpoint."""
        if saved is None and self.on_changes == "warn":
            self._start_over("does not say which prompts were drawn")
            return
        if saved is None or saved["inside_a_batch"]:
            what = "does not say which prompts were drawn" if saved is None else "was saved inside a generation batch"
            raise ConfigurationError(f"{self.drawing}: the checkpoint {what}. Take another, or start from its model.")
        self._drawn = saved["rounds_drawn"]
        with self._plugin_code():
            self._start()
        pool = saved.get("pool") or self._pool
        of = saved.get("of", plugin_label(self.sampler))
        here = f"{self._pool[1]} of its own {self._pool[0]}"
        draws = f"drew {pool[1]} of {pool[0]} prompts a round, and this run draws {here}"
        if pool != self._pool and self.on_changes == "stop":
            how = "Take its data and batch, or set plugin_changes: warn, and the sampler starts over"
            raise ConfigurationError(f"{self.drawing}: the checkpoint {draws}. {how}.")
        if of != plugin_label(self.sampler) or pool != self._pool:
            self._drawn = (self._drawn - len(saved["ahead"])) * pool[1] // self._pool[1]
            self._start_over(draws if pool != self._pool else f"has the state of {of!r}")
            return
        with self._plugin_code():
            if self.facts.rank == 0:
                self.sampler.load_state_dict(saved["sampler"])
        self._ahead = [list(prompts) for prompts in saved["ahead"]]

    def _start_over(self, why: str) -> None:
        warn_on_main(self.trainer.args, f"The {self._label} starts over: the checkpoint {why}.")

    @contextmanager
    def _plugin_code(self) -> Iterator[None]:
        """What the sampler raises on rank 0 in this block, all ranks raise, with its name."""
        with self.facts.agreement.section(), named(self._label, self.sampler):
            yield

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        self._rows, make_sampler = reading.training_data_of(self.trainer)
        count = int(self.trainer.args.generation_batch_size) // self.facts.num_generations
        self._pool = [len(self._rows), count, digest_of(self._rows)]
        if self.facts.rank == 0:
            order = orders_of(make_sampler())
            self.sampler.start(PromptPool(rows=self._rows, seed=int(self.trainer.args.seed), order=order))

    def next_round(self) -> Drawn:
        """The next round's prompts; if they are exhausted inside an optimizer step, those of its last round again."""
        if self.look_ahead():
            self._last = self._ahead.pop()
        prompts = self._last
        indices = [index for index in prompts for _ in range(self.facts.num_generations)]
        rows = len(indices) // self.facts.ranks
        mine = indices[self.facts.rank * rows : (self.facts.rank + 1) * rows]
        inputs = list(self.trainer.data_collator([self._rows[index] for index in mine]))
        return Drawn(inputs, prompts, mine)

    def look_ahead(self) -> bool:
        if self._ahead:
            return True
        found: list[Any] = [None]
        with self._plugin_code():
            self._start()
            if self.facts.rank == 0:
                rows, count, _ = self._pool
                found = [checked_draw(self.sampler.draw(count, self._drawn), count, rows, self._label)]
        if self.facts.ranks > 1:
            broadcast_object_list(found, from_process=0)
        if found[0] is None:
            return False
        self._drawn += 1
        self._ahead.append(found[0])
        return True

    def observe(self, drawn: Drawn, rollout: Rollout, verdicts: Mapping[int, bool | str]) -> None:
        rewards_N_K = rollout.gather(rollout.rewards_B_K)[:, : len(self.facts.reward_names)]
        lengths_N = rollout.gather(rollout.completion_mask_B_T.sum(dim=1))
        with self._plugin_code():
            if self.facts.rank == 0:
                weights_K = rollout.reward_weights_K[: rewards_N_K.size(1)]
                names = self.facts.reward_names
                self.sampler.observe(outcomes_of(drawn.prompts, rewards_N_K, weights_K, lengths_N, names, verdicts))
                metrics = {"drawn": self._drawn * len(drawn.prompts) / len(self._rows)}
                metrics |= sampler_metrics(self.sampler)
                self.log({f"prompts/{name}": float(value) for name, value in metrics.items()})


def prompts_of(
    trainer: Any, facts: RunFacts, plugins: SelectedPlugins, log: Callable[[Mapping[str, float]], None]
) -> DrawnPrompts | None:
    """What draws the prompts of a run; None if TRL's loader deals them."""
    if plugins.resample is None and plugins.prompt_sampler is None:
        return None
    drawing = "prompt_sampler" if plugins.resample is None else "resample"
    dataset = trainer.train_dataset
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        what = f"{type(dataset).__name__} has no rows to choose from (a stream)"
        raise ConfigurationError(f"{drawing}: {what}. Load it as a Dataset, or remove {drawing}.")
    args = trainer.args
    block = int(args.steps_per_generation * args.num_iterations)
    per_step = int(args.gradient_accumulation_steps)
    if args.save_strategy == "steps" and args.save_steps >= 1 and args.save_steps * per_step % block:
        least = math.lcm(block, per_step) // per_step
        what = f"save_steps={args.save_steps} has to be a multiple of {least} here"
        raise ConfigurationError(f"{drawing}: {what}, or a run could not resume inside a generation batch.")
    sampler = plugins.prompt_sampler or load_prompt_sampler("trl-grpo-ext:in_order")
    prompts = DrawnPrompts(trainer, facts, sampler, drawing, plugins.settings.plugin_changes, log)
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
    columns_N_C = torch.cat([rewards_N_K, weighted_rewards(rewards_N_K, weights_K).unsqueeze(1)], dim=1).double()
    lengths_Q = lengths_N.view(len(prompts), -1).double().mean(dim=1).tolist()
    found = []
    for place, values_G_C in enumerate(columns_N_C.view(len(prompts), -1, columns_N_C.size(1))):
        *means, reward = values_G_C.nanmean(dim=0).tolist()
        *deviations, deviation = map(_deviation, values_G_C.T)
        outcome = PromptOutcome(
            row=prompts[place],
            means=dict(zip(names, means, strict=True)),
            deviations=dict(zip(names, deviations, strict=True)),
            reward=reward,
            deviation=deviation,
            length=lengths_Q[place],
            verdict=verdicts.get(place),
        )
        found.append(outcome)
    return found


def _deviation(values: torch.Tensor) -> float:
    known: list[float] = values[~torch.isnan(values)].tolist()
    if len(known) < 2:
        return 0.0 if known else math.nan
    return statistics.stdev(known)  # of equal numbers exactly 0


def digest_of(rows: Any) -> str:
    """A digest of about a thousand of the prompts, by which other training data show."""
    made = hasattr(rows, "format") and rows.format["type"] == "custom"  # by a transform, which may draw at random
    prompts = rows.select_columns("prompt") if hasattr(rows, "select_columns") and not made else rows  # decodes no more
    numbers = range(0, 0 if made else len(rows), max(1, len(rows) // 1000))
    shown = [prompts[number].get("prompt") for number in numbers]
    return hashlib.sha256(json.dumps(shown, skipkeys=True, default=lambda _: "?").encode()).hexdigest()


def orders_of(sampler: Any) -> Callable[[int], list[int]]:
    """The order of TRL's sampler in each pass, which is known only after the passes before it."""
    found: list[list[int]] = []

    def order(passes: int) -> list[int]:
        while len(found) <= passes:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(len(found))
            found.append(list(dict.fromkeys(sampler)))
        return found[passes]

    return order


class PromptsState(KeptState):
    """Keeps in a checkpoint what was drawn, and ends the training when the prompts are exhausted."""

    prompts: ClassVar[DrawnPrompts]

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"saved": self.prompts.state()}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Continue where the checkpoint was, and draw the first round."""
        if state.global_step:
            self.prompts.resume(self.saved_in(state))
        if not self.prompts.look_ahead():
            raise ConfigurationError("prompt_sampler: it has no prompts to begin with. Give it some, or remove it.")

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Before a generation batch, draw its first round; without one the training is over."""
        if not state.inside_a_batch and not self.prompts.look_ahead():
            control.should_training_stop = True
