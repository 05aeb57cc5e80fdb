"""`recipes/detox_grpo.py` as a person starts it: real processes, real files, what they print and leave behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from detox.kl_log import KLMeter
from detox.prompts import _chosen, _split

from tests.contexts import Ranks, cut, make_rollout, padded
from tests.recipes.launching import RECIPES, forked, options, trained

SCRIPT = RECIPES / "detox_grpo.py"
DETOX = RECIPES / "embedded" / "detox"

pytestmark = pytest.mark.slow

STEPS = 4  # optimizer steps per rollout: two passes over two batches


def words(*arguments: str, **sizes: Any) -> list[str]:
    """A command line of the script; small, unless `sizes` says otherwise."""
    small: dict[str, Any] = {"max_steps": STEPS, "num_generations": 4, "train_prompts": 64, "eval_prompts": 16}
    small |= {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16}
    return ["--embedded", *options(**{**small, **sizes}), *arguments]


def hooks(**kl: Any) -> list[str]:
    return ["--advantage_hooks", "{name: normalised, std_floor: 0.1}", json.dumps({"name": "kl_in_reward", **kl})]


def check_coefficients(
    training: list[dict[str, Any]], start: float, target: float, completions: int, horizon: float
) -> list[float]:
    """Each logged coefficient follows from the one before and the logged KL; one line per rollout."""
    coefficient = start
    all_of_them = []
    for line in training:
        error = min(max(line["kl_per_completion"] / target - 1, -0.2), 0.2)
        coefficient *= 1 + error * completions / horizon
        assert line["kl_coefficient"] == pytest.approx(coefficient, rel=1e-5), line["step"]
        all_of_them.append(coefficient)
    return all_of_them


@pytest.mark.nightly
def test_the_default_becomes_polite_and_the_grammar_agrees(tmp_path: Path) -> None:
    run = trained(SCRIPT, tmp_path, *options(max_steps=64, eval_prompts=256))
    assert run.out.splitlines()[0] == "The embedded tiny model on generated scenes (no CUDA device is here)"
    before = run.metrics["before"]
    after = run.metrics["after"]
    assert 0.45 < before["rude"] < 0.70
    assert after["rude"] <= 0.12
    assert after["polite"] >= before["polite"] + 0.35
    for evaluation in (before, after):
        assert evaluation["rude"] + evaluation["polite"] + evaluation["neither"] == pytest.approx(1.0, abs=1e-6)
        assert -evaluation["classifier"] == pytest.approx(evaluation["rude"], abs=0.05)
    assert before["KL to the reference (nats)"] == pytest.approx(0.0, abs=1e-4)
    assert 0.4 < after["KL to the reference (nats)"] < 3.0
    coefficients = check_coefficients(run.training, 0.05, 1.2, 128, 400)
    assert min(coefficients) < 0.05  # it falls while the model is near, and rises once it has gone too far
    assert coefficients[-1] > min(coefficients)
    assert after["KL coefficient"] == pytest.approx(coefficients[-1], rel=1e-5)
    row = next(line for line in run.out.splitlines() if "polite" in line and "│" in line)
    assert [float(cell) for cell in row.split("│")[2:4]] == pytest.approx([before["polite"], after["polite"]], abs=6e-4)
    assert (run.output / "detox_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


TOXIC = f"{{name: classifier, model: {DETOX / 'classifier'}, label: toxic}}"
FAILURES = {
    "no target": (hooks(target=0), ("kl_in_reward: target", "got 0")),
    "no such label": (["--rewards", TOXIC], ("no label 'toxic'", "0: 'polite', 1: 'rude'")),
    "other vocabulary": (hooks(reference=str(RECIPES / "embedded" / "model")), ("a different vocabulary",)),
    "not a prompt": (["--dataset_path", "bad.jsonl"], ("bad.jsonl, line 2", "'prompt'")),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_mistake_is_told_in_one_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "Tom"}\n{"text": "Tom"}\n')
    more, says = FAILURES[name]
    forked(SCRIPT, tmp_path, *words(*more)).assert_refused(*says)


def test_the_meter_by_hand_and_over_ranks() -> None:
    # Differences .5, -.1 | 1 (the second token does not count) | nothing (no tokens): (.4 + 1) / 2.
    logps = padded([[-1.0, -0.5], [-1.0, -9.0], [-3.0, -3.0]])
    known = {"old_logps_B_T": logps, "ref_logps_B_T": padded([[-1.5, -0.4], [-2.0, -1.0], [0, 0]])}
    rollout = make_rollout([2, 1, 0], [1.0, 0.0, 0.0], **known, num_generations=3, training=True)
    meter = KLMeter()
    advantages = torch.ones(3, 2)
    assert meter.on_rollout(advantages, rollout) is advantages
    assert meter.take(training=False) is None
    assert meter.take(training=True) == pytest.approx(0.7)
    assert meter.take(training=True) is None

    def on_rank(part: Any) -> float | None:
        own = KLMeter()
        own.on_rollout(torch.ones(part.mask_B_T.shape), part)
        return own.take(training=True)

    assert Ranks(cut(rollout, [2, 1])).run(on_rank) == [pytest.approx(0.7)] * 2


def test_prompts_of_the_hub_are_chosen_by_toxicity() -> None:
    rows = [{"prompt": {"text": f"p{n}", "toxicity": n / 10}} for n in range(10)]
    rows += [{"prompt": {"text": "unscored", "toxicity": None}}, {"prompt": {"text": "p9", "toxicity": 0.9}}]
    chosen = _chosen(rows, "hub/set", 0.5)
    assert [row["prompt"] for row in chosen] == ["p5", "p6", "p7", "p8", "p9", "p9"]
    train, held_out = _split(chosen, 100, 100, "hub/set")
    assert [row["prompt"] for row in train] == ["p5", "p6", "p7", "p8"]
    assert [row["prompt"] for row in held_out] == ["p9"]
