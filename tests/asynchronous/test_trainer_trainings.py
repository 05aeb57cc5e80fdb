"""Trainings with adapters, experts and tools, and one that resumes."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl.experimental.async_grpo import packing

from tests.asynchronous.support import HereWorker, made, tokenizer_of, train, trls, without_cuda
from tests.asynchronous.test_trainer import (
    SHAPING,
    TREE,
    MicroBatches,
    by_prefix,
    gradient,
    normalised,
    packed,  # noqa: F401  (a fixture)
    plain_model,
    seq_mean_token_mean,
)
from tests.support import Recorder, relative_gap
from tests.trainer.conftest import tiny_moe  # noqa: F401  (a fixture)
from trl_grpo_ext import load_rewards
from trl_grpo_ext.errors import ManifestError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)


def test_an_adapter(tiny_model: Path, tmp_path: Path, packed: MicroBatches) -> None:  # noqa: F811
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    given = {"advantage_hooks": [TREE], "loss_aggregation": "seq_mean_token_mean", "peft_config": adapter}
    found = train(tiny_model, tmp_path, given=given, learning_rate=0.0)
    policy = get_peft_model(plain_model(tiny_model), adapter)
    policy.load_state_dict(found.weights, strict=False)
    sent = found.trainer.rollout_worker.sent
    expected = gradient(tiny_model, packed[:2], sent, seq_mean_token_mean, by_prefix, policy=policy)
    assert all("lora" in name for name in expected)
    assert relative_gap(found.gradients[0], expected) < 1e-5
    assert json.loads((tmp_path / "trl_grpo_ext_settings.json").read_text())["settings"]["adapter"]["r"] == 2


def test_a_mixture_of_experts(tiny_moe: Path, tmp_path: Path) -> None:  # noqa: F811
    nothing = {"name": "squared_log_ratio", "coefficient": 1e-12}  # so that TRL's loss is taken apart
    ours = train(tiny_moe, tmp_path, given={"token_losses": [nothing]}, router_aux_loss_coef=0.1)
    theirs = trls(tiny_moe, tmp_path, router_aux_loss_coef=0.1)
    assert relative_gap(ours.gradients[0], theirs.gradients[0]) < 1e-5
    assert ours.logs[0]["aux_loss"] == pytest.approx(theirs.logs[0]["aux_loss"])
    without = trls(tiny_moe, tmp_path, router_aux_loss_coef=0.0)
    assert relative_gap(without.gradients[0], theirs.gradients[0]) > 1e-3


TOOL_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}# {{ m.content }}{% for c in m.tool_calls or [] %}"
    "b{{ c.function.arguments.text | replace(' ', '') }}{% endfor %}<eos>{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}# {% endif %}"
)
"""It says again to the letter what the model wrote, between whose tokens this tokenizer puts spaces."""

CALL: dict[str, Any] = {"type": "function", "function": {"name": "shorten", "arguments": {"text": "{content}"}}}
TOOL_CALLS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "# ",
    "fields": {
        "tool_calls": {"open_pattern": "b", "close": "<eos>", "content": "text", "repeats": True, "transform": CALL},
        "content": {"close": "<eos>", "content": "text"},
    },
}


def shorten(text: str) -> str:
    """The first two characters.

    Args:
        text: Any text.
    """
    return text.replace(" ", "")[:2]


class Talking(HereWorker):
    """Calls the tool in its first turn, by TRL's own loop of turns; what it says is made up."""

    def generated(self, prompt: list[Any]) -> list[tuple[Any, ...]]:
        loop = self.loop
        loop._generate_one_turn = self.turn
        tools = {tool.__name__: tool for tool in loop.tools}
        asked = [loop._generate_one(prompt, tools, loop.tools) for _ in range(loop.num_generations)]
        return [loop._loop.run_until_complete(one) for one in asked]

    async def turn(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        letters = torch.randint(10, 29, (3,), generator=self.generator).tolist()
        called = prompt.count(1) > 0
        ids = [*(letters if called else self.loop.tokenizer.convert_tokens_to_ids(["b", "1", *"xyz"])), 1]
        self.model.config._attn_implementation = "sdpa"
        logits = self.model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        self.model.config._attn_implementation = packing.TREE_ATTENTION
        logps = logits.float().log_softmax(-1)[torch.arange(len(ids)), ids]
        return ids, self.noisy(logps).tolist()


def ends_early(completions: list[Any], **columns: Any) -> list[float]:
    """By the last character of the last message."""
    assert [[message["role"] for message in said] for said in completions] == [["assistant", "tool", "assistant"]] * 4
    return [ord(said[-1]["content"][-1:] or " ") % 5 / 5.0 for said in completions]


def test_tools(tiny_model: Path, tmp_path: Path, packed: MicroBatches) -> None:  # noqa: F811
    tokenizer = tokenizer_of(tiny_model)
    tokenizer.chat_template, tokenizer.response_template = TOOL_TEMPLATE, TOOL_CALLS
    plugins = {"advantage_hooks": [SHAPING], "loss_aggregation": "seq_mean_token_mean", "token_records": 16}
    talking = {"worker_class": Talking, "tokenizer": tokenizer, "reward_funcs": ends_early}
    found = train(tiny_model, tmp_path, given={**plugins, "tools": [shorten]}, **talking, save_steps=1)
    sent = found.trainer.rollout_worker.sent
    expected = gradient(tiny_model, packed[:2], sent, seq_mean_token_mean, shaped=True)
    assert relative_gap({name: found.gradients[0][name] for name in expected}, expected) < 1e-5
    rows = pyarrow.parquet.read_table(tmp_path / "token_records" / "step_00001.parquet").to_pylist()
    assert len(rows) == 16
    for row in rows:
        answer = len("1x# ")  # the tool's, and the beginning of the next turn
        assert row["turns"] == [0] * 6 + [-1] * answer + [1] * 4
        assert row["live"] == [True] * 6 + [False] * answer + [True] * 4
        assert row["failed_turns"] == []


def test_a_training_resumes(tiny_model: Path, tmp_path: Path) -> None:
    def settings(steps: int, hooks: list[Any]) -> dict[str, Any]:
        given = {"advantage_hooks": hooks, "group_filter": "signal"}
        return {"given": given, "max_steps": steps, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.1}

    first = train(tiny_model, tmp_path, **settings(2, [TREE]))
    checkpoint = tmp_path / "checkpoint-2"
    done = json.loads((checkpoint / "rollout_state.json").read_text())["prompt_index"]
    dropped = sum(log.get("groups/dropped/equal_rewards_total", 0) for log in first.logs)
    # Two steps of 16 completions in groups of 4. TRL counts the micro-batch too that accelerate has fetched ahead.
    assert done == 8 + 2 + dropped
    recorder = Recorder()
    trainer = made(tiny_model, tmp_path, **settings(3, [TREE]))
    trainer.add_callback(recorder)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 3
    assert len(recorder.gradients) == 1
    assert trainer.rollout_worker.asked[0]["answer"] == done % 8
    with pytest.raises(ManifestError, match="prefix_tree"):
        made(tiny_model, tmp_path, **settings(3, [])).train(resume_from_checkpoint=str(checkpoint))


class Game:
    """An environment with a reward of its own."""

    def reset(self, **row: Any) -> None: ...

    def get_reward(self) -> float:
        return 0.0


class Playing(HereWorker):
    def env_rewards(self, members: int) -> list[tuple[type, float]]:
        return [(Game, place / 2.0) for place in range(members)]


@pytest.mark.parametrize("hooks", [[], ["centred"]])
def test_environments_have_a_weight_of_one(hooks: list[str], tiny_model: Path, tmp_path: Path) -> None:
    rewards = load_rewards([{"name": "tests.asynchronous.support:letters", "weight": 3.0}])
    playing: dict[str, Any] = {"worker_class": Playing, "worker": {"environment_factory": Game}}
    found = train(tiny_model, tmp_path, given={"advantage_hooks": hooks}, reward_funcs=rewards, **playing)
    for first in (0, 4):
        group = found.trainer.rollout_worker.sent[first : first + 4]
        sums = [3.0 * one.metrics["rewards/letters"] + one.metrics["rewards/Game"] for one in group]
        assert [one.metrics["rewards/Game"] for one in group] == [0.0, 0.5, 1.0, 1.5]
        assert [one.metrics["reward"] for one in group] == pytest.approx(sums)
        mean = sum(sums) / 4
        assert [float(one.advantage) for one in group] == pytest.approx(normalised(sums), abs=1e-5)
        if hooks:  # what is trained on
            for one, reward in zip(group, sums, strict=True):
                assert one.advantage.stages["centred"] == pytest.approx(reward - mean, abs=1e-5)
