"""The contexts in the real trainer: texts, masks, groups and spans are what TRL really generated and scored."""

import asyncio
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.support import length_reward, scripted_completion, train
from tests.trainer.support import WatchBoth
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.errors import AlignmentError
from trl_grpo_ext.types import Parts


def watched(model: Path, folder: Path, **settings: Any) -> WatchBoth:
    watch = WatchBoth()
    train(model, folder, hooks=[watch], **{"max_steps": 1, **settings})
    return watch


def ids_of(prompt: str, member: int) -> list[int]:
    return scripted_completion(prompt, member, 10)


def test_texts_prompts_and_tokens(tiny_model: Path, tmp_path: Path) -> None:
    (rollout,) = watched(tiny_model, tmp_path).rollouts
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    given = [f"{'abcdefgh'[i]}{i} " for i in (0, 0, 0, 0, 1, 1, 1, 1)]
    assert rollout.prompts == given
    for row, prompt in enumerate(given):
        ids = ids_of(prompt, row % 4)
        assert rollout.completion_ids_B_T[row][rollout.completion_mask_B_T[row] > 0].tolist() == ids
        assert rollout.texts[row] == tokenizer.decode(ids, skip_special_tokens=True) == rollout.completions[row]
        prompt_ids = rollout.prompt_ids_B_P[row][rollout.prompt_mask_B_P[row] > 0].tolist()
        assert prompt_ids == tokenizer(prompt)["input_ids"]
        assert rollout.truncated_B[row].item() == (ids[-1] != 1)
    assert bool(rollout.truncated_B.any())
    assert not bool(rollout.truncated_B.all())
    assert rollout.tool_mask_B_T is None


@pytest.mark.slow
def test_rewards_groups_counts_and_log_probabilities(tiny_model: Path, tmp_path: Path) -> None:
    def sometimes(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        return [None if len(ids) % 2 else float(len(ids)) for ids in completion_ids]

    settings: dict[str, Any] = {"reward_funcs": [length_reward, sometimes], "reward_weights": [2.0, 0.5]}
    settings |= {"gradient_accumulation_steps": 2, "beta": 0.04, "num_iterations": 2, "max_steps": 2}
    (rollout,) = watched(tiny_model, tmp_path, **settings).rollouts
    ids = [ids_of(prompt, row % 4) for row, prompt in enumerate(rollout.prompts)]
    lengths = [len(row) for row in ids]
    assert rollout.lengths_B.tolist() == lengths
    assert rollout.totals.tokens == sum(lengths)
    assert (rollout.totals.sequences, rollout.totals.prompts, rollout.totals.micro_batches) == (16, 4, 2)
    assert rollout.totals.max_completion_length == 10
    assert rollout.reward_names == ("length_reward", "sometimes")
    assert rollout.columns["answer"] == rollout.group_ids_B.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    for row, (first, other) in enumerate(zip(length_reward(ids), sometimes(ids), strict=True)):
        assert rollout.rewards_B_K[row, 0].item() == pytest.approx(first)
        assert bool(torch.isnan(rollout.rewards_B_K[row, 1])) == (other is None)
        assert rollout.rewards_B[row].item() == pytest.approx(2 * first + 0.5 * (other or 0.0), abs=1e-6)
    logps: list[Any] = [rollout.ref_logps_B_T, rollout.old_logps_B_T, rollout.sampling_logps_B_T]
    assert {logps_B_T.shape for logps_B_T in logps} == {rollout.mask_B_T.shape}
    assert (rollout.step, rollout.training) == (0, True)


def alike(prompts: list[str], **columns: Any) -> list[float | None]:
    """The first prompt's completions get the same, the second's nothing at all, the others differ."""
    return [{"a": 0.7, "b": None}.get(prompt[0], float(row)) for row, prompt in enumerate(prompts)]


@pytest.mark.slow
def test_a_row_keeps_what_is_known_of_it_when_it_is_shuffled(tiny_model: Path, tmp_path: Path) -> None:
    watch = watched(tiny_model, tmp_path, reward_funcs=alike, gradient_accumulation_steps=2, prompt_count=4)
    (rollout,) = watch.rollouts
    known = {}
    for row in range(16):
        ids = tuple(rollout.completion_ids_B_T[row].tolist())
        known[ids] = (rollout.rewards_B[row].item(), rollout.group_baselines_B[row].item(), rollout.prompts[row][0])
    assert len(watch.forwards) == 2
    order = []
    for _, forward in watch.forwards:
        assert len(forward.rewards_B) == 8
        for row, ids in enumerate(forward.completion_ids_B_T.tolist()):
            reward, baseline, prompt = known[tuple(ids)]
            order.append(prompt)
            assert forward.rewards_B[row].item() == pytest.approx(reward, nan_ok=True)
            assert forward.group_baselines_B[row].item() == pytest.approx(baseline, nan_ok=True)
            assert forward.zero_variance_B[row].item() == (prompt in "ab")
            assert math.isnan(reward) == (prompt == "b")
    assert order != sorted(order)  # they have been shuffled


def first_two(completions: list[Any], **columns: Any) -> list[Any]:
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [Parts({"two": (0.25, (0, min(2, len(text))))}) if text else None for text in texts]


async def first_two_async(completions: list[Any], **columns: Any) -> list[Any]:
    await asyncio.sleep(0)
    return first_two(completions, **columns)


@pytest.mark.slow
@pytest.mark.parametrize("function", [first_two_async, functools.partial(first_two, unused=1)])
def test_parts_that_rewards_return(tiny_model: Path, tmp_path: Path, function: Any) -> None:
    (rollout,) = watched(tiny_model, tmp_path, reward_funcs=[length_reward, function]).rollouts
    table = rollout.parts[rollout.reward_names[1]]
    assert table.names == ("two",)
    for row, text in enumerate(rollout.texts):
        expected = 0.25 if text else math.nan
        found = [table.scores_B_M[row].item(), rollout.rewards_B_K[row, 1].item()]  # to TRL it is a number
        assert found == pytest.approx([expected] * 2, nan_ok=True)
        wrote = [start < 2 and end > start for start, end in rollout.offsets(row)]
        assert table.tokens(0)[row, : len(wrote)].tolist() == wrote, text


@pytest.mark.slow
def test_parts_that_cannot_be_placed_stop_only_who_reads_them(tiny_model: Path, tmp_path: Path) -> None:
    class OtherTexts(GRPOExtTrainer):
        """Hands reward functions another text than the one that was generated, as a parser of responses may."""

        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
            other = [[{"role": "assistant", "content": f"<{completion}>"}] for completion in completions]
            return super()._calculate_rewards(inputs, prompts, other, ids)

    settings: dict[str, Any] = {"reward_funcs": [first_two], "max_steps": 1}
    assert train(tiny_model, tmp_path, OtherTexts, hooks=["centred"], **settings).gradients
    with pytest.raises(AlignmentError, match=r"'part_credit'.*'first_two' at row 0"):
        train(tiny_model, tmp_path, OtherTexts, hooks=["part_credit"], **settings)


@pytest.mark.slow
def test_what_a_forward_hook_sees(tiny_model: Path, tmp_path: Path) -> None:
    watch = watched(tiny_model, tmp_path, max_steps=2, num_iterations=2)
    assert len(watch.forwards) == 2
    (first_advantages, first), (_, second) = watch.forwards
    assert first.logps_B_T.shape == first.entropies_B_T.shape == first.mask_B_T.shape == first_advantages.shape
    assert not first.logps_B_T.requires_grad
    live = first.mask_B_T > 0
    torch.testing.assert_close(first.logps_B_T[live], first.old_logps_B_T[live])  # before any update
    assert (second.logps_B_T - second.old_logps_B_T)[second.mask_B_T > 0].abs().max() > 1e-3  # after one
    assert (first.step, second.step) == (0, 1)
