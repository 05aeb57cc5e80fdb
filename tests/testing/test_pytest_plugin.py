"""`pytest --trl-grpo-ext`, run by a pytest of its own on a distribution that is really installed (on its path)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import trl_grpo_ext.testing.kit  # noqa: F401  (before pytester notes which modules there are, and takes later ones away)

pytest_plugins = "pytester"

PLUGINS = '''
import torch


class Polite:
    """1.0 where the completion says please."""

    def __init__(self, word):
        self.word = word

    def __call__(self, completions, **columns):
        texts = [c if isinstance(c, str) else "".join(m.get("content") or "" for m in c) for c in completions]
        return [float(self.word in text) for text in texts]


class Local:
    """Divides by the tokens of its own rank."""

    def weights(self, rollout):
        return rollout.mask_B_T / rollout.mask_B_T.sum().clamp(min=1.0)
'''


def install(pytester: pytest.Pytester, entry_points: str, options: str = "") -> None:
    """Put a distribution beside an empty test file, found on the path as pip would leave it."""
    pytester.makepyprojecttoml(f'[project]\nname = "manners"\nversion = "0.1"\n{options}')
    pytester.makepyfile(manners_plugins=PLUGINS, test_own="def test_own():\n    pass\n")
    info = pytester.mkdir("manners-0.1.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: manners\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(entry_points)


REWARD = "[trl_grpo_ext.rewards]\npolite = manners_plugins:Polite\n"
AGGREGATION = "[trl_grpo_ext.loss_aggregations]\nlocal_mean = manners_plugins:Local\n"
POLITE = '[tool.trl-grpo-ext.check.polite]\nparameters = {word = "18"}\n'


def run(pytester: pytest.Pytester, *words: str, in_process: bool = True) -> pytest.RunResult:
    path = os.pathsep.join([str(pytester.path), str(Path(__file__).parents[2])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.syspath_prepend(pytester.path)
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        start = pytester.runpytest_inprocess if in_process else pytester.runpytest_subprocess
        return start("-p", "trl_grpo_ext.testing.pytest_plugin", *words)


def test_each_plugin_and_rule_is_a_test_of_its_own(pytester: pytest.Pytester) -> None:
    install(pytester, REWARD + AGGREGATION, POLITE)
    result = run(pytester, "-v", "--trl-grpo-ext")
    lines = result.outlines
    assert any(line.startswith("test_own.py::test_own PASSED") for line in lines)
    assert any(line.startswith("trl-grpo-ext::polite::reward.length PASSED") for line in lines)
    assert any("trl-grpo-ext::polite::reward.outcomes SKIPPED" in line for line in lines)
    failed = [line for line in lines if " FAILED" in line and "::" in line and not line.startswith("FAILED")]
    assert len(failed) == 1
    assert failed[0].startswith("trl-grpo-ext::local_mean::aggregation.ranks FAILED")
    text = result.stdout.str()
    assert "example: lengths=[" in text
    assert "why: Counting the rank's own rows" in text
    assert "Traceback" not in text
    assert "aggregations.py" not in text
    assert result.ret == 1


def test_the_option_takes_no_folder_for_its_value(pytester: pytest.Pytester) -> None:
    install(pytester, REWARD, POLITE)
    result = run(pytester, "--trl-grpo-ext", "test_own.py", "-k", "own or reward.length")
    result.assert_outcomes(passed=2, deselected=17)
    assert result.ret == 0


def test_plugins_can_be_named(pytester: pytest.Pytester) -> None:
    install(pytester, REWARD + AGGREGATION, POLITE)
    result = run(pytester, "-v", "--trl-grpo-ext=local_mean,trl-grpo-ext:token_mean", "-k", "aggregation.mask")
    assert "local_mean::aggregation.mask PASSED" in result.stdout.str()
    assert "token_mean::aggregation.mask PASSED" in result.stdout.str()
    assert "polite" not in result.stdout.str()


@pytest.mark.parametrize(
    ("words", "entry_points", "options", "message"),
    [
        (["--trl-grpo-ext=nobody"], REWARD, POLITE, "No installed plugin or distribution is called 'nobody'"),
        (["--trl-grpo-ext"], "", "", "trl_grpo_ext.loss_aggregations, trl_grpo_ext.group_filters?"),
        (["--trl-grpo-ext", "-k", "reward.call"], REWARD, "", "word"),
        (
            ["--trl-grpo-ext", "-k", "reward.call"],
            "[trl_grpo_ext.rewards]\npolite = manners_plugins:Rude\n",
            "",
            "has no attribute 'Rude'",
        ),
        (["--trl-grpo-ext", "-k", "reward.call"], REWARD, f"{POLITE}colour = 1\n", "no option 'colour'"),
    ],
)
def test_what_does_not_load_is_a_failing_test_with_the_error(
    pytester: pytest.Pytester, words: list[str], entry_points: str, options: str, message: str
) -> None:
    install(pytester, entry_points, options)
    result = run(pytester, *words)
    assert result.parseoutcomes()["failed"] == 1
    assert message in result.stdout.str()
    assert "Traceback" not in result.stdout.str()


def test_without_the_option_nothing_is_imported(pytester: pytest.Pytester) -> None:
    install(pytester, REWARD, POLITE)
    pytester.makepyfile(
        test_own="""
        import sys

        def test_own():
            assert "torch" not in sys.modules
            assert "manners_plugins" not in sys.modules
        """
    )
    run(pytester, in_process=False).assert_outcomes(passed=1)
