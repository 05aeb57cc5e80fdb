"""docs/metrics.md names every metric that a run logs, exactly once, and none of ours that no run logs."""

import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

from tests.judge_server import judge_server
from tests.support import length_reward, prompts, train
from trl_grpo_ext.guard.outcomes import Outcome
from trl_grpo_ext.types import Forward, HookDeclaration, Parts, Rollout

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def documented() -> dict[str, list[str]]:
    """The patterns of the page's tables, by the chapter that they stand in."""
    chapters: dict[str, list[str]] = {}
    for chapter in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        rows = [line.split("|")[1:-1] for line in chapter.splitlines() if line.startswith("|")]
        names = [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]
        assert all(1 < len(row) < 5 for row in rows), chapter[:30]
        if names:
            chapters[chapter.split("\n")[0]] = names
    return chapters


DOCUMENTED = documented()
OURS = [name for name in DOCUMENTED["This package's"] if not name.startswith("kl_")]
ALL = [name for names in DOCUMENTED.values() for name in names]


PATTERNS = {name: re.compile("(eval_)?" + "[^/]+".join(map(re.escape, re.split(r"<[a-z]+>", name)))) for name in ALL}
"""A documented name as it is logged: in an evaluation with its prefix, with anything but a slash for `<...>`."""


class BothStages:
    """A hook that acts at both stages, and turns some advantages round."""

    __name__ = "both_stages"
    declares = HookDeclaration(role="transform")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        return advantages_B_T * 0.5

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        return -advantages_B_T


class Shaper:
    """Pays for length."""

    def on_rewards(self, rollout: Rollout) -> torch.Tensor:
        return 0.1 * rollout.lengths_B


def sometimes(completions: list[str], **columns: Any) -> list[float | None]:
    return [None if len(text) % 3 == 0 else math.nan if len(text) % 3 == 1 else 1.0 for text in completions]


def first_letter(completions: list[str], **columns: Any) -> list[Parts]:
    """A part at the first letter, which some completions lack."""
    return [Parts({"letter": (float(len(text)), (0, 1) if len(text) > 2 else None)}) for text in completions]


def half_of_the_groups(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Completions are told apart for some prompts, and score the same for the others."""
    return [float(len(text)) if prompt[0] in "aceg" else 1.0 for prompt, text in zip(prompts, completions, strict=True)]


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "eval_dataset": prompts(2)}
RUNS: list[dict[str, Any]] = [
    {
        "reward_funcs": [length_reward, sometimes],
        "rewards": [{"name": "think_format", "guard": {"retries": 1}}],
        "hooks": ["leave_one_out", Shaper(), BothStages()],
        "loss_aggregation": "token_mean",
        "compact_updates": "exact",
        "token_records": 4,
        "beta": 0.1,
        "entropy_coef": 0.01,
        "pass_at_k": [1, 4],
        "pass_thresholds": {"length_reward": 0.5, "think_format": 1.0},
        **EVALUATED,
    },
    {"reward_funcs": [half_of_the_groups], "resample": {"filter": "signal", "max_rounds": 3}, "max_steps": 3},
    {"prompt_sampler": "difficulty_pool"},
    {"prompt_sampler": {"name": "curriculum", "column": "answer", "rounds": 2}},
    {"prompt_sampler": {"name": "mixture", "column": "answer", "weights": {"0": 1, "1": 1}}},
    {"compact_updates": "exact", "share_prompts": True},
    {"token_losses": [{"name": "kl_cov", "share": 0.2}], "num_iterations": 2},
    {"loss_aggregation": "tail_mean", "loss_type": "cispo", "reward_funcs": [first_letter], "hooks": ["part_credit"]},
    {"loss_type": "vespo", "gradient_accumulation_steps": 2, "pass_at_k": [1], **EVALUATED},
    {"rewards": [{"name": "judge", "model": "m", "criteria": "Is it right?"}]},
    {"loss_aggregation": "token_mean", "hooks": ["entropy_shaping"], "report_to": "tensorboard"},
]


@pytest.fixture(scope="module")
def logged(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every metric of the runs."""
    found: set[str] = set()
    for settings in RUNS:
        folder = tmp_path_factory.mktemp("run")
        with pytest.MonkeyPatch.context() as patch, judge_server() as server:
            patch.setenv("OPENAI_BASE_URL", server.url)
            patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
            if settings.get("report_to") == "tensorboard":
                pytest.importorskip("tensorboard", reason="tensorboard is not installed")
            trainer = train(tiny_model, folder, **{"max_steps": 2, "seed": 1, **settings}).trainer
            found.update(*trainer.state.log_history)
    return found


def test_every_logged_metric_is_documented_exactly_once(logged: set[str]) -> None:
    found = {key: [name for name in ALL if PATTERNS[name].fullmatch(key)] for key in logged}
    assert {key: names for key, names in found.items() if len(names) != 1} == {}


def test_every_documented_metric_of_ours_was_logged(logged: set[str]) -> None:
    assert [name for name in OURS if not any(PATTERNS[name].fullmatch(key) for key in logged)] == []


def test_every_metric_of_trl_is_documented() -> None:
    source = inspect.getsource(grpo_trainer)
    names = re.findall(r'_metrics\[(?:mode|"train")\]\[f?"([^"]+)"\]', source)
    assert len(names) > 30
    missing = {name.replace("{reward_func_name}", "<reward>") for name in names} - {*DOCUMENTED["TRL's"]}
    assert missing == set()


def test_every_outcome_is_named() -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| `outcomes/")]
    assert {outcome.value for outcome in Outcome} <= {*re.findall(r"`(\w+)`", row)}
