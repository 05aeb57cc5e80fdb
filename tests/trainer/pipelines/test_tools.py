"""Tools, environments and rollout functions of TRL's trainer: what hooks see, and which tokens are trained on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tests.credit.test_turns import add, divide
from tests.support import Recorder, arguments, length_reward, relative_gap, train
from tests.trainer.support import (
    ASKED,
    END,
    EXACT,
    START,
    TEMPERATURE,
    Falling,
    assert_gradient,
    biases,
    call,
    expected_gradient,
    result,
    talker,
)
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.trainer.batch import BatchKeys
from trl_grpo_ext.types import Parts

ADD, FAIL, GUESS = call("add", a=2, b=3), call("divide", a=1, b=0), "not sure."
SUM, GAVE_UP = "it is 5.", "no."
CONVERSATIONS = {
    # What the model wrote and what was written for it, in turns; the second is never trained on.
    "ADD": [ADD + END, result("5"), SUM + END],
    "FAIL": [FAIL + END, result("{'error': 'division by zero'}"), GAVE_UP + END],
    "GUESS": [GUESS + END],
}


def answered(completions: list[Any], **columns: Any) -> list[float]:
    """1 for the sum after a tool call, 0.25 for a guess: it has to see the whole conversation."""
    answers = [[message["content"] for message in messages if message["role"] == "tool"] for messages in completions]
    return [{(): 0.25, ("5",): 1.0}.get((*answer,), 0.0) for answer in answers]


def full_stops(completions: list[Any], **columns: Any) -> list[Any]:
    """A part on the full stop of the last message, worth more behind a sum."""
    said = [messages[-1]["content"] for messages in completions]
    return [Parts({"stop": (0.5 if "5" in text else 0.125, (len(text) - 1, len(text)))}) for text in said]


SCRIPTS = {ASKED: [ADD, FAIL, GUESS], result("5"): [SUM], result("{'error': 'division by zero'}"): [GAVE_UP]}


def tool_run(
    model: Path, folder: Path, hooks: list[Any] | None, rewards: list[Any], **settings: Any
) -> tuple[Any, Recorder]:
    """A training with tools; without `hooks` TRL's own."""
    tokenizer = talker(model)
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in ("2+3?", "what is 2 and 3?")]})
    recorder = Recorder()
    common = {"max_completion_length": 200, "temperature": TEMPERATURE, "seed": 5}
    common["generation_kwargs"] = biases(tokenizer, SCRIPTS)
    given = {"train_dataset": data, "processing_class": tokenizer, "callbacks": [recorder], "tools": [add, divide]}
    if hooks is None:
        trainer: Any = GRPOTrainer(str(model), rewards, arguments(folder, GRPOConfig, **common, **settings), **given)
    else:
        args = arguments(folder, **common, **settings)
        trainer = GRPOExtTrainer(str(model), rewards, args, advantage_hooks=hooks, **given)
    torch.manual_seed(7)
    trainer.train()
    return trainer, recorder


def conversation_of(tokenizer: Any, ids: list[int]) -> list[str]:
    text = "".join(tokenizer.convert_ids_to_tokens(ids))
    return next(turns for turns in CONVERSATIONS.values() if "".join(turns) == text)


def expected_mask(turns: list[str], tokenizer: Any) -> list[int]:
    return [int(number % 2 == 0) for number, turn in enumerate(turns) for _ in tokenizer(turn)["input_ids"]]


def check_credit(trainer: Any, recorder: Recorder, hook: Falling, model: Path) -> list[list[str]]:
    """Masks, texts and offsets are those of the conversations, and the gradient that of the model's own tokens."""
    (rollout,) = hook.rollouts
    tokenizer = trainer.processing_class
    rows, conversations, advantages, weights = [], [], [], []
    for row in range(8):
        ids = rollout.completion_ids_B_T[row][rollout.completion_mask_B_T[row] > 0].tolist()
        turns = conversation_of(tokenizer, ids)
        live = expected_mask(turns, tokenizer)
        assert rollout.mask_B_T[row, : len(ids)].tolist() == live
        assert rollout.tool_mask_B_T[row, : len(ids)].tolist() == live
        assert not bool(rollout.mask_B_T[row, len(ids) :].any())
        roles = [message["role"] for message in rollout.completions[row]]
        assert roles == ["assistant", "tool", "assistant"][: len(turns)]
        text = rollout.texts[row]
        assert text == "".join(turns).replace(START, "").replace(END, "")
        tokens = tokenizer.convert_ids_to_tokens(ids)
        for token, (start, end) in zip(tokens, rollout.offsets(row), strict=True):
            assert text[start:end] == ("" if token in (START, END) else token)
        prompt = rollout.prompt_ids_B_P[row][rollout.prompt_mask_B_P[row] > 0].tolist()
        rows.append((prompt, ids))
        conversations.append(turns)
        value = hook.seen[0][row][rollout.mask_B_T[row] > 0][0].item()
        advantages.append([value / (1 + t) for t in range(len(ids))])
        weights.append([live_token / sum(live) / 8 for live_token in live])
        trained = trainer._buffered_inputs[0]
        places = [p for p in range(8) if trained["completion_ids"][p, : len(ids)].tolist() == ids]
        assert places
        assert all(not bool(trained["advantages"][p][rollout.mask_B_T[row] == 0].any()) for p in places)
        assert all(not bool(trained[BatchKeys.weights][p][rollout.mask_B_T[row] == 0].any()) for p in places)
    assert relative_gap(recorder.gradients[0], expected_gradient(model, rows, advantages, weights, TEMPERATURE)) < EXACT
    everywhere = [[1.0 / len(ids) / 8] * len(ids) for _, ids in rows]  # if what the tool wrote counted too
    blamed = expected_gradient(model, rows, advantages, everywhere, TEMPERATURE)
    assert relative_gap(blamed, recorder.gradients[0]) > 0.01
    return conversations


def test_tools(tool_model: Path, tmp_path: Path) -> None:
    hook = Falling()
    settings = {"max_steps": 1, "loss_aggregation": "seq_mean_token_mean"}
    trainer, recorder = tool_run(tool_model, tmp_path, [hook], [answered, full_stops], **settings)
    conversations = check_credit(trainer, recorder, hook, tool_model)
    assert {tuple(turns) for turns in conversations} == {tuple(turns) for turns in CONVERSATIONS.values()}
    (rollout,) = hook.rollouts
    scores = {1: 0.25, 3: 1.0}
    for row, turns in enumerate(conversations):
        expected = 0.0 if turns[0].startswith(FAIL) else scores[len(turns)]
        worth = 0.5 if expected == 1.0 else 0.125
        assert rollout.rewards_B_K[row].tolist() == [expected, worth]
        # The full stop of the last message, in characters of the whole conversation.
        table = rollout.parts["full_stops"]
        assert table.scores_B_M[row].tolist() == [worth]
        (place,) = table.tokens(0)[row].nonzero().flatten().tolist()
        start, end = rollout.offsets(row)[place]
        assert (rollout.texts[row][start:end], end) == (".", len(rollout.texts[row]))
    assert recorder.logs[0]["tools/call_frequency"] == sum(len(turns) == 3 for turns in conversations) / 8


@pytest.mark.slow
@pytest.mark.parametrize("compact", ["off", "exact"])
def test_a_rollout_function_with_turns_of_an_environment(tiny_model: Path, tmp_path: Path, compact: str) -> None:
    written = [[5, 6, 7, 8, 9, 1], [9, 8, 1], [7, 1], [6, 5, 4, 3]]
    lives = [[1, 1, 0, 0, 1, 1], [1, 0, 1], [1, 1], [1, 0, 0, 0]]

    def rollout_func(prompts_: list[str], trainer: Any) -> dict[str, Any]:
        ids = written * (len(prompts_) // 4)
        sampled = {"completion_ids": ids, "logprobs": [[-1.0] * len(i) for i in ids]}
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts_]
        return {**sampled, "prompt_ids": prompt_ids, "env_mask": lives * (len(prompts_) // 4)}

    hook = Falling()
    settings = {"loss_aggregation": "token_mean", "compact_updates": compact, "gradient_accumulation_steps": 2}
    run = train(tiny_model, tmp_path, hooks=["centred", hook], rollout_func=rollout_func, max_steps=1, **settings)
    (rollout,) = hook.rollouts
    rewards = length_reward(written)
    tokens = 4 * sum(map(sum, lives))
    rows, advantages, weights = [], [], []
    for row in range(16):
        ids, live = written[row % 4], lives[row % 4]
        assert rollout.mask_B_T[row, : len(ids)].tolist() == live
        rows.append((rollout.prompt_ids_B_P[row][rollout.prompt_mask_B_P[row] > 0].tolist(), ids))
        advantages.append([(rewards[row % 4] - sum(rewards) / 4) / (1 + t) for t in range(len(ids))])
        weights.append([one / tokens for one in live])
    assert_gradient(run, tiny_model, rows, advantages, weights)


@pytest.mark.slow
def test_tools_with_nothing_selected_are_trls(tool_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
    theirs = tool_run(tool_model, tmp_path / "trl", None, [answered], **settings)
    ours = tool_run(tool_model, tmp_path / "ours", [], [answered], **settings)
    assert ours[0]._logs["completion"] == theirs[0]._logs["completion"]
    assert [relative_gap(*pair) for pair in zip(ours[1].gradients, theirs[1].gradients, strict=True)] == [0.0, 0.0]
