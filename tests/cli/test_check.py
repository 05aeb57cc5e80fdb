"""`trl-grpo-ext check` as a command: selections, exit codes, options from files, and what it prints."""

import json
from pathlib import Path

import pytest

from tests.cli.distributions import write_distribution
from tests.cli.terminal import Finished, assert_readable, invoke

REWARDS = '''
from trl_grpo_ext.types import RewardDeclaration

print("chatter at import")

def fine(completions, answer=None, **columns):
    """Score the length."""
    print("chatter in a call")
    texts = [c if isinstance(c, str) else "".join(str(m.get("content") or "") for m in c) for c in completions]
    return [float(len(text) % 7) for text in texts]

def short(completions, **columns):
    """One score too few."""
    return [0.0 for _ in completions][1:]

def exits(completions, **columns):
    raise SystemExit(0)

def hangs(completions, **columns):
    import time
    time.sleep(1000)

def constant(completions, **columns):
    print("\x1b[31m" + "x" * 500)
    return [0.5 for _ in completions]

def remembers(completions, answer=None, seen=set(), **columns):
    new = [str(c) not in seen for c in completions]
    seen.update(map(str, completions))
    return [float(one) for one in new]

def reads_target(completions, target, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(one in text) for one, text in zip(target, texts)]

class Choosy:
    """Scores `word`, and nothing else will do."""

    declares = RewardDeclaration(conformance={"parameters": {"word": "a"}})

    def __init__(self, word: str) -> None:
        self.word = word

    def __call__(self, completions, **columns):
        return [1.0 for _ in completions]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("path")
    rewards = {"fine": "ch_rewards:fine", "short": "ch_rewards:short", "choosy": "ch_rewards:Choosy"}
    rewards |= {name: f"ch_rewards:{name}" for name in ("exits", "hangs", "constant", "remembers")}
    write_distribution(folder, "ch-rewards", {"reward": rewards}, {"ch_rewards.py": REWARDS})
    raises = {"ch_raises.py": "raise RuntimeError('not today')"}
    write_distribution(folder, "ch-raises", {"reward": {"raises": "ch_raises:x"}}, raises)
    return folder


def check(folder: Path, *words: str | Path, width: int | None = None) -> Finished:
    return invoke("check", *words, width=width, env={"PYTHONPATH": str(folder)})


def test_rewards_that_keep_the_rules(folder: Path) -> None:
    done = check(folder, "fine")
    assert done.out.startswith("reward fine: 8")
    assert "it printed: chatter at import" in done.out
    assert "Checking fine, 1 of 1" in done.err
    done = check(folder, "constant", "--json")
    (report,) = json.loads(done.out)
    assert done.status == 0  # without --strict
    assert report["no_effect"].startswith("it gave every text of the kit 0.5")


@pytest.mark.parametrize("width", [60, None])
def test_check_shows_a_broken_rule(folder: Path, width: int | None) -> None:
    done = check(folder, "ch-rewards:short", width=width)
    assert done.status == 1
    assert_readable(done.out[done.out.rindex("reward short") :], width)  # before it a terminal has the rule at hand
    for label in ("broken reward.run", "rule: ", "found: ", "example: ", "why: "):
        assert label in done.plain
    assert ("\x1b[" in done.out) == (width is not None)


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("exits", 1, ["broken reward.run", "it raised SystemExit: 0 (ch_rewards.py, line "]),
        ("hangs", 1, ["broken reward.run", "it did not return within 0.5 s"]),
        ("remembers", 1, ["broken reward.determinism"]),
        ("constant", 3, ["it gave every text of the kit 0.5", "it printed: "]),
        ("fine", 0, ["8 rules kept, 0 broken"]),
        ("raises", 2, ["RuntimeError: not today"]),
        ("{name: choosy, wrd: a}", 2, ["has no parameter 'wrd'. Did you mean 'word'?"]),
    ],
)
def test_check_says_what_a_plugin_does(folder: Path, name: str, status: int, says: list[str]) -> None:
    done = check(folder, name, "--strict", "--timeout", "0.5")
    assert done.status == status, done
    assert [part for part in says if part not in (done.err if status == 2 else done.out)] == []
    assert "\x1b" not in done.out


def test_check_reads_columns(folder: Path, tmp_path: Path) -> None:
    plain = check(folder, "ch_rewards:reads_target", "--strict")
    assert plain.status == 3, plain
    example = """--columns '{"target": ["value of row 1", "value of row 2"]}'"""  # a shell takes it
    assert f"it reads 'target', of which no values were given: {example}" in plain.plain
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "one?", "target": "18"}\n{"prompt": "two?", "target": "3"}\n')
    for given in ('{"target": "18"}', str(rows)):
        done = check(folder, "ch_rewards:reads_target", "--columns", given)
        assert done.status == 0, done
        assert "0 broken" in done.out
    for wrong in ("{target: 18", "gone.jsonl", str(folder / "ch_rewards.py")):
        assert check(folder, "ch_rewards:reads_target", "--columns", wrong).status == 2


def test_all_of_a_distribution(folder: Path) -> None:
    done = check(folder, "--distribution", "ch-rewards", "--json", "--timeout", "2")
    reports = {report["subject"]: report for report in json.loads(done.out)}
    assert done.status == 1
    assert [name for name, report in reports.items() if report["ok"]] == ["choosy", "constant", "fine"]
    assert "reward.run" in [broken["rule"] for broken in reports["short"]["violations"]]
    assert "7 of 7" in done.err
    done = check(folder, "--distribution", "ch_raises", "--json")
    (report,) = json.loads(done.out)
    assert (done.status, report["subject"], report["ok"]) == (2, "raises", False)


def test_what_to_check_must_be_said_once() -> None:
    for words in ((), ("clip", "--distribution", "trl-grpo-ext"), ("--distribution", "trl-grpo-exd")):
        done = invoke("check", *words)
        assert (done.status, done.out) == (2, "")
        assert ("'trl-grpo-ext'" if "trl-grpo-exd" in words else "--distribution NAME") in done.err


def test_a_name_of_two_kinds_is_checked_as_both_unless_a_kind_is_given() -> None:
    both = json.loads(invoke("check", "dr_grpo", "--json").out)
    assert [(report["kind"], report["ok"]) for report in both] == [("advantage_hook", True), ("loss_aggregation", True)]
    one = json.loads(invoke("check", "dr_grpo", "--kind", "aggregation", "--json").out)
    assert [report["kind"] for report in one] == ["loss_aggregation"]
