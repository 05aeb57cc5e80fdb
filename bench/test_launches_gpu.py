"""The bench of launches: what it starts, how it reads and checks a run, its table, and all of it once on the CPU."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import launches_gpu
from bench.launch_cells import (
    ARMS,
    CELLS,
    EXACT,
    MARKS,
    NOT_OF_TRL,
    OFF,
    PLAIN,
    RECIPES,
    ROOT,
    TINY,
    Size,
    command,
    environment,
    save_model,
    save_problems,
    settings_of,
    shape,
)
from bench.launch_cells_runs import (
    Run,
    Step,
    differences,
    finish,
    last_line,
    measure,
    printed_logs,
    saved_logs,
    steps_of,
    wrong_facts,
    wrong_steps,
    wrong_weights,
)
from trl_grpo_ext.launch.doctor.model import KNOWN_MODELS

SIZE = Size(steps=3, tokens=8, rows=2, parts=2, members=2)
LOGS = [{"step_time": 1.0, "grad_norm": 0.5, "frac_reward_zero_std": 0.0}] * 3
FACTS = {"trained_dtypes": ["float32"], "device": "cuda", "layers_in_4_bits": 0}


def a_run(**changes: Any) -> Run:
    steps = [Step(generation=1.0, update=3.0, tokens=32), Step(generation=2.0, update=2.0, tokens=16)]
    run = Run("0.5B full", PLAIN, steps=steps, logged=[3.0, 4.0], peak=2_500_000_000, facts=FACTS, settings={"seed": 1})
    return dataclasses.replace(run, **changes)


# ------------------------------------------------------------------------------------------------------------ reading


def test_a_step_lasts_from_one_optimizer_step_to_the_next_and_evaluations_are_in_none() -> None:
    def generated(at: float, rows: int, tokens: int) -> dict[str, Any]:
        return {"what": "generated", "at": at, "rows": rows, "tokens": tokens}

    def stepped(at: float) -> dict[str, Any]:
        return {"what": "stepped", "at": at, "peak": 0}

    marks = [generated(1, 1, 8), generated(10, 4, 30), stepped(14), generated(15.5, 4, 32), stepped(18)]
    marks += [generated(20, 4, 7), stepped(21), generated(30, 1, 8)]
    assert steps_of(marks, 4) == [Step(1.5, 2.5, 32), Step(2, 1, 7)]
    assert steps_of(marks, 3) == []


def test_the_means_are_those_of_a_calculation_by_hand() -> None:
    run = a_run()
    assert (run.generation, run.update, run.step_time) == (1.5, 2.5, 3.5)
    assert run.tokens_per_second == 48 / 8


def test_printed_logs_are_found_among_whatever_else_a_run_prints() -> None:
    said = """{'loss': '0.1', 'step_time': '1'
{'loss': '0', 'grad_norm': '1.525', 'epoch': 0.5, 'learning_rate': None, 'step_time': '0.1144'}
{'train_runtime': '0.286', 'train_loss': '0'}
{'step_time': __import__('os').getcwd()}
{'step_time': [1]}
a completion that says {'step_time': '7'}
{'grad_norm': 'nan', 'step_time': '2e-05'}"""
    first, second = printed_logs(said)
    assert first == {"loss": 0, "grad_norm": 1.525, "epoch": 0.5, "step_time": 0.1144}
    assert second["step_time"] == 2e-5
    assert second["grad_norm"] != second["grad_norm"]


def test_saved_logs_are_those_of_training_steps(tmp_path: Path) -> None:
    history = [{"eval_runtime": 1}, {"step_time": 0.5, "grad_norm": None}, {"step_time": 1.5}, {"train_runtime": 2}]
    (tmp_path / "metrics.json").write_text(json.dumps({"history": history}))
    assert saved_logs(tmp_path / "metrics.json") == [{"step_time": 0.5}, {"step_time": 1.5}]


@pytest.mark.parametrize(
    ("said", "last"),
    [
        ("", "nothing"),
        ("loading\nKilled\n\n", "Killed"),
        (
            "error: no such model: x\n  raise subprocess.CalledProcessError(a)\nsubprocess.CalledProcessError: b: c",
            None,
        ),
        ("Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n  at exit", "torch.OutOfMemoryError: CUDA out"),
    ],
)
def test_what_a_failed_run_said_last_is_its_own_error(said: str, last: str | None) -> None:
    assert last_line(said).startswith(last or "error: no such model: x")


# ----------------------------------------------------------------------------------------------------------- checking


def test_a_run_as_it_should_be_has_no_problems() -> None:
    run = a_run()
    assert wrong_steps(run, LOGS, 3, SIZE) == []
    assert wrong_weights(run, "float32", 0, cpu=False) == []
    assert wrong_facts({"engine": "one_process", "bits": 4}, {"bits": 4}) == []
    assert differences(a_run(arm=EXACT), run) == []


@pytest.mark.parametrize(
    ("logs", "stepped", "run", "says"),
    [
        (LOGS[1:], 3, {}, "2 were logged"),
        (LOGS, 2, {}, "the optimizer made 2"),
        (LOGS, 3, {"steps": [Step(1, 1, 32)]}, "1 from the second on"),
        ([*LOGS[:2], {**LOGS[0], "frac_reward_zero_std": 0.5}], 3, {}, r"steps \[3\] had groups without signal"),
        ([{"step_time": 1.0, "grad_norm": 1.0}, *LOGS[1:]], 3, {}, r"steps \[1\] had groups without signal"),
        ([{**LOGS[0], "grad_norm": 0.0}, *LOGS[1:]], 3, {}, r"norms are \[0.0, 0.5, 0.5\]"),
        ([{**LOGS[0], "grad_norm": float("nan")}, *LOGS[1:]], 3, {}, r"norms are \[nan"),
        (LOGS, 3, {"steps": [Step(1, 1, 32), Step(1, 1, 33)]}, r"\[32, 33\] tokens"),
    ],
)
def test_each_fault_of_the_steps_is_told(logs: Any, stepped: int, run: dict[str, Any], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        assert not wrong_steps(a_run(**run), logs, stepped, SIZE)


@pytest.mark.parametrize(
    ("facts", "bits", "says"),
    [
        ({"trained_dtypes": ["bfloat16"]}, 0, "trained_dtypes is"),
        ({"device": "cpu"}, 0, "device is 'cpu', not 'cuda'"),
        ({"layers_in_4_bits": 7}, 0, "7 layers are in 4 bits where 0"),
        ({"trained_dtypes": ["bfloat16"]}, 4, "0 layers are in 4 bits where 4"),
    ],
)
def test_other_weights_than_the_cell_has_are_told(facts: dict[str, Any], bits: int, says: str) -> None:
    assert any(says in line for line in wrong_weights(a_run(facts={**FACTS, **facts}), "float32", bits, cpu=False))


def test_two_sides_with_different_settings_or_parameters_are_not_compared() -> None:
    plain = a_run(settings={"seed": 1, "output_dir": "a", "learning_rate": 1e-6})
    other = a_run(arm=EXACT, settings={"seed": 1, "output_dir": "b", "learning_rate": 2e-6}, facts={**FACTS, "x": 1})
    assert differences(other, plain) == ["learning_rate is 2e-06 here and 1e-06 in trl grpo"]
    assert differences(dataclasses.replace(plain, facts={**FACTS, "device": "cpu"}), plain) == [
        "device is 'cpu', not 'cuda', unlike in trl grpo"
    ]
    launches_gpu.compare(other, [plain])
    assert len(other.problems) == 1


@pytest.mark.parametrize("marks", [None, "", '{"what": "stepped"}', "not JSON", '{"what": "generated", "rows": 4}'])
def test_a_run_that_left_nothing_to_read_has_a_problem(
    marks: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.launch_cells_runs.command", lambda *given: [sys.executable, "-c", ""])
    if marks is not None:
        (tmp_path / "marks.jsonl").write_text(marks)
    run = measure(CELLS[0], PLAIN, {}, SIZE, tmp_path, (tmp_path, tmp_path), 60)
    assert len(run.problems) == 1
    assert run.problems[0].startswith(("what it left cannot be read", "its optimizer never stepped"))


def test_a_run_that_takes_too_long_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); "
    child += "print(p.pid, flush=True); p.wait()"
    started = time.monotonic()
    assert finish([sys.executable, "-c", child], tmp_path, True, 3) is None
    assert time.monotonic() - started < 30
    state = Path(f"/proc/{(tmp_path / 'said').read_text().strip()}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"
    assert finish([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, True, 60) == 3


# ------------------------------------------------------------------------------------------------ what it starts with


def test_both_sides_are_given_the_same_settings(tmp_path: Path) -> None:
    for cell in CELLS:
        settings = settings_of(cell, Size(), tmp_path)
        lines = {arm: command(cell, arm, settings, tmp_path, (tmp_path / "p", tmp_path / "q")) for arm in ARMS}
        for name, value in settings.items():
            for line in lines.values():
                assert line[line.index(f"--{name}") + 1] == str(value)
        assert lines[EXACT].index("exact") == lines[OFF].index("off")
        own = yaml.safe_load((RECIPES / "configs" / cell.config).read_text())
        theirs = yaml.safe_load((tmp_path / "trl.yaml").read_text())
        assert {name: value for name, value in own.items() if name not in NOT_OF_TRL}.items() <= theirs.items()
        assert not set(NOT_OF_TRL) & set(theirs)
        assert own.get("load_in_4bit", False) == (cell.bits == 4)
        assert settings.get("dtype", own["dtype"]) == cell.dtype


def test_the_first_runs_are_those_that_say_most_and_none_is_missing() -> None:
    runs = launches_gpu.order(CELLS, ARMS)
    assert [(cell.name, arm) for cell, arm in runs[:3]] == [
        ("0.5B full", PLAIN),
        ("0.5B full", EXACT),
        ("7B QLoRA", PLAIN),
    ]
    assert len(runs) == len({(cell.name, arm) for cell, arm in runs}) == 12
    assert {arm for _, arm in runs[8:]} == {OFF}
    assert [arm for _, arm in launches_gpu.order(CELLS, [OFF])] == [OFF] * 4


def test_a_tiny_model_has_a_tokenizer_as_large_as_its_vocabulary_that_reads_the_problems(tmp_path: Path) -> None:
    save_model(tmp_path, CELLS[0].model, True, "cpu")
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(tokenizer) == model.config.vocab_size == TINY["vocab_size"]
    text = "Question: Mia has 7 pens. How many does Mia keep?\nAnswer:"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert 10 < len(ids) < 25
    assert tokenizer.decode([511]) == "unused511"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.dtype == torch.bfloat16


def test_the_shapes_have_as_many_parameters_as_published() -> None:
    for cell in CELLS:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape(cell.model, tiny=False))
        assert model.num_parameters() == KNOWN_MODELS[cell.model].parameters


def test_both_sides_train_on_the_same_prompts(tmp_path: Path) -> None:
    ours, theirs = save_problems(tmp_path, 6)
    questions = [json.loads(line)["question"] for line in ours.read_text().splitlines()]
    prompts = [json.loads(line)["prompt"] for line in (theirs / "train.jsonl").read_text().splitlines()]
    assert prompts == [f"Question: {question}\nAnswer:" for question in questions[:-1]]
    assert len(questions) == 7
    assert Size(steps=3, rows=4, parts=2, members=4).problems == 6


def test_a_run_gets_no_setting_of_another_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "ACCELERATE_USE_CPU" not in environment(tmp_path, cpu=False)
    assert environment(tmp_path, cpu=False)["CUDA_VISIBLE_DEVICES"] == "0"
    assert environment(tmp_path, cpu=True)["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert environment(tmp_path, cpu=False)["CUDA_VISIBLE_DEVICES"] == "3"


def test_the_reward_is_the_share_of_even_ids_and_marks_each_optimizer_step(tmp_path: Path) -> None:
    code = """
import torch
from tests.bench.launch_cells_probe import even_share
assert even_share(completion_ids=[[2, 3, 4, 5], [1], [], [8, 8, 8]], prompts=None) == [0.5, 0.0, 0.0, 1.0]
weight = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
for optimizer in (torch.optim.SGD([weight]), torch.optim.AdamW([weight])):
    weight.grad = torch.ones_like(weight)
    optimizer.step()
"""
    file = tmp_path / "marks"
    marked = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), MARKS: str(file)}
    subprocess.run([sys.executable, "-c", code], env=marked, check=True, cwd=tmp_path)
    generated, first, second = map(json.loads, file.read_text().splitlines())
    assert (generated["what"], generated["rows"], generated["tokens"]) == ("generated", 4, 8)
    assert (first["trained"], first["trained_dtypes"], first["layers_in_4_bits"]) == (6, ["bfloat16"], 0)
    assert first["optimizer"].endswith(".SGD")
    assert "trained" not in second
    assert second["peak"] > 10_000_000
    assert generated["at"] < first["at"] < second["at"]


# -------------------------------------------------------------------------------------------------------------- table


def test_the_table_shows_what_counts_and_the_text_what_does_not() -> None:
    faster = a_run(arm=EXACT, steps=[Step(0.5, 1.5, 24)], logged=[1.75])
    failed = a_run(cell="7B full", problems=["ended with status 1: 'no memory'"])
    alone = a_run(cell="7B full", arm=EXACT)
    runs = [alone, failed, faster, a_run()]
    assert launches_gpu.markdown(runs).splitlines()[2:] == [
        "| 0.5B full | trl grpo | 6 | 1.00 | 4 | 1.5 | 2.5 | 3.5 | 2.50 |",
        "| 0.5B full | ours, exact | 12 | 2.00 | 2 | 0.5 | 1.5 | 1.75 | 2.50 |",
        "| 7B full | ours, exact | 6 | - | 4 | 1.5 | 2.5 | 3.5 | 2.50 |",
    ]
    assert launches_gpu.shown(runs).row_count == 3
    said = launches_gpu.sentences(SIZE, runs, ["7B full, ours, off"], "a machine")
    assert "7B full, trl grpo does not count: ended with status 1: 'no memory'." in said
    assert said.endswith("Not run for want of time: 7B full, ours, off.")


def test_when_the_time_is_over_nothing_is_started_and_all_is_named(tmp_path: Path) -> None:
    runs = launches_gpu.order(CELLS[:2], ARMS)
    done, left = launches_gpu.run_all(runs, SIZE, True, time.monotonic() + 10, 100, tmp_path)
    assert done == []
    assert left == [f"{cell.name}, {arm}" for cell, arm in runs]


def test_without_a_gpu_the_script_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert launches_gpu.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- all together


@pytest.mark.slow
def test_both_sides_of_a_tiny_cell_run_and_are_measured(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    words = ["--tiny", "--cells", "0.5B full", "--arms", PLAIN, EXACT, "--steps", "2"]
    status = launches_gpu.main([*words, "--out", str(tmp_path), "--markdown", str(page)])
    found = json.loads((tmp_path / "launches_gpu.json").read_text())
    assert [run["problems"] for run in found["runs"]] == [[], []]
    assert status == 0
    assert [run["arm"] for run in found["runs"]] == [PLAIN, EXACT]
    embedding, layers = 512 * 64, 2 * (2 * 64 * 64 + 2 * 64 * 32 + 64 + 2 * 32 + 3 * 64 * 128 + 2 * 64)
    for run in found["runs"]:
        assert run["facts"]["trained"] == embedding + layers + 64
        (step,), (logged,) = run["steps"], run["logged"]
        assert step["tokens"] <= 8 * 8
        both = step["generation"] + step["update"]
        assert both / 3 < logged < both  # TRL's lacks the optimizer, the logging and the loader
    assert len(page.read_text().splitlines()) > 4
    assert {file.name for file in tmp_path.glob("*.txt")} == {"0.5B_full_trl_grpo.txt", "0.5B_full_ours_exact.txt"}


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device with about 60 GB")
def test_the_launches_are_measured_on_a_gpu(tmp_path: Path) -> None:
    launches_gpu.main(["--out", str(tmp_path)])
    found = json.loads((tmp_path / "launches_gpu.json").read_text())["runs"]
    wrong = [problem for run in found for problem in run["problems"] if not problem.startswith("stopped after")]
    assert wrong == []
    measured = {(run["cell"], run["arm"]) for run in found if not run["problems"]}
    assert measured >= {("0.5B full", PLAIN), ("0.5B full", EXACT)}  # the others as far as the time goes
