"""Scripts run up to their trainer: those of public projects, and what they do with a model without weights."""

from pathlib import Path

import pytest

from tests.launch.doctor.examining import EIGHT, MODEL, SLOW, assert_says, cases, errors, said
from tests.launch.doctor.public_runs import OWN_CONFIGS, OWN_RUN, SCRIPTS, Script
from trl_grpo_ext.launch.doctor import Machine
from trl_grpo_ext.launch.doctor.command import examine

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("script", cases(SCRIPTS))
def test_examine_a_script_up_to_its_trainer(script: Script) -> None:
    Path("train.py").write_text(script.text.replace("MODEL", MODEL))
    Path("own_configs.py").write_text(OWN_CONFIGS)
    Path("run.yaml").write_text(OWN_RUN.replace("MODEL", MODEL))
    assert_says(examine(["python", "train.py", *script.words], Machine(gpus=1)), script)
    assert not Path("out").exists()


ON_WEIGHTS = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

tokenizer = AutoTokenizer.from_pretrained("MODEL")
model = AutoModelForCausalLM.from_pretrained("MODEL")
LINE
args = GRPOConfig("out", use_cpu=True, bf16=False, max_completion_length=64)
GRPOTrainer(model, lambda completions, **_: [0.0] * len(completions), args, processing_class=tokenizer)
"""

NEED_WEIGHTS = {
    "a number": "print(model.get_input_embeddings().weight.abs().mean().item())",
    "rows": "print(model.get_input_embeddings().weight[0].tolist())",
    "a check": "assert all(torch.isfinite(one).all() for one in model.parameters())",
    "an array": "model.get_input_embeddings().weight.detach().numpy()",
    "generation": "model.generate(**tokenizer('1', return_tensors='pt'), max_new_tokens=2)",
    "a file": "model.save_pretrained('half')",
}


@pytest.mark.parametrize("name", [pytest.param(one, marks=[SLOW] * (one != "a file")) for one in NEED_WEIGHTS])
def test_examine_does_not_blame_a_script_that_uses_the_weights(name: str) -> None:
    Path("train.py").write_text(ON_WEIGHTS.replace("MODEL", MODEL).replace("LINE", NEED_WEIGHTS[name]))
    found = examine(["train.py"], EIGHT)
    assert (found.exit_code, found.unreached) == (2, "the script stopped before its trainer"), said(found)
    assert "weights, which are not loaded here: its settings are not known either" in said(found)
    assert not Path("half").exists()


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("model.resize_token_embeddings(len(tokenizer) + 8)", []),
        pytest.param("raise ValueError('the column meta is missing')", ["column meta"], marks=SLOW),
        (
            "get_peft_model(model, LoraConfig(target_modules=['q_proj'])).requires_grad_(False)",
            ["No weight of the model is trained"],
        ),
    ],
    ids=["more tokens", "its own error", "frozen"],
)
def test_examine_a_model_that_the_script_changed(line: str, wrong: list[str]) -> None:
    Path("train.py").write_text(ON_WEIGHTS.replace("MODEL", MODEL).replace("LINE", line))
    found = errors(examine(["train.py"], EIGHT))
    assert len(found) == len(wrong), found
    assert all(words in one for words, one in zip(wrong, found, strict=True))
