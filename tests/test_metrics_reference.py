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


def pattern(name: str) -> re.Pattern[str]:
    """A documented name as it is logged: in an evaluation with its prefix, with anything but a slash for `<...>`."""
    parts = re.split(r"<[a-z]+>", name)
    return re.compile("(?:eval_)?" + "[^/]+".join(re.escape(part) for part in parts))


PATTERNS = {name: pattern(name) for name in ALL}


def matching(key: str) -> list[str]:
    return [name for name in ALL if PATTERNS[name].fullmatch(key)]


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


RUNS: dict[str, dict[str, Any]] = {
    "weights, compact, records, a guarded reward, evaluation": {
        "reward_funcs": [length_reward, sometimes],
        "rewards": [{"name": "think_format", "guard": {"retries": 1}}],
        "loss_aggregation": "token_mean",
        "compact_updates": "exact",
        "token_records": 4,
        "beta": 0.1,
        "entropy_coef": 0.01,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
        "pass_at_k": [1, 4],
        "pass_thresholds": {"length_reward": 0.5, "think_format": 1.0},
        "trainer_arguments": {"advantage_hooks": ["leave_one_out", Shaper(), BothStages()], "eval_dataset": prompts(2)},
    },
    "resampling": {
        "reward_funcs": [half_of_the_groups],
        "resample": {"filter": "signal", "max_rounds": 3},
        "max_steps": 3,
    },
    "a pool": {"prompt_sampler": "difficulty_pool"},
    "a curriculum": {"prompt_sampler": {"name": "curriculum", "column": "answer", "rounds": 2}},
    "a mixture": {"prompt_sampler": {"name": "mixture", "column": "answer", "weights": {"0": 1, "1": 1}}},
    "shared prompts": {"compact_updates": "exact", "share_prompts": True},
    "a token loss": {"token_losses": [{"name": "kl_cov", "share": 0.2}], "num_iterations": 2},
    "a reduction, cispo, parts": {
        "loss_aggregation": "tail_mean",
        "loss_type": "cispo",
        "reward_funcs": [first_letter],
        "advantage_hooks": ["part_credit"],
    },
    "vespo, pass@k": {
        "loss_type": "vespo",
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
        "pass_at_k": [1],
        "trainer_arguments": {"eval_dataset": prompts(2)},
    },
    "a judge": {"rewards": [{"name": "judge", "model": "m", "criteria": "Is it right?"}]},
    "tensorboard": {
        "loss_aggregation": "token_mean",
        "advantage_hooks": ["entropy_shaping"],
        "report_to": "tensorboard",
    },
}


@pytest.fixture(scope="module")
def histories(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for name, settings in RUNS.items():
        folder = tmp_path_factory.mktemp("run")
        with pytest.MonkeyPatch.context() as patch, judge_server() as server:
            patch.setenv("OPENAI_BASE_URL", server.url)
            patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
            chosen = {"max_steps": 2, "seed": 1, **settings}
            if chosen.get("report_to") == "tensorboard":
                pytest.importorskip("tensorboard", reason="tensorboard is not installed")
            found[name] = train(tiny_model, folder, **chosen).trainer.state.log_history
    return found


def logged(histories: dict[str, list[dict[str, Any]]]) -> set[str]:
    return {key for name in RUNS for entry in histories[name] for key in entry}


def test_every_logged_metric_is_documented_exactly_once(histories: dict[str, list[dict[str, Any]]]) -> None:
    found = {key: matching(key) for key in sorted(logged(histories))}
    assert {key: names for key, names in found.items() if len(names) != 1} == {}


def test_every_documented_metric_of_ours_was_logged(histories: dict[str, list[dict[str, Any]]]) -> None:
    keys = logged(histories)
    assert [name for name in OURS if not any(PATTERNS[name].fullmatch(key) for key in keys)] == []


def test_every_metric_of_trl_is_documented() -> None:
    source = inspect.getsource(grpo_trainer)
    names = re.findall(r'_metrics\[(?:mode|"train")\]\[f?"([^"]+)"\]', source)
    assert len(names) > 30
    missing = {name.replace("{reward_func_name}", "<reward>") for name in names} - {*DOCUMENTED["TRL's"]}
    assert missing == set()


def test_every_outcome_is_named() -> None:
    from trl_grpo_ext.guard.outcomes import Outcome

    (row,) = [line for line in PAGE.splitlines() if line.startswith("| `outcomes/")]
    assert {outcome.value for outcome in Outcome} <= {*re.findall(r"`(\w+)`", row)}
