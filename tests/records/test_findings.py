"""Each finding on records made by hand: seen from the right step, and silent where nothing is wrong."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import length_reward, train
from trl_grpo_ext.advantages.transforms import RewardSchedule
from trl_grpo_ext.records.findings import Curve, Finding, RunFacts, findings, findings_of
from trl_grpo_ext.records.manifest import FILE, Manifest

STEPS = 40
History = list[dict[str, Any]]


def history(seed: int = 0, steps: int = STEPS, **changed: Callable[[int], float] | float) -> History:
    """A healthy run, with noise like that of 64 completions; what is changed has none. Slashes are written `__`."""
    noise = random.Random(seed)
    entries: History = []
    for step in range(1, steps + 1):
        done = step / steps
        right = min(1.0, max(0.0, 0.3 + 0.4 * done + noise.gauss(0, 0.06)))
        entry: dict[str, Any] = {
            "step": step,
            "reward": right + 0.2,
            "rewards/exact/mean": right,
            "rewards/exact/std": math.sqrt(right * (1 - right)),
            "rewards/form/mean": 0.2,
            "rewards/form/std": 0.1 * noise.random(),
            "rewards/watched/mean": right + noise.gauss(0, 0.03),
            "rewards/watched/std": 0.4,
            "outcomes/exact/timeout": 0.02 * noise.random(),
            "frac_reward_zero_std": 0.2 + 0.5 * done + noise.gauss(0, 0.05),
            "entropy": 1.5 - done + noise.gauss(0, 0.1),
            "completions/clipped_ratio": 0.1 + 0.1 * noise.random(),
        }
        for key, value in changed.items():
            entry[key.replace("__", "/")] = value(step) if callable(value) else value
        entries.append(entry)
        if step % 5 == 0:
            entries.append({"step": step, "eval_reward": right + noise.gauss(0, 0.03)})
    return entries


def names(entries: History, **facts: Any) -> list[str]:
    return [one.name for one in findings(RunFacts(entries, **{"untrained": {"watched"}, **facts}))]


def test_healthy_runs_have_no_findings() -> None:
    for seed in range(200):
        assert names(history(seed)) == [], seed


def after(step: int, before: float, then: float) -> Callable[[int], float]:
    return lambda now: before if now <= step else then


CASES: dict[str, tuple[History, str, tuple[int, int]]] = {
    "a metric of weight 0 falls": (
        history(reward=lambda n: n / 40, rewards__watched__mean=lambda n: 0.6 - max(n - 12, 0) / 60),
        "reward_against_metric",
        (8, 12),
    ),
    "the reward is lost again": (
        history(reward=lambda n: 0.3 + min(n, 20) / 40 - 0.4 * (n > 25)),
        "reward_fell",
        (20, 28),
    ),
    "no group has signal": (history(frac_reward_zero_std=after(20, 0.5, 1.0)), "no_signal", (21, 28)),
    "lengths run to the limit": (history(completions__clipped_ratio=lambda n: min(n / 30, 1.0)), "truncated", (14, 24)),
    "the limit is too short": (history(completions__clipped_ratio=0.9, reward=0.1), "truncated", (1, 1)),
    "the entropy is gone": (history(entropy=after(6, 1.5, 0.01), reward=0.3), "entropy_gone", (7, 15)),
    "one reward is silent": (history(rewards__form__std=0.0), "constant_reward", (1, 1)),
    "one reward is silent, and float32 rounds": (
        history(rewards__form__std=1.9e-6, rewards__form__mean=12.3),
        "constant_reward",
        (1, 1),
    ),
    "None grows": (history(rewards__form__none=lambda n: n / 100), "failing_reward", (14, 26)),
    "nothing can be read any more, so that there is no reward": (
        history(
            outcomes__exact__unparseable_reference=after(30, 0.0, 1.0), reward=lambda n: 0.5 if n <= 30 else math.nan
        ),
        "failing_reward",
        (31, 36),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_found_alone_and_from_its_step(case: str) -> None:
    entries, name, (first, last) = CASES[case]
    (found,) = findings(RunFacts(entries, {"watched"}))
    assert found.name == name
    assert first <= found.since <= last
    assert found.until == STEPS
    assert str(found) == f"since step {found.since} {found.sentence}."


QUIET: dict[str, History] = {
    "a metric that falls with the reward": history(
        reward=lambda n: 1.0 - n / 400, rewards__watched__mean=lambda n: 0.6 - n / 100
    ),
    "a trained reward that gives way to another": history(reward=lambda n: n / 40, rewards__form__mean=lambda n: -n),
    "pass at a large k falls": history(**{"eval_pass@1": lambda n: n / 80, "eval_pass@16": lambda n: 1 - n / 80}),
    "entropy gone where the reward has risen": history(entropy=lambda n: 1.5 if n < 5 else 0.01),
    "a reward that is None for some by design": history(rewards__form__none=0.5),
    "values that are no numbers": history(entropy=math.nan, frac_reward_zero_std=math.inf),
    "a run of seven steps": history(steps=7, frac_reward_zero_std=1.0, reward=0.0),
    "nothing at all": [],
}


@pytest.mark.parametrize("case", QUIET)
def test_what_is_no_fault_is_not_told(case: str) -> None:
    assert names(QUIET[case]) == []


def test_a_shaper_is_no_reward_that_is_silent() -> None:
    entries = history(rewards__overlong__mean=0.0, rewards__overlong__std=0.0)
    assert (names(entries, shapers={"overlong"}), names(entries)) == ([], ["constant_reward"])


def test_a_curve_by_hand() -> None:
    curve = Curve({step: float(step) for step in range(1, 11)})
    assert curve.window == 2
    assert curve.means.tolist() == pytest.approx([1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5])
    assert curve.change() == pytest.approx(8.0)  # a line has no noise
    assert curve.change(8) == 0.0
    assert (curve.best_step, curve.window_at(5), curve.window_at(1)) == (10, 3, 0)
    assert curve.since(curve.means > 5) == 5  # the window of 4 and 5 has 4.5
    assert curve.since(curve.means > 9) is None  # too short a time
    jagged = Curve({step: float(step % 2) for step in range(1, 11)})
    assert jagged.change() == jagged.fall() == 0.0


def test_a_training_ends_with_its_findings_on_stderr(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(completions: list[str], **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    settings: dict[str, Any] = {"max_steps": 8, "max_completion_length": 4, "learning_rate": 0.0}
    train(tiny_model, tmp_path / "two", reward_funcs=[length_reward, silent], reward_weights=[1.0, 0.5], **settings)
    told = capsys.readouterr().err
    assert f"report {tmp_path / 'two'} shows it):\nsince step 1 the reward silent is 1 for every completion.\n" in told
    train(tiny_model, tmp_path / "zero", reward_funcs=[length_reward, silent], reward_weights=[1.0, 0.0], **settings)
    assert "what went wrong" not in capsys.readouterr().err
    log = (tmp_path / "two" / "trl_grpo_ext_log.jsonl").read_text().splitlines()
    (again,) = findings_of(tmp_path / "two", list(map(json.loads, log)))
    assert again == Finding("constant_reward", 1, 8, "the reward silent is 1 for every completion")


@pytest.mark.nightly
def test_a_part_of_the_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two healthy trainings are quiet and five planted faults are found, as docs/report.md says of all."""
    from bench import findings as measured

    healthy, planted = ["plain_1", "leave_one_out"], ["gamed", "hot", "server", "runaway"]
    measured.main(["--output", str(tmp_path), "--only", *healthy, *planted])
    assert "2 of 2 healthy trainings are quiet, 4 of 4 planted faults are found" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [8, 30, STEPS])  # the mean of six ones must be 1
def test_idle_parts(steps: int) -> None:
    parts: dict[str, Any] = {
        "parts/r/wrong/mean": 0.0,
        "parts/r/wrong/present": 1.0,
        "parts/r/right/mean": 1.0,
        "parts/r/gone/mean": 0.0,
        "parts/r/gone/present": 0.0,
        "parts/r/healthy/mean": after(2, 0.0, 0.4),
    }
    found = [one for one in findings(RunFacts(history(steps=steps, **parts))) if one.name.startswith("part")]
    assert [(one.name, one.sentence) for one in found] == [
        ("part_missing", "no completion has r/gone"),
        ("part_never_right", "no completion scores in r/wrong"),
        ("part_always_right", "every completion scores 1 in r/right"),
    ]


def test_schedule_given_in_python_is_known(tiny_model: Path, tmp_path: Path) -> None:
    schedule = RewardSchedule(weights={"length_reward": [[0, 1.0], [9, 0.0]]})
    run = train(tiny_model, tmp_path, hooks=[schedule], max_steps=1)
    assert schedule.weights["length_reward"][1] == (9, 0.0)
    assert isinstance(findings_of(tmp_path, run.trainer.state.log_history), list)
    (recorded,) = [one for one in Manifest.read(tmp_path / FILE).plugins if one.name == "reward_schedule"]
    assert recorded.parameters["weights"] == {"length_reward": [[0, 1.0], [9, 0.0]]}
