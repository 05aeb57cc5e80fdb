"""The gradients of a comparison: sampled completions, what cannot work, adapters and 4-bit weights."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from typer.testing import CliRunner

from tests.history.compare.saved_files import write_lines
from trl_grpo_ext.cli.main import app
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.history.compare import Estimate, compare, load_policy
from trl_grpo_ext.history.compare.derivatives import CountSketch, Group, Policy


def write_prompts(folder: Path, count: int) -> Path:
    return write_lines(folder / "prompts.jsonl", [{"prompt": f"{n} the same for all ", "n": n} for n in range(count)])


def early_tokens(completion_ids: list[list[int]], n: list[int], **columns: Any) -> list[float]:
    """The same tokens are wanted whatever the prompt."""
    assert len(n) == len(completion_ids)
    return [-float(sum(token > 20 for token in ids)) for ids in completion_ids]


def by_chance(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """What is wanted of one prompt has nothing to do with what is of another."""
    rows = zip(prompts, completion_ids, strict=True)
    return [random.Random(f"{prompt}{ids}").random() for prompt, ids in rows]


def test_compare_samples_and_measures(tiny_model: Path, tmp_path: Path) -> None:
    selections = {"hook": {"advantage_hooks": ["entropy_shaping"]}, "[b]length": {"loss_aggregation": "length_power"}}
    options = ["--model", str(tiny_model), "--num_generations", "4", "--temperature", "0.8"]
    for name, settings in selections.items():
        file = tmp_path / f"{name}.yaml"
        settings |= {"rewards": ["tests.support:length_reward"], "max_completion_length": 6}
        file.write_text(yaml.safe_dump(settings))
        options += ["--with", str(file)]
    prompts, folder = write_prompts(tmp_path, 13), tmp_path / "sampled"
    sampling = ["compare", str(prompts), "--sample", str(folder), *options, "--limit", "43"]
    result = CliRunner().invoke(app, [*sampling, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["groups"], found["completions"], found["num_generations"]) == (10, 40, 4)
    assert found["steps"] == [1, 2]  # eight prompts, and two
    assert [one["name"] for one in found["selections"]] == [*selections]
    assert found["selections"][0]["hooks"] == ["entropy_shaping"]
    assert [one["name"] for one in found["gradients"]["selections"]] == ["plain TRL", "policy gradient", *selections]
    assert (found["gradients"]["batch_size"], found["gradients"]["prompts"]) == (20, 10)
    assert not any("another policy" in note for note in found["notes"])
    assert any("intervals are rough" in note for note in found["notes"])
    rows = [row for file in sorted(folder.rglob("*.parquet")) for row in pyarrow.parquet.read_table(file).to_pylist()]
    assert [row["member"] for row in rows] == [0, 1, 2, 3] * 10
    assert all(row["truncated"] == (row["token_ids"][-1] != 1) for row in rows)
    assert max(len(row["token_ids"]) for row in rows) == 6
    assert isinstance(CliRunner().invoke(app, sampling).exception, ConfigurationError)  # nothing is overwritten
    result = CliRunner().invoke(app, ["compare", str(folder), *options])
    assert result.exit_code == 0, result.output
    assert f"{found['gradients']['selections'][2]['ratio']['value']:.3g}" in "".join(result.stdout.split())
    assert "[b]length" in result.stdout
    assert "moves" in result.stdout


@pytest.mark.slow
def test_cosine_needs_signal_on_both_sides(tiny_model: Path, tmp_path: Path) -> None:
    given = {"early": early_tokens, "chance": by_chance}
    sampled = compare(
        write_prompts(tmp_path, 24),
        {name: {"rewards": [reward], "max_completion_length": 1} for name, reward in given.items()},
        model=str(tiny_model),
        sample_to=tmp_path / "sampled",
        num_generations=16,
    )
    assert sampled.gradients is not None
    plain, _, early, chance = sampled.gradients.selections
    assert plain.signal_seen
    assert early.signal_seen
    assert early.to_plain.value == pytest.approx(1.0)
    assert (early.ratio.low or 0.0) > 0
    assert not chance.signal_seen
    assert chance.to_plain == chance.to_policy_gradient == Estimate(None, None, None)
    assert chance.worth.value is not None
    (note,) = [sentence for sentence in sampled.notes if "cannot be distinguished" in sentence]
    assert note.startswith("chance: ")


@pytest.mark.slow
def test_gradients_of_texts_alone_and_what_cannot_work(tiny_model: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{'abcd'[n // 4]} ", "completion": "xyzw"[: 1 + n % 4], "rewards": {"r": float(n % 3)}}
        for n in range(16)
    ]
    file = write_lines(tmp_path / "saved.jsonl", rows)
    arguments: dict[str, Any] = {"model": str(tiny_model), "num_generations": 4}
    assert compare(file, [{"advantage_hooks": ["max_only"]}], **arguments).groups == 4
    new = {**arguments, "sample_to": tmp_path / "new"}
    refused: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "needs log-probabilities": ([{"advantage_hooks": ["entropy_shaping"]}], arguments),
        "2 prompts are too few": ([{}], {**arguments, "limit": 8}),
        "cannot be loaded": ([{}], {"model": str(tmp_path / "nothing")}),
        "nothing to compare": ([], arguments),
        "Sampling needs a model": ([{"rewards": [by_chance]}], {**new, "model": None}),
        "lists no rewards": ([{"rewards": [by_chance]}, {}], new),
    }
    for message, (selections, given) in refused.items():
        with pytest.raises(ConfigurationError, match=message):
            compare(file, selections, **given)
    assert not (tmp_path / "new").exists()


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
