"""The script and the YAML file of `docs/start.md`, run as they stand."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.docs_site.blocks import ROOT, blocks_of
from trl_grpo_ext.records.manifest import Manifest


@pytest.mark.slow
def test_the_script_trains_with_the_plugins_of_its_file(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, settings = (
        next(block.text for block in blocks_of(ROOT / "docs" / "start.md") if part in block.text)
        for part in ("# train.py", "model_name_or_path:")
    )
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(script)
    Path("train.yaml").write_text(settings)
    Path("data").mkdir()
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(8)]
    Path("data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--config", "train.yaml", "--model_name_or_path", str(tiny_model), "--dataset_name", "data"]
    words += ["--dataset_config", "default", "--max_steps", "1", "--max_completion_length", "8", "--use_cpu", "true"]
    words += ["--output_dir", "out", "--report_to", "none", "--bf16", "false", "--save_strategy", "no"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    runpy.run_path("train.py", run_name="__main__")
    names = [plugin.name for plugin in Manifest.read("out/trl_grpo_ext_plugins.json").plugins]
    assert names == ["gsm8k_accuracy", "soft_overlong", "clip_advantages", "prompt_mean"]
    assert len([line for line in script.splitlines() if line.strip()]) <= 40
