"""The asynchronous trainer against TRL's own, and against an independent computation row by row."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import async_grpo_trainer

from tests.asynchronous import support
from tests.asynchronous.support import letters, made, train, trls, without_cuda
from tests.support import Run, relative_gap
from tests.trainer.launch import on_two_ranks
from trl_grpo_ext import load_rewards
from trl_grpo_ext.asynchronous import trainer as ours
from trl_grpo_ext.errors import ConfigurationError, PluginRunError
from trl_grpo_ext.types import HookDeclaration, LossTerms, Parts, Rollout, TokenLossDeclaration

MicroBatches = list[list[Any]]
TREE, SHAPING = {"name": "prefix_tree"}, {"name": "entropy_shaping", "alpha": 0.05, "kappa": 2.0}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> MicroBatches:
    """The samples that TRL packs, by micro-batch, over all ranks."""
    seen: MicroBatches = []
    pack = async_grpo_trainer.DataCollatorForRollout.torch_call

    def spy(collator: Any, examples: Any) -> Any:
        seen.append([sample for row in examples[0] for sample in row.samples])
        return pack(collator, examples)

    monkeypatch.setattr(async_grpo_trainer.DataCollatorForRollout, "torch_call", spy)
    return seen


def tokens(sample: Any) -> int:
    return int(sample["completion_mask"].sum())


def first(sample: Any) -> int:
    return int(sample["completion_mask"].argmax())


def group_of(sample: Any, sent: list[Any]) -> tuple[list[Any], int]:
    """The samples of its group as the worker sent them, and its own place."""
    found = [other for other in sent if other.group_id == sample["group_id"]]
    assert len(found) == 4
    return found, next(place for place, other in enumerate(found) if other.input_ids is sample["input_ids"])


def normalised(rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (deviation + 1e-8) if deviation > 1e-12 else 0.0 for reward in rewards]


def by_group(value: Callable[[list[dict[str, float]]], list[float]]) -> Callable[..., list[float]]:
    """An advantage for each completion, from the metrics of its group."""

    def advantages(sample: Any, sent: list[Any]) -> list[float]:
        group, place = group_of(sample, sent)
        return [value([other.metrics for other in group])[place]] * (len(sample["input_ids"]) - first(sample))

    return advantages


trls_advantages = by_group(lambda metrics: normalised([one["reward"] for one in metrics]))


def by_prefix(sample: Any, sent: list[Any]) -> list[float]:
    """The prefix tree's: the mean reward after a token minus that before it."""
    group, _ = group_of(sample, sent)
    texts = [other.input_ids[int(other.completion_mask.argmax()) :].tolist() for other in group]
    rewards = [other.metrics["reward"] for other in group]

    def value(prefix: list[int]) -> float:
        below: list[float] = [r for r, text in zip(rewards, texts, strict=True) if text[: len(prefix)] == prefix]
        return sum(below) / len(below)

    text = sample["input_ids"][first(sample) :].tolist()
    last = [sample["metrics"]["reward"]]
    values = [value(text[:place]) for place in range(len(text))] + last
    return [after - before for before, after in pairwise(values)]


def trls_weight(sample: Any, batch: list[Any], step: list[Any]) -> float:
    return 1.0 / (2 * sum(map(tokens, batch)))


def token_mean(sample: Any, batch: list[Any], step: list[Any]) -> float:
    return 1.0 / sum(map(tokens, step))


def seq_mean_token_mean(sample: Any, batch: list[Any], step: list[Any]) -> float:
    return 1.0 / (len(step) * tokens(sample))


def prompt_mean(sample: Any, batch: list[Any], step: list[Any]) -> float:
    of_prompt: int = sum(tokens(other) for other in step if other["group_id"] == sample["group_id"])
    return 1.0 / (len({other["group_id"] for other in step}) * of_prompt)


def plain_model(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")


def gradient(
    model: Path,
    step: MicroBatches,
    sent: list[Any],
    weight: Callable[..., float] = trls_weight,
    advantages: Callable[..., list[float]] = trls_advantages,
    shaped: bool = False,
    further: Callable[..., torch.Tensor] | None = None,
    policy: Any = None,
) -> dict[str, torch.Tensor]:
    """The gradient of a step: a fresh model, one row at a time, plain arithmetic."""
    policy = plain_model(model) if policy is None else policy
    loss = torch.zeros(())
    for batch in step:
        for sample in batch:
            start, ids = first(sample), torch.as_tensor(sample["input_ids"])
            table = policy(input_ids=ids[None]).logits[0].log_softmax(-1)
            logps = table[torch.arange(start - 1, len(ids) - 1), ids[start:]]
            old, advantage = torch.as_tensor(sample["old_log_probs"][start:]), torch.tensor(advantages(sample, sent))
            if shaped:
                entropies = -(table.exp() * table).sum(-1)[start - 1 : -1].detach()
                advantage = advantage + torch.minimum(0.05 * entropies, advantage.abs() / 2.0)
            ratio = (logps - old).exp()
            terms = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if further is not None:
                terms = further(terms, logps, old, advantage)
            trained = torch.as_tensor(sample["completion_mask"][start:])
            loss = loss + weight(sample, batch, [one for of_step in step for one in of_step]) * (terms * trained).sum()
    torch.autograd.backward(loss)
    return {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}


class Short:
    """A shaper: pays for what is left of ten tokens."""

    declares = HookDeclaration(role="shaper", independent=True)

    def on_rewards(self, rollout: Rollout) -> torch.Tensor:
        return (10.0 - rollout.lengths_B) / 5.0


class Replacing:
    """A token loss in place of TRL's: without its clip, and with a number that travels from the rollout."""

    declares = TokenLossDeclaration(replaces=True)

    def on_rollout(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        return {"half": 0.5 * rollout.mask_B_T}

    def loss(self, terms: LossTerms) -> torch.Tensor:
        return -terms.ratio_B_T * terms.advantages_B_T * terms.carried_B_T["half"]


def digits(completions: list[Any], **columns: Any) -> list[float]:
    return letters(completions)


def equal(completions: list[Any], **columns: Any) -> list[float]:
    return [0.1] * len(completions)


def even(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    return [None if ids[0] % 3 == 0 else float(len(ids) % 2) for ids in completion_ids]


def weighted(metrics: list[dict[str, float]]) -> list[float]:
    sums = [0.5 * m["rewards/digits"] + 3.0 * float(np.nan_to_num(m["rewards/even"])) for m in metrics]
    assert [m["reward"] for m in metrics] == pytest.approx(sums)
    return normalised(sums)


def with_short(metrics: list[dict[str, float]]) -> list[float]:
    sums = [m["rewards/letters"] + m["rewards/Short"] for m in metrics]
    assert len(set(sums)) > 1
    return [4.0 / 3.0 * (one - sum(sums) / 4.0) for one in sums]  # leave one out


def squared(terms: torch.Tensor, logps: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    return terms + 0.5 * (logps - old).square()


def unclipped(terms: torch.Tensor, logps: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    return -0.5 * (logps - old).exp() * advantage


def parts_of(completions: list[Any], **columns: Any) -> list[Parts]:
    """One part: the first character, right if it is a digit."""
    texts = [said[0]["content"] for said in completions]
    return [Parts({"start": (float(text[:1].isdigit()), (0, 1) if text else None)}) for text in texts]


SQUARED = {"name": "squared_log_ratio", "coefficient": 1.0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weights of rewards": ({"reward_funcs": (digits, even)}, {"advantages": by_group(weighted)}),
    "a shaper": ({"advantage_hooks": [Short(), "leave_one_out"]}, {"advantages": by_group(with_short)}),
    "a rollout hook": ({"advantage_hooks": [TREE]}, {"advantages": by_prefix}),
    "a forward hook": ({"advantage_hooks": [SHAPING]}, {"shaped": True}),
    "token_mean": ({"loss_aggregation": "token_mean"}, {"weight": token_mean}),
    "seq_mean_token_mean": ({"loss_aggregation": "seq_mean_token_mean"}, {"weight": seq_mean_token_mean}),
    "prompt_mean, token budget": ({"loss_aggregation": "prompt_mean", "token_budget": 60}, {"weight": prompt_mean}),
    "token_mean_step reduces": ({"loss_aggregation": "token_mean_step"}, {"weight": token_mean}),
    "a token loss": ({"token_losses": [SQUARED]}, {"further": squared}),
    "a token loss in place of TRL's": ({"token_losses": [Replacing()]}, {"further": unclipped}),
    "all of it": (
        {
            "advantage_hooks": [TREE, SHAPING],
            "loss_aggregation": "seq_mean_token_mean",
            "token_losses": [SQUARED],
            "group_filter": "signal",
            "token_records": 8,
        },
        {"advantages": by_prefix, "shaped": True, "weight": seq_mean_token_mean, "further": squared},
    ),
}


def run(model: Path, folder: Path, given: dict[str, Any], **settings: Any) -> Run:
    given = dict(given)
    budget, functions = given.pop("token_budget", 0), list(given.pop("reward_funcs", [letters]))
    if len(functions) > 1:
        names = [f"{__name__}:{function.__name__}" for function in functions]
        functions = load_rewards([{"name": names[0], "weight": 0.5}, {"name": names[1], "weight": 3.0}])
    return train(model, folder, given=given, reward_funcs=functions, token_budget=budget, **settings)


def test_nothing_selected_is_trls(tiny_model: Path, tmp_path: Path) -> None:
    ours, theirs = (each(tiny_model, tmp_path / each.__name__, max_steps=2) for each in (train, trls))
    assert all(torch.equal(ours.weights[name], theirs.weights[name]) for name in theirs.weights)
    assert relative_gap(ours.weights, train(tiny_model, tmp_path, learning_rate=0.0).weights) > 1e-2
    names = [{name for name in run.logs[0] if not name.startswith("perf/")} for run in (ours, theirs)]
    assert names[0] == names[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_definition(
    case: str, tiny_model: Path, tmp_path: Path, packed: MicroBatches
) -> None:
    given, definition = CASES[case]
    found = run(tiny_model, tmp_path, given)
    expected = gradient(tiny_model, packed[:2], found.trainer.rollout_worker.sent, **definition)
    assert relative_gap({name: found.gradients[0][name] for name in expected}, expected) < 1e-5
    assert 0.05 < found.logs[0]["clip_ratio/region_mean"] < 0.9
    assert found.logs[0]["batch/packing_ratio"] > 1.1


EXACT = ("prompt_mean", "token_mean_step")
CUTS = {"1x16": (16, 1), "2x8": (8, 2), "4x4": (4, 4)}


def gradients_of_cut(model: Path, folder: Path, aggregations: Sequence[str | None], rows: int, steps: int) -> Any:
    """The gradient of the first step, with each of the aggregations."""
    cut = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}
    hooks = {"advantage_hooks": [{**TREE, "mode": "add"}, SHAPING]}
    runs = [run(model, folder, {**hooks, "loss_aggregation": one}, **cut) for one in aggregations]
    return [found.gradients[0] for found in runs]


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_cut(tiny_model: Path, tmp_path: Path) -> None:
    found = {cut: gradients_of_cut(tiny_model, tmp_path, [*EXACT, None], *sizes) for cut, sizes in CUTS.items()}
    for cut in ("2x8", "4x4"):
        *exact, trls_own = map(relative_gap, found[cut], found["1x16"])
        assert max(exact) < 1e-5
        assert trls_own > 5e-3  # which is why there are aggregations


def gradients_on_ranks(model: str, folder: str, aggregations: Sequence[str]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        without_cuda(patch)
        return gradients_of_cut(Path(model), Path(folder), aggregations, 4, 2)


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_ranks(tiny_model: Path, tmp_path: Path) -> None:
    ranks = on_two_ranks(gradients_on_ranks, tiny_model, tmp_path, EXACT, timeout=800)
    one = gradients_of_cut(tiny_model, tmp_path, EXACT, 8, 2)
    for of_rank in ranks:
        assert max(map(relative_gap, of_rank, one)) < 1e-5


def test_a_filter_that_leaves_nothing_stops_the_run(tiny_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(ours, "MOST_DROPPED", 3)
    with pytest.raises(PluginRunError, match="3 groups"):
        run(tiny_model, tmp_path, {"group_filter": "signal", "reward_funcs": [equal]})


@pytest.mark.slow
def test_parts_pay_the_tokens_that_wrote_them(tiny_model: Path, tmp_path: Path) -> None:
    hook = {"name": "part_credit", "completeness": "none"}
    given = {"advantage_hooks": [hook], "token_records": 16, "reward_funcs": [parts_of]}
    found = run(tiny_model, tmp_path, given, save_strategy="steps", save_steps=1)
    rows = pyarrow.parquet.read_table(tmp_path / "token_records" / "step_00001.parquet").to_pylist()
    assert len(rows) == 16
    assert any(any(row["advantage"]) for row in rows)
    for row in rows:
        group = [other for other in rows if other["group"] == row["group"]]
        there = [other["reward"] for other in group if other["part_present"] == [True]]
        expected = [0.0] * len(row["token_ids"])
        if row["part_present"] == [True]:
            expected[0] = row["reward"] - np.mean(there)
        assert row["parts"] == ["parts_of/start"]
        assert row["advantage"] == pytest.approx(expected, abs=1e-6)
    assert found.logs[0]["parts/parts_of/start/mean"] > 0


class Remembers(Short):
    state_dict = load_state_dict = dict


REFUSED: dict[str, Any] = {
    "batch_whitening.*beyond a group": {"advantage_hooks": ["batch_whitening"]},
    "kl_in_reward.*needs ref_logps": {"advantage_hooks": ["kl_in_reward"]},
    "Remembers.*has a state": {"advantage_hooks": [Remembers(), "leave_one_out"]},
    "Short.*add an estimator": {"advantage_hooks": [Short()]},
    "self_distilled.*needs the teacher": {"advantage_hooks": [{"name": "self_distilled", "prompt": "answer"}]},
    "both replace": {"token_losses": [Replacing(), Replacing()]},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_act_is_refused(said: str, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=said):
        made(tiny_model, tmp_path, given=REFUSED[said])


def test_a_worker_of_the_users_own(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.HereWorker, "_loop_cls", type("Theirs", (support.HereWorker._loop_cls,), {}))
    with pytest.raises(ConfigurationError, match="HereWorker"):
        made(tiny_model, tmp_path, given={"advantage_hooks": ["centred"]})
    made(tiny_model, tmp_path)


def test_forked_conversations_are_refused(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = support.HereWorker.sequences
    monkeypatch.setattr(support.HereWorker, "sequences", lambda *arguments: 2 * fork(*arguments))
    with pytest.raises(ConfigurationError, match="fork_threshold_tokens"):
        run(tiny_model, tmp_path, {"advantage_hooks": ["centred"]})
    assert math.isfinite(run(tiny_model, tmp_path, {}).logs[0]["loss"])
