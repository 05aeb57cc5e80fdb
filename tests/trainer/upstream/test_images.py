"""Vision-language models in every part of the trainer: four that hold images in different ways."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from tests import tiny_vision
from tests.support import relative_gap
from tests.trainer.launch import on_two_ranks
from tests.trainer.support import flat_for_some, gradients_of, pictured, saved, scripted
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.history.run_files import read_columns
from trl_grpo_ext.trainer.upstream import acting

ALL = [*tiny_vision.MAKERS]
BOTH = (GRPOTrainer, GRPOExtTrainer)
PACKED = "trl_grpo_ext.trainer.compact.packed"
SAMPLED: dict[str, Any] = {"rollout_func": None, "num_iterations": 2, "max_steps": 3, "beta": 0.1}
SHAPER = {"name": "kl_in_reward", "form": "completion"}
HOOKS: list[Any] = [SHAPER, "leave_one_out", "whiten", "entropy_shaping", "low_probability"]
EVERYTHING: dict[str, Any] = {
    "several": True,
    "beta": 0.1,
    "num_iterations": 2,
    "trainer_arguments": {
        "advantage_hooks": HOOKS,
        "loss_aggregation": "prompt_mean",
        "token_losses": [{"name": "kl_cov", "share": 0.2}],
    },
}
WHOLE: dict[str, Any] = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
COMPACT: dict[str, Any] = {"compact_updates": "exact", "share_prompts": True}
REFILLED: dict[str, Any] = {"reward_funcs": "flat_for_some", "several": True, "prompt_count": 16}
REFILLED |= {"resample": {"filter": "signal", "max_rounds": 3}}


def assert_same(gradients: Any, others: Any) -> None:
    assert max(relative_gap(*steps) for steps in zip(gradients, others, strict=True)) < 1e-4


@pytest.mark.parametrize("name", ALL)
@pytest.mark.slow
def test_nothing_selected(tmp_path: Path, name: str) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if name in ("llava", "qwen2_5_vl") else None
    settings = {**SAMPLED, "evaluates": True, "peft_config": lora, "several": name != "llava"}
    theirs, ours = (pictured(name, tmp_path / each.__name__, each, **settings) for each in BOTH)
    assert ours.logs == theirs.logs
    assert all(torch.equal(ours.weights[weight], theirs.weights[weight]) for weight in theirs.weights)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llava", {}),
        ("llava", {**SAMPLED, "several": True, "same_text": True}),
        ("qwen2_5_vl", {"several": True}),
        ("qwen2_5_vl", {**SAMPLED, "same_text": True}),
        ("idefics3", {**SAMPLED, "several": True}),
        ("gemma3", {"several": True}),
    ],
)
@pytest.mark.slow
def test_compact_updates(tmp_path: Path, name: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Rows without signal and their images are left out; prompts with the same images run once."""
    settings = {"reward_funcs": "flat_for_some", **settings}
    theirs = pictured(name, tmp_path / "trl", GRPOTrainer, **settings)
    for share in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger=PACKED):
            ours = pictured(name, tmp_path / f"{share}", compact_updates="exact", share_prompts=share, **settings)
        said = " ".join(record.getMessage() for record in caplog.records if record.name == PACKED)
        assert ("both directions" in said) == bool(said) == (name == "gemma3")
        assert ours.logs[0]["compact/rows_dropped"] >= (0 if "beta" in settings else 0.5)
        assert ours.logs[0]["compact/computed_to_live"] < (0.6 if share and not said else 1.1)
        assert_same(ours.gradients, theirs.gradients)


def test_compact_updates_with_images_of_tools(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Completions that have images keep TRL's widths, and the same gradient."""
    token = saved("llava")[1].tokenizer.convert_tokens_to_ids("<image>")

    def returned(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        rollout = scripted(prompts, trainer)
        pairs = zip(rollout["prompt_ids"], rollout["completion_ids"], strict=True)
        completion_ids = [[*ids[:1], *(one for one in prompt if one == token), *ids[1:]] for prompt, ids in pairs]
        prompt_ids = [[one for one in prompt if one != token] for prompt in rollout["prompt_ids"]]
        logprobs = [[-1.0] * len(ids) for ids in completion_ids]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    settings: dict[str, Any] = {"reward_funcs": "flat_for_some", "rollout_func": returned}
    theirs = pictured("llava", tmp_path / "trl", GRPOTrainer, **settings)
    with caplog.at_level(logging.INFO, logger=PACKED):
        ours = pictured("llava", tmp_path / "ours", **COMPACT, **settings)
    assert "completions have images of their own" in caplog.text
    assert_same(ours.gradients, theirs.gradients)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.slow
def test_resample(tmp_path: Path, name: str) -> None:
    """Each row of a batch that several rounds filled has the log-probabilities of its own prompt and pictures."""
    gaps: list[float] = []
    rows, processor = tiny_vision.pictures(16, several=True), saved(name)[1]

    class Compared(GRPOExtTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            inputs = super()._prepare_inputs(generation_batch)
            found_B_T = acting.policy_pass(self, inputs, len(inputs["prompt_ids"]), False)[0]
            for row, found_T in enumerate(found_B_T):
                prompt, written = (
                    inputs[f"{part}_ids"][row][inputs[f"{part}_mask"][row] != 0] for part in ("prompt", "completion")
                )
                if not len(written):
                    continue
                number = int(processor.tokenizer.decode(prompt).split("#")[0].split()[-1])
                pictures = rows[number]["images"]
                content = [{"type": "image"} for _ in pictures]
                content.append({"type": "text", "text": rows[number]["prompt"][0]["content"]})
                text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
                seen = processor(images=[pictures], text=[text], return_tensors="pt")
                assert seen["input_ids"][0].tolist() == prompt.tolist()
                ids = torch.cat([prompt, written]).unsqueeze(0)
                own = {key: value for key, value in seen.items() if key not in ("input_ids", "attention_mask")}
                for key in own.keys() & {"token_type_ids", "mm_token_type_ids"}:
                    own[key] = torch.cat([own[key], own[key].new_zeros(1, len(written))], dim=1)
                with torch.no_grad():
                    logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), **own).logits
                logps = logits[0, -len(written) - 1 : -1].log_softmax(-1).gather(1, written.unsqueeze(1)).squeeze(1)
                gaps.append(float((found_T[: len(written)] - logps).abs().max()))
            return inputs

    run = pictured(name, tmp_path, Compared, **REFILLED, rollout_func=None, max_steps=1)
    assert run.logs[0]["groups/rounds"] > 1
    assert len(gaps) >= 8
    assert max(gaps) < 1e-4


@pytest.mark.parametrize("name", ALL)
@pytest.mark.slow
def test_plugins_of_each_role(tmp_path: Path, name: str) -> None:
    """One gradient, however the batch is cut; and the records are of the rows that they name."""
    dealt = pictured(name, tmp_path / "dealt", **EVERYTHING, token_records=4, evaluates=True)
    whole = pictured(name, tmp_path / "whole", **EVERYTHING, **WHOLE)
    compact = pictured(name, tmp_path / "compact", **EVERYTHING, **COMPACT)
    for other in (whole, compact):
        assert_same(dealt.gradients, other.gradients)
    assert any("eval_reward" in log for log in dealt.logs)
    records = read_columns(tmp_path / "dealt" / "token_records" / "step_00001.parquet")
    assert records["stages"][0] == ["trl", *HOOKS[1:]]
    assert [len(copies) for copies in records["images"]] == [1 + int(records["group"][0]) % 3] * 4


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """Two ranks have the gradient of one process; refilled batches move pictures between ranks."""
    jobs = {
        what: {"name": name, "folder": str(saved(name)[0]), **settings}
        for what, name, settings in (
            ("plugins", "llava", EVERYTHING),
            ("refilled", "idefics3", REFILLED),
            ("refilled and compact", "qwen2_5_vl", {**REFILLED, **COMPACT}),
        )
    }
    one = gradients_of(jobs, str(tmp_path / "one"))
    halves = {job: {**settings, "gradient_accumulation_steps": 2} for job, settings in jobs.items()}
    for rank in on_two_ranks(gradients_of, halves, str(tmp_path / "two"), timeout=900):
        for job, result in rank.items():
            assert len(result) == len(one[job]) == 2
            mine = [{name.removeprefix("module."): gradient for name, gradient in step.items()} for step in result]
            assert_same(mine, one[job])


def test_shaper_without_logps(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"old_logps .*images"):
        pictured("llava", tmp_path, advantage_hooks=[SHAPER], beta=0.1, max_steps=1)


def test_prompt_sampler(tmp_path: Path) -> None:
    """A sampler draws pictured prompts; each row keeps the picture of its prompt, in compact updates too."""
    seen: list[tuple[int, bytes]] = []

    def reward(completion_ids: list[list[int]], answer: list[int], image: list[Any], **columns: Any) -> list[float]:
        seen.extend((number, picture.tobytes()) for number, picture in zip(answer, image, strict=True))
        return flat_for_some(completion_ids, answer)

    drawn = tiny_vision.pictures(12)
    settings: dict[str, Any] = {"reward_funcs": reward, "prompt_sampler": "difficulty_pool", "prompt_count": 12}
    more = {"dealt": {}, "compact": COMPACT}
    runs = [pictured("llava", tmp_path / what, **settings, **more[what], max_steps=4) for what in more]
    assert len(seen) == 2 * 4 * 16
    assert all(picture == drawn[number]["image"].tobytes() for number, picture in seen)
    assert seen[:64] == seen[64:]
    assert len({number for number, _ in seen}) > 4
    assert_same(*(run.gradients for run in runs))
    assert all("compact/rows_dropped" in log for log in runs[1].logs[:4])
