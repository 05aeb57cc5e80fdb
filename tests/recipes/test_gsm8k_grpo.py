"""`recipes/gsm8k_grpo.py` as a person starts it: real processes, real files, and what they print and leave behind."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

from common.problems import whole_batches
from common.settings import check_setup

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl import ModelConfig

from tests.recipes.launching import MODEL, RECIPES, SMALL, Finished, forked, launched, options, trained
from tests.support import arguments
from trl_grpo_ext.rewards.gsm8k_accuracy import gsm8k_accuracy

pytestmark = pytest.mark.slow

SCRIPT = RECIPES / "gsm8k_grpo.py"
GSM8K = os.environ.get("TRL_GRPO_EXT_GSM8K", "nowhere")
FOUR_STEPS = options(**{**SMALL, "max_steps": 4, "save_steps": 2})


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    done = launched(RECIPES / "accelerate/one_process.yaml", SCRIPT, tmp_path_factory.mktemp("default"), *FOUR_STEPS)
    assert done.status == 0, done.err[-3000:]
    return done


def test_the_default_is_named_trained_saved_and_recorded(default: Finished) -> None:
    assert default.out.splitlines()[0] == "The embedded tiny model on generated word problems (no CUDA device is here)"
    assert "16 held-out problems, 4 sample(s) each" in default.out
    metrics = default.metrics
    row = next(line for line in default.out.splitlines() if "gsm8k_accuracy" in line and "│" in line)
    before, after = (metrics[when]["gsm8k_accuracy"] for when in ("before", "after"))
    assert [float(cell) for cell in row.split("│")[2:5]] == pytest.approx([before, after, after - before], abs=6e-4)
    noise = [line for line in default.err.splitlines() if not line.startswith("trl-grpo-ext: reward gsm8k_accuracy")]
    assert [line for line in noise if "mtime may not be reliable" not in line] == []
    assert (metrics["run"]["processes"], metrics["run"]["backend"]) == (1, None)
    assert [line["step"] for line in default.training] == [1, 2, 3, 4]
    for line in default.training:
        assert line["reward"] == pytest.approx(line["rewards/gsm8k_accuracy/mean"])
    saved = AutoModelForCausalLM.from_pretrained(default.output, local_files_only=True).state_dict()
    base = AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True).state_dict()
    assert saved.keys() == base.keys()
    assert any(not torch.equal(saved[name], base[name]) for name in base)
    assert (default.output / "reward_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.nightly
def test_held_out_accuracy_rises_as_make_demo_promises(tmp_path: Path) -> None:
    run = trained(SCRIPT, tmp_path, "--embedded")
    before, after = (run.metrics[when]["gsm8k_accuracy"] for when in ("before", "after"))
    assert before <= 0.40
    assert after >= before + 0.35
    assert "512 held-out problems" in run.out


@pytest.mark.nightly
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(default: Finished, tmp_path: Path) -> None:
    shutil.copytree(default.output / "checkpoint-2", tmp_path / "output" / "checkpoint-2")
    run = trained(SCRIPT, tmp_path, *FOUR_STEPS, "--resume_from_checkpoint", "true")
    untimed = ("step", "reward", "loss", "grad_norm", "entropy", "completions/mean_length", "num_tokens")
    assert [[line[key] for key in untimed] for line in run.training] == [
        [line[key] for key in untimed] for line in default.training
    ]
    ours, theirs = (load_file(finished.output / "model.safetensors") for finished in (run, default))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.skipif(not Path(GSM8K, "train.jsonl").is_file(), reason="TRL_GRPO_EXT_GSM8K names no folder of GSM8K")
@pytest.mark.nightly
def test_recipe_on_the_real_gsm8k(tmp_path: Path) -> None:
    words = options(dataset_path=f"{GSM8K}/train.jsonl", num_generations_eval=1)
    run = trained(SCRIPT, tmp_path, *options(**SMALL), *words, "--log_completions")
    rows = [json.loads(line) for line in Path(GSM8K, "train.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = {f"Question: {row['question']}\nAnswer:": row["answer"] for row in rows}
    assert "7457 training problems, 16 held out; 1 process(es)" in run.out
    logged = run.completions()
    assert len({row["prompt"] for row in logged}) >= 8
    references = [answers[row["prompt"]] for row in logged]
    recomputed = gsm8k_accuracy(completions=[row["completion"] for row in logged], answer=references)
    assert [row["gsm8k_accuracy"] for row in logged] == recomputed


FILES = {
    "typo.yaml": "lerning_rate: 1",
    "no_reference.jsonl": '{"question": "?", "answer": "#### 5"}\n\n{"question": "?", "answer": "no idea"}\n',
}
FAILURES = {
    "unknown key": ("--config {folder}/typo.yaml", ("'lerning_rate'", "Did you mean 'learning_rate'")),
    "no reference": ("--dataset_path {folder}/no_reference.jsonl", ("no_reference.jsonl, line 3", "'no idea'")),
    "unknown reward": ("--rewards gsm8k_acuracy", ("'gsm8k_acuracy'", "Did you mean 'gsm8k_accuracy'")),
    "too few problems": ("--train_problems 3", ("3 training problem(s)", "takes 4")),
    "no model": ("--model_name_or_path Qwen/Qwen2.5-0.5B-Instruct", ("cannot be downloaded", "--embedded")),
    "nothing to resume": ("--resume_from_checkpoint true", ("no complete checkpoint", "output'")),
    "no place to write": ("--output_dir /dev/null/run", ("--output_dir", "'/dev/null' is no folder")),
    "another engine": ("--engine zero3", ("made for engine zero3", "the launch is one_process")),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_mistake_is_told_in_one_sentence(name: str, tmp_path: Path) -> None:
    words, says = FAILURES[name]
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    forked(SCRIPT, tmp_path, *options(**SMALL), *words.split()).assert_refused(*says)


@pytest.mark.parametrize(
    ("device", "processes", "places"),
    [("cuda:0", 1, {"": "cuda:0"}), ("cuda:0", 2, None), ("cpu", 1, None)],  # TRL leaves two to the engine
)
def test_one_process_keeps_to_one_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, processes: int, places: object
) -> None:
    args = arguments(tmp_path / "out", model_init_kwargs={}, num_generations=2)
    args.__dict__["_setup_devices"] = torch.device(device)  # what `args.device` is on such a machine
    args._n_gpu = 8
    state = SimpleNamespace(num_processes=processes, distributed_type="NO")
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    check_setup(args, ModelConfig("model"), state)  # type: ignore[arg-type]
    assert args.model_init_kwargs.get("device_map") == places
    assert args.n_gpu == (1 if (device, processes) == ("cuda:0", 1) else 8)  # above 1, TRL refuses


def test_evaluation_has_whole_batches() -> None:
    rows = [{"question": str(number), "answer": "1"} for number in range(10)]
    assert whole_batches(rows, rows, train_batch=10, eval_batch=4) == rows[:8]
    assert whole_batches(rows, rows, train_batch=1, eval_batch=5) == rows
    assert whole_batches(rows, rows[:3], train_batch=1, eval_batch=4) == rows[:3]
