"""Prompts drawn at the moment of generation: TRL's own order, what a sampler sees, resuming, and wrong draws."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from tests.support import Run, prompts, relative_gap, train
from trl_grpo_ext.errors import ConfigurationError, PluginOutputError
from trl_grpo_ext.trainer.plugin_records import ManifestWarning
from trl_grpo_ext.trainer.prompts import outcomes_of
from trl_grpo_ext.types import PromptOutcome, PromptPool, SamplerDeclaration

STEPS: dict[str, Any] = {"max_steps": 8, "prompt_count": 8, "shuffle_dataset": True}


class Recorded:
    """Draws what it is told, a round after the other; by default the rows in order of number."""

    __name__ = "recorded"
    declares = SamplerDeclaration()

    def __init__(self, *told: Sequence[int]) -> None:
        self.told = told
        self.seen: list[Sequence[PromptOutcome]] = []

    def start(self, pool: PromptPool) -> None:
        self.told = self.told or [range(first, first + 2) for first in range(0, len(pool.rows), 2)]
        self.answers = pool.column("answer")

    def draw(self, count: int, round_number: int) -> Sequence[int] | None:
        return [*self.told[round_number]] if round_number < len(self.told) else None

    def observe(self, outcomes: Sequence[PromptOutcome]) -> None:
        self.seen.append(outcomes)

    def metrics(self) -> Mapping[str, float]:
        return {"rounds_seen": float(len(self.seen))}

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def sampled(model: Path, folder: Path, sampler: Any, **settings: Any) -> Run:
    return train(model, folder, trainer_arguments={"prompt_sampler": sampler}, **{**STEPS, **settings})


def same(ours: Run, theirs: Run) -> bool:
    pairs = zip(ours.gradients, theirs.gradients, strict=True)
    return all(relative_gap(*pair) == 0.0 for pair in pairs) and all(
        torch.equal(ours.weights[name], value) for name, value in theirs.weights.items()
    )


def metrics_of(run: Run) -> list[dict[str, float]]:
    """Of each step in which prompts were drawn."""
    found = [{name: value for name, value in log.items() if name.startswith("prompts/")} for log in run.logs]
    return [metrics for metrics in found if metrics]


@pytest.mark.parametrize("shuffle", [pytest.param(False, marks=pytest.mark.slow), True])
def test_in_order_is_trls_order_to_the_bit(tiny_model: Path, tmp_path: Path, shuffle: bool) -> None:
    settings = {**STEPS, "shuffle_dataset": shuffle}  # two passes over the data
    theirs = train(tiny_model, tmp_path / "plain", GRPOTrainer, **settings)
    assert same(sampled(tiny_model, tmp_path / "ours", "in_order", **settings), theirs)


def test_a_sampler_sees_what_came_of_its_prompts(tiny_model: Path, tmp_path: Path) -> None:
    sampler = Recorded()
    run = sampled(tiny_model, tmp_path, sampler, max_steps=3)
    assert [[outcome.row for outcome in outcomes] for outcomes in sampler.seen] == [[0, 1], [2, 3], [4, 5]]
    assert sampler.answers == list(range(8))
    for outcomes, log in zip(sampler.seen, run.logs, strict=False):
        mean = sum(outcome.reward for outcome in outcomes) / len(outcomes)
        assert mean == pytest.approx(log["reward"], abs=1e-6)
        assert [outcome.means["length_reward"] for outcome in outcomes] == [outcome.reward for outcome in outcomes]
        assert sum(outcome.length for outcome in outcomes) / 2 == pytest.approx(log["completions/mean_length"])
        assert log["prompts/rounds_seen"] == 1 + sampler.seen.index(outcomes)
        assert {outcome.verdict for outcome in outcomes} == {None}


def test_a_samplers_metric_has_no_name_of_the_runs(tiny_model: Path, tmp_path: Path) -> None:
    class Counts(Recorded):
        def metrics(self) -> Mapping[str, float]:
            return {"drawn": 7.0}

    with pytest.raises(PluginOutputError, match="its metric 'drawn' has the name of one that the run logs"):
        sampled(tiny_model, tmp_path, Counts(), max_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"prompt_sampler": {"name": "difficulty_pool", "fails_at": -1.0}},
        {"prompt_sampler": {"name": "retire_solved", "solved_at": 0.4}, "resample": "signal"},
        {"prompt_sampler": "difficulty_pool", "steps_per_generation": 2, "per_device_train_batch_size": 4},
    ],
)
def test_built_in_samplers_resume(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    every = settings.get("steps_per_generation", 1)
    settings = {**STEPS, "max_steps": 6, "save_strategy": "steps", "save_steps": every, **settings}
    whole = train(tiny_model, tmp_path, **settings)
    for step in range(every, 6, every):
        resumed = train(tiny_model, tmp_path / str(step), resume=str(tmp_path / f"checkpoint-{step}"), **settings)
        assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items()), step
        metrics = metrics_of(resumed)
        assert metrics == metrics_of(whole)[-len(metrics) :]


@pytest.mark.slow
def test_a_run_goes_on_with_another_sampler(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "plugin_changes": "warn"}
    for name in ("in_order", None):
        sampled(tiny_model, tmp_path / str(name), name, max_steps=2, **settings)
    at = {"max_steps": 3, **settings}
    for name, says, rows in (("in_order", "the state of 'in_order'", [4, 5]), ("None", "does not say", [0, 1])):
        sampler = Recorded()
        with pytest.warns(ManifestWarning, match=f"'recorded' starts over: the checkpoint .*{says}"):
            sampled(tiny_model, tmp_path / "on", sampler, resume=str(tmp_path / name / "checkpoint-2"), **at)
        assert [outcome.row for outcome in sampler.seen[0]] == rows
    with pytest.warns(ManifestWarning, match="state of the prompt sampler"):
        sampled(tiny_model, tmp_path / "on", None, resume=str(tmp_path / "in_order" / "checkpoint-2"), **at)


CHANGED: dict[str, tuple[dict[str, Any], str, list[int]]] = {
    "fewer rows": ({"prompt_count": 6}, "drew 2 of 8 prompts a round, and this run draws 2 of its own 6", [4, 5]),
    "a larger batch": ({"per_device_train_batch_size": 16}, "and this run draws 4 of its own 8", [4, 5, 6, 7]),
    "smaller groups": ({"num_generations": 2}, "and this run draws 4 of its own 8", [4, 5, 6, 7]),
    "other prompts": ({"train_dataset": Dataset.from_dict({"prompt": ["b "] * 8})}, "draws 2 of its own 8", [4, 5]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_a_run_does_not_resume_on_other_prompts_unsaid(tiny_model: Path, tmp_path: Path, name: str) -> None:
    changes, says, rows = CHANGED[name]
    sampled(tiny_model, tmp_path, "in_order", max_steps=2, save_strategy="steps", save_steps=1)
    at = {"resume": str(tmp_path / "checkpoint-2"), "max_steps": 3, **changes}
    with pytest.raises(ConfigurationError, match=says):
        sampled(tiny_model, tmp_path / "on", "in_order", **at)
    sampler = Recorded(*([*range(first, first + len(rows))] for first in range(0, 6, len(rows))))
    with pytest.warns(ManifestWarning, match=f"'recorded' starts over: the checkpoint .*{says}"):
        sampled(tiny_model, tmp_path / "on", sampler, plugin_changes="warn", **at)
    assert [outcome.row for outcome in sampler.seen[0]] == rows


@pytest.mark.slow
def test_exhausted_prompts_end_the_training(tiny_model: Path, tmp_path: Path) -> None:
    run = sampled(tiny_model, tmp_path, Recorded(), max_steps=50)
    assert run.trainer.state.global_step == 4  # two of eight prompts at a time
    empty = Recorded()
    empty.draw = lambda *arguments: None  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError):
        sampled(tiny_model, tmp_path, empty)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [[1], [1, 1], [1, 8], [-1, 2]])
def test_a_wrong_draw_is_refused(tiny_model: Path, tmp_path: Path, drawn: list[int]) -> None:
    with pytest.raises(PluginOutputError, match="'recorded'"):
        sampled(tiny_model, tmp_path, Recorded(drawn))


def test_what_cannot_be_drawn_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
    with pytest.raises(ConfigurationError, match="save_steps=1"):
        sampled(tiny_model, tmp_path, Recorded(), save_strategy="steps", save_steps=1, **settings)
    stream = prompts(8).to_iterable_dataset()
    with pytest.raises(ConfigurationError, match="prompt_sampler"):
        sampled(tiny_model, tmp_path, Recorded(), train_dataset=stream)
    with pytest.raises(ConfigurationError, match="train_dataset"):
        sampled(tiny_model, tmp_path, "difficulty_pool", prompt_count=1)


def test_outcomes_by_hand() -> None:
    nan = float("nan")
    rewards_N_K = torch.tensor([[1.0, nan], [0.0, nan], [0.1, 2.0], [0.1, 4.0], [nan, nan], [nan, nan]])
    lengths_N = torch.tensor([3.0, 5.0, 1.0, 2.0, 4.0, 4.0])
    found = outcomes_of([7, 2, 5], rewards_N_K, torch.tensor([1.0, 0.5]), lengths_N, ["a", "b"], {1: "too easy"})
    assert [outcome.row for outcome in found] == [7, 2, 5]
    assert found[0].means["a"] == 0.5
    assert found[0].deviations["a"] == pytest.approx(0.5**0.5)
    assert found[0].means["b"] != found[0].means["b"]
    assert found[1].deviations == pytest.approx({"a": 0.0, "b": 2.0**0.5})
    assert found[1].reward == pytest.approx(0.1 + 0.5 * 3.0)
    assert found[2].reward != found[2].reward
    assert [outcome.length for outcome in found] == [4.0, 1.5, 4.0]
    assert [outcome.verdict for outcome in found] == [None, "too easy", None]
