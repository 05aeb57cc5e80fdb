"""What the pages say works: the example distribution is built from its page, installed by pip, found, trained with."""

import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.contexts import make_rollout
from trl_grpo_ext import load_rewards
from trl_grpo_ext.aggregation.means import SeqMeanTokenSum
from trl_grpo_ext.credit import flow
from trl_grpo_ext.guard.guarded import guarded
from trl_grpo_ext.testing import check, make_terms
from trl_grpo_ext.testing.samplers import Trial

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "writing_plugins.md").read_text(encoding="utf-8")
REWARDS = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def example(name: str, page: str = PAGE) -> Any:
    """What the page's block that defines it makes."""
    (code,) = [block for block in blocks(page, "python") if re.search(rf"^(class|def) {name}\b", block, re.MULTILINE)]
    names: dict[str, Any] = {"__name__": "of_a_page"}
    exec(code, names)
    return names[name]


def test_the_example_hook() -> None:
    advantages = flow.apply_hooks(torch.tensor([1.0, -1.0]), [example("FirstTokens")(n=2)], make_rollout([4, 2]))
    assert advantages.tolist() == [[1, 1, 0, 0], [-1, -1, 0, 0]]


def test_the_example_hook_that_returns_spans() -> None:
    offsets = [[(0, 2), (2, 5), (5, 8), (8, 9)], [(0, 1)]]  # "so", " so", "rry", "!"
    rollout = make_rollout([4, 1], texts=["so sorry!", "x"], offsets=lambda row: offsets[row])
    hook = example("NoApologies")()
    assert hook.declares.needs == ("offsets",)
    advantages = flow.apply_hooks(torch.tensor([1.0, 1.0]), [hook], rollout)
    assert advantages.tolist() == [[1, 0.5, 0.5, 1], [1, 0, 0, 0]]


def test_the_example_aggregation() -> None:
    # Per-token losses [1, 3], [2, 2, 0, 4], [6]: the mean over sequences of sums / √L is 4.27614.
    rollout = make_rollout([2, 4, 1])
    sums = torch.tensor([4.0, 8.0, 6.0], dtype=torch.float64)
    weights = flow.token_weights(example("SquareRootLength")(), rollout)
    plain = flow.token_weights(SeqMeanTokenSum(), rollout)
    per_row = weights.max(1).values / plain.max(1).values
    assert (per_row * sums).mean().item() == pytest.approx(4.27614, abs=1e-5)


def test_the_example_filter() -> None:
    group_filter = example("NotTooLong")(most=3)
    assert group_filter.keep(make_rollout([2, 4, 1, 6], groups=[0, 0, 1, 1])) == [True, True, "too long", "too long"]
    assert check("group_filter", group_filter).ok


def test_the_example_token_loss() -> None:
    # Probabilities of 0.1 and 0.5, of which the first is below the mean, became 0.2 and 1.
    old = torch.tensor([[0.1, 0.5]], dtype=torch.float64).log()
    loss = example("Asymmetric")()
    carried = loss.on_rollout(make_rollout([2], old_logps_B_T=old))
    terms = make_terms(old + math.log(2), old, torch.ones_like(old), carried_B_T=carried)
    assert loss.loss(terms).tolist() == [pytest.approx([0.1 * math.log(2) ** 2, 0.0])]
    assert check("token_loss", loss).ok


def test_the_example_sampler() -> None:
    sampler = example("LeastSolved")()
    assert check("prompt_sampler", sampler).ok
    trial = Trial(rows=5, count=2)
    sampler.start(trial.pool())
    assert sampler.draw(2, 0) == [0, 1]
    sampler.observe([trial.outcome(row, 0) for row in (0, 1)])  # 0 always, and 1 never
    assert sampler.draw(4, 1) == [2, 3, 4, 1]


def my_reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks(REWARDS, "yaml"))
def test_the_selections_on_the_rewards_page_load_and_score(block: str) -> None:
    (reward,) = load_rewards(yaml.safe_load(block.replace("my_reward", f"{__name__}:my_reward"))["rewards"])
    columns: dict[str, Any] = {"solution": ["18"], "answer": ["18"], "task": ["math"], "completion_ids": [[1, 2]]}
    (score,) = reward(prompts=["p"], completions=["<think>9 * 2</think> \\boxed{18}"], **columns)
    assert score > 0


@pytest.mark.slow
def test_a_guarded_reward_and_a_combinator_of_ones_own() -> None:
    assert "guarded(my_reward, timeout=5.0, workers=2, on_error=None)" in REWARDS
    reward = guarded(my_reward, timeout=5.0, workers=2, on_error=None)
    assert reward(prompts=["p"] * 2, completions=["a", "bcd"], completion_ids=[[1], [2]]) == [1.0, 3.0]
    reward.close()
    best_of = example("Best", REWARDS)
    assert best_of.declares.takes == ("rewards",)
    best = best_of(load_rewards([my_reward, "think_format"]))
    assert best(prompts=["p"], completions=["<think></think>x"], completion_ids=[[1]]) == [16.0]


@pytest.mark.slow
def test_the_readmes_script_trains(tmp_path: Path) -> None:
    (code,) = blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python")[:1]
    assert 'model = "recipes/' in code
    assert 'output_dir="outputs/' in code
    code = code.replace("recipes/", f"{ROOT}/recipes/").replace("outputs/", f"{tmp_path}/outputs/")
    script = [sys.executable, "-c", code]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "prompt_mean" in (tmp_path / "outputs" / "first" / "trl_grpo_ext_plugins.json").read_text(encoding="utf-8")


def test_the_readmes_plugin_is_what_its_entry_point_names() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (project,) = blocks(page, "toml")
    entry_points = tomllib.loads(project)["project"]["entry-points"]["trl_grpo_ext.rewards"]
    assert entry_points == {"no_shouting": "shouting:no_shouting"}
    reward = example("no_shouting", page)
    for completions in (["STOP", "Go on"], [[{"role": "assistant", "content": text}] for text in ("STOP", "Go on")]):
        assert reward(completions=completions) == [0.0, 1.0]
