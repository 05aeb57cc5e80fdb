"""Reading what a training left: all of a real one, and no error whatever lies there."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.history.report.trained import write_history
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.history.report import load_run, load_runs
from trl_grpo_ext.history.report.page_data import read_rows
from trl_grpo_ext.history.report.trained_run import LOG, STATE

HISTORY = [{"loss": 0.5, "reward": 1.0, "step": 1}, {"loss": 0.25, "reward": 2.0, "step": 2}]


def told(run: Any, *words: str) -> bool:
    """Whether one sentence of what is missing has all these words."""
    return any(all(word in sentence for word in words) for sentence in run.missing)


def test_a_real_run_is_read_whole(trained_once: tuple[Path, dict[str, Any]]) -> None:
    folder, histories = trained_once
    run = load_run(folder / "one")
    assert run.missing == []
    assert run.name == "one"
    assert run.last_step == 4
    assert run.manifest is not None
    assert [record.name for record in run.manifest.plugins][:3] == ["length_reward", "short_ones", "regex_match"]
    assert [path.name for path in run.records] == [f"step_{step:05d}.parquet" for step in (1, 2, 3, 4)]
    assert [path.name for path in run.completions] == [f"completions_{step:05d}.parquet" for step in (1, 2, 3, 4)]
    assert run.settings["beta"] == 0.04
    assert run.settings["loss_aggregation"] == "seq_mean_token_mean"
    for key in ("reward", "loss", "eval_reward", "advantage/centred/std", "outcomes/regex_match/scored"):
        expected = [(entry["step"], entry[key]) for entry in histories["one"] if entry.get(key) is not None]
        assert len(expected) >= 2
        assert list(zip(*run.series(key), strict=True)) == expected


def test_load_run_without_the_live_log(own_runs: Path, trained_once: Any) -> None:
    folder = own_runs / "one"
    (folder / LOG).unlink()
    steps = [entry["step"] for entry in trained_once[1]["one"] if "reward" in entry]
    assert [entry["step"] for entry in load_run(folder).history if "reward" in entry] == steps
    state = folder / "checkpoint-4" / STATE
    for damage in (lambda: state.write_bytes(state.read_bytes()[:1000]), state.unlink):
        damage()
        run = load_run(folder)
        assert run.last_step == 2
        assert told(run, "checkpoint-4", "complete", "An older")  # which was read


def test_entries_are_ordered_and_what_is_no_number_is_none(tmp_path: Path) -> None:
    (tmp_path / STATE).write_text(
        '{"log_history": [{"step": 2, "loss": NaN}, {"step": 1, "loss": 1e999}, 7, {"loss": 3}, {"step": true}]}'
    )
    run = load_run(tmp_path)
    assert run.history == [{"step": 1, "loss": None}, {"step": 2, "loss": None}]
    assert run.series("loss") == ([], [])


def test_load_run_with_unfinished_and_broken_lines(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    run = load_run(tmp_path)
    assert len(run.history) == 1
    assert not told(run, LOG, "not JSON")
    (tmp_path / LOG).write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo\n{"step": 3, "loss": 1.0}\n')
    run = load_run(tmp_path)
    assert [entry["step"] for entry in run.history] == [1, 3]
    assert told(run, "Line 2", LOG, "not JSON")


DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "garbage for a state": (STATE, bytes(range(256)), "cannot be read"),
    "very deep JSON": (STATE, b"[" * 200_000, "not complete JSON"),
    "another manifest": ("trl_grpo_ext_plugins.json", b'{"format": 99}', "No plugins are shown"),
    "other settings": ("trl_grpo_ext_settings.json", b'{"format": 1, "settings": []}', "No hyper-parameters"),
}


@pytest.mark.parametrize("case", DAMAGED.values(), ids=DAMAGED)
def test_what_is_damaged_is_a_sentence(own_runs: Path, case: tuple[str, bytes, str]) -> None:
    file, content, sentence = case
    if file == STATE:  # which counts where there is no live log
        (own_runs / "one" / LOG).unlink()
    whole = load_run(own_runs / "one")
    (own_runs / "one" / file).write_bytes(content)
    run = load_run(own_runs / "one")
    assert told(run, file, sentence)
    assert run.history == whole.history


def test_a_run_of_plain_trl_has_no_records_of_ours(own_runs: Path) -> None:
    for name, what in (("trl_grpo_ext_settings.json", "hyper-parameters"), ("trl_grpo_ext_plugins.json", "plugins")):
        (own_runs / "one" / name).unlink()
        sentence = f"No {what} are shown: there is no {name}, which plain TRL does not write."
        assert sentence in load_run(own_runs / "one").missing


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_is_an_error(own_runs: Path, seed: int) -> None:
    chance = random.Random(seed)
    files = [path for path in sorted((own_runs / "two").rglob("*")) if path.is_file()]
    file = chance.choice([path for path in files if path.suffix in (".json", ".jsonl", ".parquet")])
    whole = file.read_bytes()
    damaged = bytearray(whole[: chance.randrange(len(whole) + 1)] if chance.random() < 0.5 else whole)
    for _ in range(chance.randrange(4)):
        if damaged:
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    try:
        file.write_bytes(damaged)
        run = load_run(own_runs / "two")
        for path in run.records:
            read_rows(run, path)
        lost = {path for path in (*run.records, *run.completions) if not run.columns_of(path)}
    finally:
        file.write_bytes(whole)
    assert lost <= {file}  # the others are all there
    assert all(told(run, str(path)) for path in lost)
    assert all(sentence.isprintable() for sentence in run.missing)


def test_where_nothing_of_a_run_is_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for folder in (tmp_path, tmp_path / "absent", tmp_path / "notes.txt", "a\0b"):
        with pytest.raises(ConfigurationError):
            load_run(folder)


def test_several_runs_get_different_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = ["a/run", "b/run", "c/other", "x/b/run", "a/run"]
    for place in places:
        write_history(tmp_path / place, HISTORY)
    runs = load_runs([tmp_path / place for place in places])
    assert [run.name for run in runs] == ["a/run", "b/run", "other", "b/run_2"]
    with pytest.raises(ConfigurationError):
        load_runs([])
    monkeypatch.chdir(tmp_path / "c" / "other")
    assert load_run(".").name == "other"
