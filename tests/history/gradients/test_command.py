"""The command, what cannot work, and models with adapters and 4-bit weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from typer.testing import CliRunner

from tests.support import train
from trl_grpo_ext.cli.main import app
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.history.gradients import load_policy, measure_gradients
from trl_grpo_ext.history.gradients.derivatives import CountSketch, Group, Policy


def test_completions_sampled_by_a_training_that_learns_nothing_are_measured(tiny_model: Path, tmp_path: Path) -> None:
    sampled = {"scripted": False, "learning_rate": 0.0, "token_records": 8, "max_steps": 3, "prompt_count": 6}
    train(tiny_model, tmp_path / "sampled", **sampled)
    selections = {"hook": {"advantage_hooks": ["entropy_shaping"]}, "[b]length": {"loss_aggregation": "length_power"}}
    words = ["gradients", str(tmp_path / "sampled"), "--model", str(tiny_model)]
    for name, settings in selections.items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"rewards": ["tests.support:length_reward"], **settings}))
        words += ["--with", str(file)]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["groups"], found["completions"], found["batch_size"]) == (6, 24, 8)
    assert [one["name"] for one in found["selections"]] == ["plain TRL", "policy gradient", *selections]
    assert found["selections"][2]["hooks"] == ["entropy_shaping"]
    assert not any("another policy" in note for note in found["notes"])
    assert any("intervals are rough" in note for note in found["notes"])
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert f"{found['selections'][2]['ratio']['value']:.3g}" in "".join(result.stdout.split())
    assert "[b]length" in result.stdout


def test_a_hook_on_texts_alone_and_what_cannot_work(tiny_model: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{'abcd'[n // 4]} ", "completion": "xyzw"[: 1 + n % 4], "rewards": {"r": float(n % 3)}}
        for n in range(16)
    ]
    file = tmp_path / "saved.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments: dict[str, Any] = {"model": str(tiny_model), "num_generations": 4}
    assert measure_gradients(file, [{"advantage_hooks": ["max_only"]}], **arguments).groups == 4
    with pytest.raises(ConfigurationError, match="log-probabilities"):
        measure_gradients(file, [{"advantage_hooks": ["entropy_shaping"]}], **arguments)
    with pytest.raises(ConfigurationError, match="2 prompts are too few"):
        measure_gradients(file, [{}], limit=8, **arguments)
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        measure_gradients(file, [{}], model=str(tmp_path / "nothing"))
    with pytest.raises(ConfigurationError, match="nothing to measure"):
        measure_gradients(file, [], **arguments)


@pytest.mark.parametrize("precision", ["bfloat16", "4 bits"])
def test_adapters_below_which_weights_may_have_4_bits(tiny_model: Path, tmp_path: Path, precision: str) -> None:
    """The gradient is that of float32, or a small step along it raises the weighted log-probability as it should."""
    torch.manual_seed(0)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5)
    )
    for name, one in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(one, std=0.1)
    adapted.save_pretrained(tmp_path)
    if precision == "4 bits":
        quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")
        loaded = AutoPeftModelForCausalLM.from_pretrained(
            tmp_path, is_trainable=True, quantization_config=quantised, device_map={"": "cpu"}
        )
    else:
        loaded = load_policy(str(tmp_path), device="cpu", dtype=precision)
    policy = Policy(loaded, rows=2)
    assert all("lora" in name for name in policy.trained)
    assert any("Params4bit" in type(one).__name__ for one in loaded.parameters()) == (precision == "4 bits")
    group = Group([5, 6, 7], [[8, 9, 10], [11, 1], [12, 13, 14, 15]])
    sketch = CountSketch(policy.trained, 100_000, 0)
    coefficients_1_n = torch.randn(1, sum(map(len, group.completions)), dtype=torch.float64)
    gradient_1_k, before_n = policy.gradients(group, coefficients_1_n, sketch)
    assert before_n is not None
    size = float(gradient_1_k.square().sum())
    assert size > 0.01
    if precision == "bfloat16":
        exact = Policy(load_policy(str(tmp_path), dtype="float32", device="cpu"), rows=2)
        expected_1_k, _ = exact.gradients(group, coefficients_1_n, CountSketch(exact.trained, 100_000, 0))
        assert float((gradient_1_k - expected_1_k).norm()) < 0.15 * size**0.5
        return
    parts = torch.split(gradient_1_k[0], [one.numel() for one in policy.trained.values()])
    with torch.no_grad():
        for one, part in zip(policy.trained.values(), parts, strict=True):
            one.add_((1e-3 / size * part).view(one.shape))
    _, after_n = policy.gradients(group, coefficients_1_n, sketch)
    assert after_n is not None
    assert float(coefficients_1_n[0] @ (after_n - before_n).double()) == pytest.approx(1e-3, rel=0.05)
