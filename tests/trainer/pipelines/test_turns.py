"""Hooks and rewards by turn in trainings with tools: parity with TRL, compact updates, shared prompts, groups sampled
again, checkpoints, environments' own rewards."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.support import Recorder, arguments, relative_gap
from tests.trainer.pipelines.page import expected_gradient
from tests.trainer.pipelines.test_tools import (
    ASKED,
    END,
    EXACT,
    RESPONSE,
    TEMPERATURE,
    Calculator,
    add,
    answered,
    biases,
    call,
    divide,
    result,
    save_tool_model,
)
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer, Rollout
from trl_grpo_ext.credit.turns import true_runs
from trl_grpo_ext.trainer.compact.shared import Price, SharedPrompts
from trl_grpo_ext.types import TurnScores

SCRIPTS = {  # two turns in every completion, so that a group's turns are compared with all of it
    ASKED: [call("add", a=2, b=3), call("divide", a=1, b=0)],
    result("5"): ["it is 5.", "so 5."],
    result("{'error': 'division by zero'}"): ["no."],
}


class CountingCalculator(Calculator):
    """An environment that knows what each of its steps was worth."""

    def get_reward(self) -> float:
        return TurnScores([0.5 * self.asked])


class Watch:
    role = "transform"

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, Rollout]] = []

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        self.seen.append((advantages_B_T, rollout))
        return advantages_B_T


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tool_model(tmp_path_factory.mktemp("tool_model"))


def last_letters(completions: list[Any], **columns: Any) -> list[float]:
    """Different for nearly all: what the last message has in it, and whether a call failed."""
    return [len(messages[-1]["content"]) / 4 - ("error" in messages[1]["content"]) for messages in completions]


def run(
    model: Path,
    folder: Path,
    hooks: list[Any] | None,
    rewards: list[Any],
    questions: tuple[str, ...] = ("2+3?", "what is 2 and 3?"),
    resume: str | None = None,
    **more: Any,
) -> tuple[Any, Recorder]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = RESPONSE
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": question}] for question in questions]})
    recorder = Recorder()
    settings = {
        "generation_kwargs": {"sequence_bias": biases(tokenizer, SCRIPTS)},
        "max_completion_length": 200,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "temperature": TEMPERATURE,
        "seed": 5,
    }
    trainer_class = GRPOTrainer if hooks is None else GRPOExtTrainer
    ours = {} if hooks is None else {"advantage_hooks": hooks}
    more = {"tools": [add, divide], **more}
    if (settings_more := more.pop("settings", None)) is not None:
        settings |= settings_more
    trainer = trainer_class(
        str(model),
        rewards,
        arguments(folder, GRPOConfig if hooks is None else GRPOExtConfig, **settings),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[recorder],
        **ours,
        **more,
    )
    torch.manual_seed(7)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, recorder


def test_the_outcomes_advantage_for_all_turns_is_trls(tool_model: Path, tmp_path: Path) -> None:
    trl, theirs = run(tool_model, tmp_path / "trl", None, [last_letters])
    assert len({*trl._logs["rewards"]["last_letters"]}) > 1
    hooks: dict[str, list[Any]] = {
        "off": [],
        "completion": [{"name": "turn_rewards", "baseline": "completion"}],
        "turn": ["turn_rewards"],
        "outcome": [{"name": "turn_rewards", "form": "turn_plus_outcome"}],
        "episodes": [{"name": "gigpo", "step_weight": 0.0, "normalise": True}],
    }
    for name, chosen in hooks.items():
        trainer, ours = run(tool_model, tmp_path / name, chosen, [last_letters])
        for step, gradient in enumerate(theirs.gradients):
            gap = relative_gap(ours.gradients[step], gradient)
            # GiGPO has 1e-6 beside the deviation, where TRL has 1e-4.
            assert gap == 0.0 if name == "off" else gap < (1e-6 if name != "episodes" else 1e-3)
        assert trainer._logs["completion"] == trl._logs["completion"]


BY_TURN = ["turn_rewards", {"name": "tool_errors", "penalty": 0.25}, {"name": "masked_turns", "pick": "calls"}]
MODES: dict[str, dict[str, Any]] = {
    "off": {},
    "exact": {"compact_updates": "exact"},
    "shared": {"compact_updates": "exact", "share_prompts": True},
}


@pytest.fixture
def cheap_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are shared wherever that saves tokens, however fast the machine is."""
    monkeypatch.setattr(SharedPrompts, "measure", lambda self, *rest: setattr(self, "price", Price(overhead=2.0)))


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in trainer.model.named_parameters()}


@pytest.mark.usefixtures("cheap_sharing")
def test_compact_updates_and_shared_prompts_are_the_same(tool_model: Path, tmp_path: Path) -> None:
    """With completions that are cut off within their second turn, none of which counts."""
    common = {"rewards": ["tool_use"], "loss_aggregation": "token_mean", "mask_truncated_completions": True}
    common |= {"max_completion_length": 103, "max_steps": 3}
    runs = {}
    for mode, settings in MODES.items():
        watch = Watch()
        hooks = [*BY_TURN, watch]
        runs[mode] = run(tool_model, tmp_path / mode, hooks, [last_letters], settings={**common, **settings})
        kinds = {
            (len(rollout.turns(row)), bool(rollout.mask_B_T[row].any()))
            for _, rollout in watch.seen
            for row in range(len(rollout.texts))
        }
        assert kinds == {(2, True), (2, False)}
    off, plain = runs.pop("off")
    assert any(bool(gradient.any()) for gradient in plain.gradients[0].values())
    for trainer, recorder in runs.values():
        assert trainer._logs["completion"] == off._logs["completion"]
        steps = zip(recorder.gradients, plain.gradients, strict=True)
        assert max(relative_gap(*step) for step in steps) < 1e-5
        assert relative_gap(weights_of(trainer), weights_of(off)) < 1e-5
    for log in runs["shared"][1].logs[:3]:  # one row for each group: the prompts are computed once
        assert log["compact/distinct_tokens"] < log["compact/live_tokens"] > log["compact/computed_tokens"]


def test_an_environments_own_rewards_by_turn(tool_model: Path, tmp_path: Path) -> None:
    watch = Watch()
    hooks = [{"name": "turn_rewards", "form": "turn_plus_outcome", "normalise": False}, watch]
    own = {"tools": None, "environment_factory": CountingCalculator}
    trainer, _ = run(tool_model, tmp_path, hooks, [answered], **own)
    advantages_B_T, rollout = watch.seen[0]
    assert list(rollout.reward_turns) == ["CountingCalculator"]
    worth = rollout.reward_turns["CountingCalculator"]
    for row in range(len(rollout.texts)):
        first, second = rollout.turns(row)
        (made,) = first.calls
        assert made.outcome == ("returned" if made.name == "add" else "raised")
        assert worth[row] == [0.5, 0.0]
        group = [j for j in range(len(rollout.texts)) if rollout.group_ids_B[j] == rollout.group_ids_B[row]]
        outcome = rollout.rewards_B_K[row, 0] - sum(rollout.rewards_B_K[j, 0] for j in group) / len(group)
        for turn, expected in ((first, float(outcome)), (second, float(outcome))):  # all turns have 0.5: nothing apart
            values = advantages_B_T[row, slice(*turn.tokens)].tolist()
            assert values == pytest.approx([expected] * len(values), abs=1e-6)
        between = slice(first.tokens[1], second.tokens[0])
        assert not bool(advantages_B_T[row, between].any())
    assert trainer.reward_func_names == ["answered", "CountingCalculator"]


QUESTIONS = ("flat?", "flat or not?", "2+3?", "what is 2 and 3?", "3 and 2?", "flat, too?", "add 3 to 2?", "2 and 3?")


def worth_of(messages: list[dict[str, Any]]) -> list[float]:
    """Of each turn: how long it is, and half off where its call raised."""
    after = [*messages[1:], {"content": ""}]
    pairs = [(one, answer) for one, answer in zip(messages, after, strict=True) if one["role"] == "assistant"]
    return [len(one["content"]) / 8 - 0.5 * ("error" in answer["content"]) for one, answer in pairs]


def worth(prompts: list[Any], completions: list[Any], **columns: Any) -> list[Any]:
    """A value for each turn, or the same number for all where the question is flat."""
    asked = [prompt[0]["content"] for prompt in prompts]
    return [
        1.0 if "flat" in text else TurnScores(worth_of(messages))
        for text, messages in zip(asked, completions, strict=True)
    ]


class Rounds:
    """A filter that keeps the groups that are not flat, and every round as it saw it."""

    def __init__(self, reads_advantages: bool) -> None:
        self.seen: list[Rollout] = []
        self.reads_advantages = reads_advantages

    def keep(self, rollout: Rollout) -> list[bool | str]:
        self.seen.append(rollout)
        flat = ["flat" in prompt[0]["content"] for prompt in rollout.prompts]
        if rollout.advantages_B_T is not None:
            assert rollout.advantages_B_T.view(2, -1).any(dim=1).tolist() == [not flat[0], not flat[4]]
        return ["flat" if one else True for one in flat]


class TokenMean:
    """The mean over tokens, and the batches that are trained on."""

    def __init__(self) -> None:
        self.seen: list[Rollout] = []

    def weights(self, rollout: Rollout) -> torch.Tensor:
        self.seen.append(rollout)
        return rollout.mask_B_T / rollout.totals.tokens


def known_of(rollout: Rollout, row: int) -> dict[str, Any]:
    """All that is known of a completion and its turns, without padding."""
    size = int(rollout.completion_mask_B_T[row].sum())
    assert rollout.tool_mask_B_T is not None
    assert not bool(rollout.mask_B_T[row, size:].any())
    assert set(rollout.turns_B_T[row, size:].tolist()) <= {-1}
    ids, prompt_ids = rollout.completion_ids_B_T[row, :size], rollout.prompt_ids_B_P[row]
    return {
        "prompt_ids": prompt_ids[rollout.prompt_mask_B_P[row] > 0].tolist(),
        "ids": ids.tolist(),
        "counts": rollout.mask_B_T[row, :size].tolist(),
        "tool_mask": rollout.tool_mask_B_T[row, :size].tolist(),
        "cut_off": bool(rollout.truncated_B[row]),
        "numbers": rollout.turns_B_T[row, :size].tolist(),
        "turns": rollout.turns(row),
        "worth": rollout.reward_turns["worth"][row] if "worth" in rollout.reward_turns else None,
        "rewards": rollout.rewards_B_K[row].tolist(),
        "messages": rollout.completions[row],
        "offsets": rollout.offsets(row),
    }


def advantages_by_hand(group: list[dict[str, Any]]) -> list[list[float]]:
    """`turn_rewards` on each token of a group: rewards to go, against those of all that got as far."""
    returns = [[sum(one["worth"][turn:]) for turn in range(len(one["worth"]))] for one in group]
    found = []
    for one, row in zip(group, returns, strict=True):
        columns = [[other[turn] for other in returns if len(other) > turn] for turn in range(len(row))]
        by_turn = [
            (value - statistics.mean(column)) / (statistics.stdev(column) + 1e-4)
            for value, column in zip(row, columns, strict=True)
        ]
        found.append([0.0 if number < 0 else by_turn[int(number)] for number in one["numbers"]])
    return found


@pytest.mark.usefixtures("cheap_sharing")
@pytest.mark.parametrize("reads_advantages", [False, True])
def test_groups_sampled_again_keep_their_turns(tool_model: Path, tmp_path: Path, reads_advantages: bool) -> None:
    common = {"max_steps": 3, "shuffle_dataset": False, "save_strategy": "steps", "save_steps": 1}
    common |= {"max_completion_length": 103, "mask_truncated_completions": True}

    def refilled(name: str, resume: str | None = None, **mode: Any) -> tuple[Any, Recorder, list[Rollout], Rounds]:
        rounds, mean = Rounds(reads_advantages), TokenMean()
        settings = {**common, **mode}
        more = {"resample": {"filter": rounds}, "loss_aggregation": mean, "settings": settings}
        done = run(tool_model, tmp_path / name, ["turn_rewards"], [worth], QUESTIONS, resume, **more)
        return *done, mean.seen, rounds

    trainer, recorder, batches, rounds = refilled("off")
    sampled = [known_of(rollout, row) for rollout in rounds.seen for row in range(8)]
    trained = [[known_of(rollout, row) for row in range(8)] for rollout in batches]
    assert [log["groups/rounds"] for log in recorder.logs[:3]] == [2, 2, 2]
    assert [log["groups/surplus"] for log in recorder.logs[:3]] == [0, 1, 0]
    places = [[8, 12], [16, 24], [40, 44]]  # in what was sampled, of the groups that are trained on
    for batch, starts in zip(trained, places, strict=True):
        assert batch == [one for start in starts for one in sampled[start : start + 4]]
    tokenizer = trainer.processing_class
    for one in [one for batch in trained for one in batch]:
        said = [message for message in one["messages"] if message["role"] == "assistant"]
        runs = true_runs([number >= 0 for number in one["numbers"]])
        assert [turn.tokens for turn in one["turns"]] == runs
        assert one["counts"] == [float(number >= 0 and not one["cut_off"]) for number in one["numbers"]]
        assert len(runs) == len(said) == 2
        assert one["worth"] == worth_of(one["messages"])
        assert one["rewards"] == [pytest.approx(sum(one["worth"]))]
        for (first, end), message, turn in zip(runs, said, one["turns"], strict=True):
            assert one["numbers"][first:end] == [turn.number] * (end - first)
            text = "".join(tokenizer.convert_ids_to_tokens(one["ids"][first:end]))
            assert text.startswith(message["content"])
            assert text.endswith(END) or (one["cut_off"] and end == len(one["ids"]))
            assert turn.text == text.removesuffix(END)
    first = trained[0]
    advantages = [values for start in (0, 4) for values in advantages_by_hand(first[start : start + 4])]
    tokens = sum(sum(one["counts"]) for one in first)
    weights = [[counts / tokens for counts in one["counts"]] for one in first]
    rows = [(one["prompt_ids"], one["ids"]) for one in first]
    expected = expected_gradient(tool_model, rows, advantages, weights, TEMPERATURE)
    assert relative_gap(recorder.gradients[0], expected) < EXACT

    assert {one["cut_off"] for batch in trained for one in batch} == {False, True}

    if not reads_advantages:
        other, shared, same, _ = refilled("shared", **MODES["shared"])
        assert [[known_of(rollout, row) for row in range(8)] for rollout in same] == trained
        assert max(relative_gap(*step) for step in zip(shared.gradients, recorder.gradients, strict=True)) < 1e-5
        assert relative_gap(weights_of(other), weights_of(trainer)) < 1e-5
        assert shared.logs[0]["compact/computed_tokens"] < shared.logs[0]["compact/live_tokens"]
        return
    checkpoint = tmp_path / "off" / "checkpoint-2"
    again, _, last, _ = refilled("off", str(checkpoint))
    assert [known_of(last[-1], row) for row in range(8)] == trained[-1]
    assert relative_gap(weights_of(again), weights_of(trainer)) < 1e-6
