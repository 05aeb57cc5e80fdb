"""The command, a rollout, the page, and models with adapters and 4-bit weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from trl_grpo_ext.cli.main import app
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.history.gradients import load_policy, measure_gradients
from trl_grpo_ext.history.gradients.derivatives import CountSketch, Group, Groups, Policy
from trl_grpo_ext.records.token_records import COLUMNS


def prompts_file(folder: Path, count: int = 6) -> Path:
    rows = [{"prompt": f"{'abcdefgh'[n % 8]}{n} ", "answer": n} for n in range(count)]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def selection(file: Path, **settings: Any) -> str:
    file.write_text(yaml.safe_dump({"rewards": ["tests.support:length_reward"], **settings}))
    return str(file)


@pytest.fixture(scope="module")
def rolled_out(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A rollout of six prompts, by the command."""
    folder = tmp_path_factory.mktemp("rollout")
    prompts, out = prompts_file(folder), folder / "rollout"
    with_ = [selection(folder / "hook.yaml", advantage_hooks=["entropy_shaping"])]
    with_ += [selection(folder / "<b>length.yaml", loss_aggregation="length_power")]
    words = ["gradients", str(out), "--model", str(tiny_model), "--prompts", str(prompts), "--samples", "4"]
    words += ["--max_completion_length", "8", "--batch_size", "8", "--out", str(folder / "page.html"), "--json"]
    result = CliRunner().invoke(app, [*words, "--with", with_[0], "--with", with_[1]])
    assert result.exit_code == 0, result.output
    return folder, out, json.loads(result.stdout)


def test_a_rollout_is_written_as_token_records_and_measured(rolled_out: tuple[Path, Path, Any]) -> None:
    import pyarrow.parquet

    _, out, found = rolled_out
    files = sorted((out / "token_records").iterdir())
    assert [file.name for file in files] == [f"step_0000{number}.parquet" for number in range(3)]
    rows = [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]
    assert len(rows) == 24
    assert set(rows[0]) == set(COLUMNS)
    for row in rows:
        assert len(row["token_ids"]) == len(row["logp"]) == len(row["entropy"]) == len(row["live"]) <= 8
        assert row["truncated"] == (row["token_ids"][-1] != 1)
        assert 1 not in row["token_ids"][:-1]
        assert max(row["logp"]) <= 0
    assert len({tuple(row["token_ids"]) for row in rows}) > 12
    assert (found["groups"], found["completions"], found["batch_size"]) == (6, 24, 8)
    assert [one["name"] for one in found["selections"]] == ["plain TRL", "policy gradient", "hook", "<b>length"]
    assert found["selections"][2]["hooks"] == ["entropy_shaping"]
    assert not any("another policy" in note for note in found["notes"])
    assert any("intervals are rough" in note for note in found["notes"])


def test_the_page_is_closed_and_escapes_names(rolled_out: tuple[Path, Path, Any]) -> None:
    page = (rolled_out[0] / "page.html").read_text()
    assert "default-src &#39;none&#39;" in page
    assert "<script" not in page
    assert "<b>length" not in page
    assert "&lt;b&gt;length" in page
    assert page.count("<svg") == 1
    assert len(re.findall("<table", page)) == 4


def test_the_table_and_a_rollout_that_goes_on(rolled_out: tuple[Path, Path, Any], tiny_model: Path) -> None:
    folder, out, found = rolled_out
    lost = out / "token_records" / "step_00001.parquet"
    before = lost.read_bytes()
    lost.unlink()
    words = ["gradients", str(out), "--model", str(tiny_model), "--prompts", str(folder / "prompts.jsonl")]
    words += ["--samples", "4", "--max_completion_length", "8", "--batch_size", "8"]
    result = CliRunner().invoke(app, [*words, "--with", str(folder / "hook.yaml"), "--no-shares"])
    assert result.exit_code == 0, result.output
    assert lost.read_bytes() == before  # the same completions
    line = next(line for line in result.stdout.splitlines() if "hook" in line)
    assert f"{found['selections'][2]['ratio']['value']:.3g}" in line
    again = CliRunner().invoke(app, [*words[:-1], "16", "--with", str(folder / "hook.yaml")])
    assert isinstance(again.exception, ConfigurationError)
    assert "different prompts_at_once" in str(again.exception)


def test_a_hook_on_texts_alone_and_what_cannot_work(tiny_model: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{'abcd'[n // 4]} ", "completion": "xyzw"[: 1 + n % 4], "rewards": {"r": float(n % 3)}}
        for n in range(16)
    ]
    file = tmp_path / "saved.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments: dict[str, Any] = {"model": str(tiny_model), "num_generations": 4}
    found = measure_gradients(file, [{"advantage_hooks": ["max_only"]}], **arguments)
    assert found.groups == 4
    assert (tmp_path / "gradients").is_dir()
    with pytest.raises(ConfigurationError, match="log-probabilities"):
        measure_gradients(file, [{"advantage_hooks": ["entropy_shaping"]}], **arguments)
    with pytest.raises(ConfigurationError, match="2 prompts are too few"):
        measure_gradients(file, [{}], limit=8, **arguments)
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        measure_gradients(file, [{}], model=str(tmp_path / "nothing"))
    with pytest.raises(ConfigurationError, match="nothing to measure"):
        measure_gradients(file, [], **arguments)


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16", "4 bits"])
def test_adapters_below_which_weights_may_have_4_bits(tiny_model: Path, tmp_path: Path, precision: str) -> None:
    """The derivatives of single tokens come from another computation than the gradient: both must agree."""
    torch.manual_seed(0)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5)
    )
    for name, one in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(one, std=0.1)
    adapted.save_pretrained(tmp_path)
    loaded = load_policy(
        str(tmp_path), device="cpu", **({"load_in_4bit": True} if precision == "4 bits" else {"dtype": precision})
    )
    policy = Policy(loaded, rows=2)
    assert all("lora" in name for name in policy.trained)
    assert any("Params4bit" in type(one).__name__ for one in loaded.parameters()) == (precision == "4 bits")
    group = Group([5, 6, 7], [[8, 9, 10], [11, 1], [12, 13, 14, 15]])
    sketch = CountSketch(policy.trained, 100_000, 0)
    groups = Groups(policy, sketch, None)
    coefficients_1_n = torch.randn(1, group.tokens, dtype=torch.float64)
    gradient_1_k, _ = groups.gradients(group, coefficients_1_n)
    direction_k = torch.randn(sketch.dimensions)
    along_1_n = groups.along(group, {"x": direction_k})
    expected = float(gradient_1_k[0] @ direction_k.double())
    size = float(gradient_1_k.norm())
    assert size > 0.1
    tolerance = 0.05 if precision == "bfloat16" else 1e-4
    assert float(along_1_n @ coefficients_1_n[0]) == pytest.approx(expected, abs=tolerance * size)
