"""The gradients of a comparison: the command, what cannot work, adapters and 4-bit weights."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from typer.testing import CliRunner

from tests.history.compare.saved_files import write_lines
from tests.support import train
from trl_grpo_ext.cli.main import app
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.history.compare import Estimate, compare, load_policy
from trl_grpo_ext.history.compare.derivatives import CountSketch, Group, Policy


def early_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The same tokens are wanted whatever the prompt."""
    return [-float(sum(token > 20 for token in ids)) for ids in completion_ids]


def by_chance(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """What is wanted of one prompt has nothing to do with what is of another."""
    rows = zip(prompts, completion_ids, strict=True)
    return [random.Random(f"{prompt}{ids}").random() for prompt, ids in rows]


def test_compare_measures_by_command(tiny_model: Path, tmp_path: Path) -> None:
    train(tiny_model, tmp_path / "run", token_records=20, prompt_count=5, per_device_train_batch_size=20, max_steps=2)
    selections = {"hook": {"advantage_hooks": ["entropy_shaping"]}, "[b]length": {"loss_aggregation": "length_power"}}
    words = ["compare", str(tmp_path / "run"), "--model", str(tiny_model), "--step", "1"]
    for name, settings in selections.items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(settings | {"rewards": ["tests.support:length_reward"]}))
        words += ["--with", str(file)]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["groups"], found["completions"], found["steps"]) == (5, 20, [1])
    assert [one["name"] for one in found["selections"]] == [*selections]
    assert [one["name"] for one in found["gradients"]["selections"]] == ["plain TRL", "policy gradient", *selections]
    assert (found["gradients"]["batch_size"], found["gradients"]["prompts"]) == (20, 5)
    assert not any("another policy" in note for note in found["notes"])
    assert any("intervals are rough" in note for note in found["notes"])
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert f"{found['gradients']['selections'][2]['ratio']['value']:.3g}" in "".join(result.stdout.split())
    assert "[b]length" in result.stdout
    assert "moves" in result.stdout


@pytest.mark.slow
def test_cosine_needs_signal_on_both_sides(tiny_model: Path, tmp_path: Path) -> None:
    whole: dict[str, Any] = {"token_records": 384, "per_device_train_batch_size": 384, "num_generations": 16}
    train(tiny_model, tmp_path, prompt_count=24, max_completion_length=1, max_steps=1, **whole)
    given = {"early": early_tokens, "chance": by_chance}
    found = compare(tmp_path, {name: {"rewards": [reward]} for name, reward in given.items()}, model=str(tiny_model))
    assert found.gradients is not None
    plain, _, early, chance = found.gradients.selections
    assert [one.signal_seen for one in (plain, early, chance)] == [True, True, False]
    assert early.to_plain.value == pytest.approx(1.0)
    assert (early.ratio.low or 0.0) > 0
    assert chance.to_plain == chance.to_policy_gradient == Estimate(None, None, None)
    assert chance.worth.value is not None
    (note,) = [sentence for sentence in found.notes if "cannot be distinguished" in sentence]
    assert note.startswith("chance: ")


@pytest.mark.slow
def test_gradients_of_texts_alone_and_what_cannot_work(tiny_model: Path, tmp_path: Path) -> None:
    said = [{"prompt": f"{'abcd'[n // 4]} ", "completion": "xyzw"[: 1 + n % 4], "truncated": False} for n in range(16)]
    more = [{"rewards": {"r": float(n % 3)}, "group": n // 4, "step": n // 8} for n in range(16)]
    file = write_lines(tmp_path / "saved.jsonl", [one | other for one, other in zip(said, more, strict=True)])
    found = compare(file, [{"advantage_hooks": ["max_only"]}], model=str(tiny_model))
    assert (found.groups, [*found.steps]) == (4, [0, 1])
    assert found.tokens == 4 * (1 + 2 + 3 + 4) + 16  # characters, and what ends each
    refused: list[tuple[list[Any], dict[str, Any]]] = [
        ([{"advantage_hooks": ["entropy_shaping"]}], {}),  # it needs log-probabilities
        ([{}], {"limit": 8}),  # two prompts are too few
        ([], {}),
    ]
    for selections, given in refused:
        with pytest.raises(ConfigurationError):
            compare(file, selections, model=str(tiny_model), **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "targets"), [("bfloat16", "all-linear"), ("4 bits", "all-linear"), ("bfloat16", ["v_proj"])]
)
def test_policy_of_adapters_and_4_bits(tiny_model: Path, tmp_path: Path, precision: str, targets: Any) -> None:
    """The gradient is that of float32, or a small step along it raises the weighted log-probability as it should."""
    torch.manual_seed(0)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(r=2, target_modules=targets, lora_dropout=0.5)
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
