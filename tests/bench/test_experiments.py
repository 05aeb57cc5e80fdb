"""`bench.experiments`: what the page shows comes from the committed runs, and each command runs."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import experiments, study
from bench.experiments import EXPERIMENTS, LECTURE_PROMPTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
each = pytest.mark.parametrize("name", list(EXPERIMENTS))


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "images").mkdir(parents=True)
    shutil.copy(DOCS / "evidence.md", tmp_path / "docs")
    return tmp_path / "docs"


@each
def test_page_and_figure_are_those_of_the_committed_runs(name: str, docs: Path) -> None:
    lines = study.Results(experiments.RUNS / f"{name}.jsonl").lines
    if not lines:
        pytest.skip("not run to the end yet, as the page says")
    experiments.draw(name, lines, docs)
    assert (docs / "evidence.md").read_text() == (DOCS / "evidence.md").read_text()
    drawn, committed = (folder / "images" / f"experiment_{name}.svg" for folder in (docs, DOCS))
    made_by = re.compile(r"Matplotlib v[\d.]+")
    if made_by.findall(drawn.read_text()) == made_by.findall(committed.read_text()):
        assert drawn.read_bytes() == committed.read_bytes()


@pytest.mark.nightly
@each
def test_each_command_runs_with_one_seed(name: str, docs: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "bench.experiments", name, "--seeds", "1", "--jobs", "2"]
    command += ["--runs", str(runs), "--docs", str(docs)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = study.Results(runs / f"{name}.jsonl").lines
    assert {line["name"] for line in lines} == set(EXPERIMENTS[name].names)
    assert all(line[EXPERIMENTS[name].shown] is not None for line in lines)
    assert (docs / "images" / f"experiment_{name}.svg").stat().st_size > 10_000


def test_exact_baselines(tmp_path: Path) -> None:
    folder = experiments.lecture_model(tmp_path / "lecture", 3, hidden_size=16, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # else all responses are nearly equally likely
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = LECTURE_PROMPTS[0]
    end = tokenizer.eos_token_id
    found = experiments.exact_baselines(model, prompt, tokenizer)

    first = tokenizer("1 0 2 =").input_ids
    rows: list[tuple[float, float, float, float]] = []  # probability, squared norm, reward, length
    mean = 0.0

    def visit(response: list[int]) -> None:
        nonlocal mean
        if len(response) == 3 or response[-1:] == [end]:
            ids = torch.tensor([first + response])
            logps = torch.log_softmax(model(ids).logits[0], dim=-1)
            logp = sum(logps[len(first) - 1 + t, token] for t, token in enumerate(response))
            gradients = torch.autograd.grad(logp, list(model.parameters()))
            flat = torch.cat([gradient.flatten() for gradient in gradients]).double()
            numbers = [token - tokenizer.convert_tokens_to_ids("0") for token in response if token != end]
            reward = sum(any(x == y for y in numbers) for x in prompt)
            # A token that is no number has no text in the answer, so its neighbours are neighbours there.
            numbers = [number for number in numbers if number >= 0]
            reward += sum(a <= b for a, b in itertools.pairwise(numbers))
            p = float(logp.exp())
            rows.append((p, float(flat.square().sum()), float(reward), float(len(response))))
            mean = mean + p * reward * flat
            return
        for token in range(len(tokenizer)):
            visit([*response, token])

    visit([])
    assert len(rows) == 820
    assert found["probability"] == pytest.approx(1.0, abs=1e-5)

    def expect(value: Any) -> float:
        return sum(p * value(square, reward, length) for p, square, reward, length in rows)

    best = expect(lambda s, r, n: s * r) / expect(lambda s, r, n: s)
    expected = {"none": 0.0, "mean reward": expect(lambda s, r, n: r), "b*": best}
    expected["by length"] = expect(lambda s, r, n: n * r) / expect(lambda s, r, n: n)
    signal = float(mean.square().sum())
    assert found["signal"] == pytest.approx(signal, rel=1e-3)
    for name, b in expected.items():
        assert found[f"b {name}"] == pytest.approx(b, rel=1e-3)
        variance = expect(lambda s, r, n, b=b: s * (r - b) ** 2) - signal
        assert found[f"variance {name}"] == pytest.approx(variance, rel=1e-3)
    assert abs(best - expected["mean reward"]) > 0.01
    assert found["variance b*"] == min(found[f"variance {name}"] for name in expected)
