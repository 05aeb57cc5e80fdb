"""A run's files by hand: names, lines that are no JSON, messages as parquet keeps them, and reasons in one line."""

from pathlib import Path

from trl_grpo_ext.history.run_files import messages_in, plain_messages, read_json_lines, reason_of, step_of


def test_step_of_names_that_training_gives() -> None:
    names = ("step_00012.parquet", "completions_7.parquet", "step_.parquet", "xstep_1.parquet", "step_1.parquet.tmp")
    assert [step_of(Path("run") / name) for name in names] == [12, 7, -1, -1, -1]


def test_read_json_lines_tells_of_bad_ones_but_the_last(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"a": NaN}\r\n\n{broken\n[1]\n{"cut": ')
    said: list[str] = []
    assert read_json_lines(tmp_path / "log", said.append) == [{"a": None}, [1]]
    assert [sentence.startswith("Line 3 of ") for sentence in said] == [True]


def test_messages_in_what_was_written() -> None:
    assert messages_in('[{"role": "user", "content": "hi"}]') == [{"role": "user", "content": "hi"}]
    assert [messages_in(text) for text in ('[{"a": 1}]', '[{"cut')] == ['[{"a": 1}]', '[{"cut']
    assert plain_messages(({"content": "x", "name": None},)) == [{"content": "x"}]
    assert reason_of(ValueError("\x1b[31mred.\nmore.")) == "\\x1b[31mred. more"
