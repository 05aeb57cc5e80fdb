"""The examination of commands: forms of public projects, launch files, and what cannot be examined."""

import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.launch.doctor import forked
from tests.launch.doctor.public_runs import OWN_CONFIGS, OWN_RUN, RUN_FILES, SCRIPTS, RunFile, Script
from trl_grpo_ext.cli.main import app
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.launch.doctor import Machine, command
from trl_grpo_ext.launch.doctor.command import Examination, examine, render

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "recipes" / "embedded" / "model")
EIGHT = Machine(gpus=8, gpu_bytes=80 * 1024**3)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The examination's two processes are forks that have their imports already."""
    monkeypatch.setattr(command, "_child", forked.child)
    monkeypatch.chdir(tmp_path)


def said(found: Examination) -> str:
    out = StringIO()
    render(found, Console(file=out, width=10_000))
    return out.getvalue()


def errors(found: Examination) -> list[str]:
    return [problem.message for problem in found.problems if problem.severity == "error"]


SLOW = pytest.mark.slow
QUICK = ("open-r1, recipes of early 2025", "TRL's scripts, QLoRA", "TRL's quick start and the HF course")


def cases(forms: Sequence[Any]) -> list[Any]:
    """One or two of a kind at once, the others as slow tests."""
    return [pytest.param(one, marks=[pytest.mark.slow] * (one.project not in QUICK), id=one.project) for one in forms]


def assert_says(found: Examination, form: RunFile | Script) -> None:
    text = said(found)
    assert [form.error in one for one in errors(found)] == [True] * bool(form.error), text
    assert [words for words in form.said if words not in text] == [], text
    assert [words for words in form.not_said if words in text] == [], text


@pytest.mark.parametrize("run", cases(RUN_FILES))
def test_examine_a_run_file_alone(run: RunFile) -> None:
    Path("run.yaml").write_text(run.text.replace("MODEL", MODEL))
    found = examine(["run.yaml"], EIGHT)
    assert_says(found, run)
    assert run.error or "rlhf_type" in run.text or found.memory is not None


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


SETTINGS_ALONE = ["-m", "trl_grpo_ext.launch.doctor.settings_alone", "--config", "run.yaml"]
SETTINGS = f"model_name_or_path: {MODEL}\nmax_completion_length: 64\n"
ZERO3 = {"zero_stage": 3, "zero3_init_flag": True, "gradient_accumulation_steps": 1}
DEEPSPEED = {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO3}
FSDP2 = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_eficient_loading": False}
FSDP = {"distributed_type": "FSDP", "fsdp_config": FSDP2}


@pytest.mark.parametrize(
    ("file", "words", "engine", "error"),
    [
        ({"distributed_type": "MULTI_GPU"}, ("--num_processes", "4"), "ddp, 4 processes", ""),
        pytest.param(DEEPSPEED, (), "zero3, 2 processes", "", marks=SLOW),
        pytest.param(FSDP, (), "fsdp2, 2 processes", "", marks=SLOW),
        pytest.param({"distributed_type": "NO"}, (), "one_process, 1 process", "asks for 2 processes, and", marks=SLOW),
        pytest.param({"distributed_type": "MULTI_GPU", "use_cpus": True}, (), "", "use_cpus", marks=SLOW),
    ],
    ids=["ddp", "zero3", "fsdp2", "NO for two", "unknown key"],
)
def test_examine_a_launch_file(file: dict[str, Any], words: tuple[str, ...], engine: str, error: str) -> None:
    Path("run.yaml").write_text(f"{SETTINGS}gradient_accumulation_steps: 4\n")
    usual = {"compute_environment": "LOCAL_MACHINE", "num_processes": 2, "num_machines": 1, "machine_rank": 0}
    usual |= {"main_training_function": "main", "mixed_precision": "bf16"}
    Path("launch.yaml").write_text(json.dumps({**usual, **file}))
    found = examine(["accelerate", "launch", "--config_file", "launch.yaml", *words, *SETTINGS_ALONE], EIGHT)
    assert [error in one for one in errors(found)] == [True] * bool(error), said(found)
    assert found.described.startswith(engine), said(found)
    if "fsdp_config" in file:
        assert "Did you mean 'fsdp_cpu_ram_efficient_loading'" in said(found)


@pytest.mark.slow
def test_examine_torchrun_and_trl() -> None:
    Path("run.yaml").write_text(f"{SETTINGS}torch_dtype: bfloat16\n")
    words = ["trl", "grpo", "--config", "run.yaml", "--dataset_name", "nobody/nothing", "--num_processes", "4"]
    words += ["--accelerate_config", "multi_gpu"]
    old = examine(words, EIGHT)
    assert ["unrecognized arguments: --torch_dtype" in one for one in errors(old)] == [True]
    assert "torch_dtype is dtype since" in said(old)
    Path("run.yaml").write_text(SETTINGS)
    trl = examine(words, EIGHT)
    assert trl.described.startswith("ddp, 4 processes"), said(trl)
    assert errors(trl) == []
    torch = examine(["torchrun", "--nproc_per_node", "2", "--nnodes", "2", *SETTINGS_ALONE], EIGHT)
    assert torch.described.startswith("ddp, 4 processes on 2 machines"), said(torch)


@pytest.mark.slow
def test_examine_for_a_machine_without_gpus() -> None:
    source = SCRIPTS[0].text.replace("MODEL", MODEL)
    Path("train.py").write_text(source)
    assert ["doesn't support bf16" in one for one in errors(examine(["train.py"], Machine(gpus=0)))] == [True]
    Path("train.py").write_text(source.replace("=4,", "=4, use_cpu=True,"))
    assert errors(examine(["train.py"], Machine(gpus=0))) == []


@pytest.mark.slow
def test_what_cannot_be_examined_is_said() -> None:
    for words in (["bash", "run.sh"], ["gone.yaml"], [], ["python"]):
        with pytest.raises(ConfigurationError):
            examine(words)
    Path("train.py").write_text("print('nothing to train')\n")
    nothing = examine(["train.py"])
    assert (nothing.exit_code, nothing.unreached) == (2, "the script ended without constructing a trainer")
    offline = "raise ConnectionError('the hub is away')\n"
    Path("train.py").write_text(offline)
    away = examine(["train.py"])
    assert (away.exit_code, away.unreached) == (2, "the script stopped before its trainer")
    made = f"GRPOConfig('out', bf16=False, max_completion_length=64)\nModelConfig({MODEL!r})\n"
    Path("train.py").write_text(f"from trl import GRPOConfig, ModelConfig\n{made}{offline}")
    alone = examine(["train.py"])
    assert alone.exit_code == 0, said(alone)
    assert said(alone).startswith("No problems found in the settings, which is all that was examined: ")
    Path("train.py").write_text("import os\nprint('last words')\nos._exit(3)\n")
    assert "last words" in said(examine(["train.py"]))
    Path("train.py").write_text("raise SystemExit('no data: [bold]\\x1b[31m')\n")
    (stopped,) = examine(["train.py"]).problems
    assert "[bold]\\x1b[31m" in stopped.message


def test_the_command_does_not_fold_in_a_pipe() -> None:
    Path("run.yaml").write_text(f"model_name_or_path: {MODEL}\nlearning_rat: 1.0\n")
    ended = CliRunner(env={"COLUMNS": ""}).invoke(app, ["doctor", "--gpus", "0", "--", "run.yaml"])
    assert max(map(len, ended.stdout.splitlines())) > 80, ended.output


@pytest.mark.slow
def test_the_command_runs_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    words = ["doctor", "--gpus", "2", "--gpu-memory", "24", "--", "accelerate", "launch", "--num_processes", "2"]
    words += ["--multi_gpu", "recipes/gsm8k_grpo.py", "--embedded"]
    ended = CliRunner(env={"COLUMNS": "80"}).invoke(app, words)
    plain = " ".join(ended.stdout.split())
    assert ended.exit_code == 0, ended.output
    assert "ddp, 2 processes" in plain
    assert "memory: about" in plain
    assert max(map(len, ended.stdout.splitlines())) <= 80
