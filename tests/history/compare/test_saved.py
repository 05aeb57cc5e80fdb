"""Files of all kinds, rewards called on them, and one clear sentence for what cannot be read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.history.compare.saved_files import write_lines, write_words
from trl_grpo_ext.errors import ConfigurationError, TRLGRPOExtError
from trl_grpo_ext.history.compare import compare
from trl_grpo_ext.history.compare.selections import load_selection
from trl_grpo_ext.types import HookDeclaration, Parts, Place, Rollout

ROOT = Path(__file__).parents[3]
EMBEDDED = ROOT / "recipes" / "embedded" / "model"
TEXTS = ["2 + 3 = 5", "it is 6", "5", "no"]


def saved(folder: Path, **columns: list[Any]) -> Path:
    """Four completions of one prompt, saved at step 10."""
    rows = [{"prompt": "Q: 2+3?\nA:", "completion": text, "member": member} for member, text in enumerate(TEXTS)]
    given = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return write_words(folder, [row | more for row, more in zip(rows, given or [{}] * 4, strict=True)], step=10)


def lines(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Texts, of one group if the rows do not say."""
    return write_lines(folder / "s.jsonl", [{"step": 10, "group": 0, "truncated": False, **row} for row in rows])


class Seen:
    """A reward that keeps what it was called with."""

    __name__ = "seen"

    def __init__(self) -> None:
        self.columns: list[dict[str, Any]] = []

    def __call__(self, **columns: Any) -> list[float]:
        self.columns.append(columns)
        return [float(index) for index in range(len(columns["completions"]))]


# ---------------------------------------------------------------------------------------------- what is read


def test_reward_is_called_once_as_trl_calls_it(tmp_path: Path) -> None:
    seen = Seen()
    compare(saved(tmp_path), [{"rewards": [seen]}, {"rewards": [seen]}], dataset=hints(tmp_path))
    (columns,) = seen.columns
    assert columns["completions"] == TEXTS
    assert columns["prompts"] == ["Q: 2+3?\nA:"] * 4
    assert columns["hint"] == ["a"] * 4
    assert columns["trainer_state"].global_step == 10
    assert [len(ids) for ids in columns["completion_ids"]] == [5, 3, 1, 1]
    assert {"step", "advantage", "prompt", "completion", "token_ids"}.isdisjoint(columns)


def hints(folder: Path) -> Path:
    return write_lines(folder / "hints.jsonl", [{"prompt": "Q: 2+3?\nA:", "hint": "a"}])


def test_messages_come_as_they_were(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [{"prompt": json.dumps(prompt), "completion": text} for text in TEXTS]
    seen = Seen()
    compare(write_words(tmp_path / "records", rows), [{"rewards": [seen]}])
    said = [[{"role": "assistant", "content": text}] for text in TEXTS]
    said[0] = [{"role": "assistant", "content": "hm "}, {"role": "assistant", "content": "5"}]
    of_texts = [{"prompt": prompt, "completion": one} for one in said]
    compared = compare(lines(tmp_path, of_texts), [{"rewards": [seen]}], tokenizer=str(EMBEDDED))
    records, texts = seen.columns
    assert records["prompts"] == texts["prompts"] == [prompt] * 4
    assert records["completions"][1:] == texts["completions"][1:] == said[1:]
    assert texts["completions"][0] == said[0]
    assert compared.batches[0].texts[0] == "hm 5"


def test_join_columns_by_the_prompt(tmp_path: Path) -> None:
    data = write_lines(
        tmp_path / "data.jsonl", [{"question": "2+3", "answer": "#### 5"}, {"question": "+", "answer": 0}]
    )
    compared = compare(saved(tmp_path), [{"rewards": ["gsm8k_accuracy"]}], dataset=data)
    assert compared.selections[0].reward_mean == 0.5
    assert compared.correct_by == "gsm8k_accuracy"
    assert [(part.name, part.completions) for part in compared.by_correctness] == [("right", 2), ("wrong", 2)]


@pytest.mark.parametrize("of_texts", [False, True])
def test_spans_reach_their_tokens(tmp_path: Path, of_texts: bool) -> None:
    class Mark:
        declares = HookDeclaration(role="transform", needs=("offsets",))

        def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
            return 2.0 * rollout.parts["spans"].tokens(0)

    def spans(completions: list[Any], **columns: Any) -> list[Any]:
        at = [text.find("5") for text in completions]
        return [None if place < 0 else Parts({"five": (2.0, (place, place + 1))}) for place in at]

    selection = {"rewards": [spans], "advantage_hooks": [Mark()]}
    if of_texts:
        rows = [{"prompt": "p", "completion": text} for text in TEXTS]
        compared = compare(lines(tmp_path, rows), [selection], tokenizer=str(EMBEDDED))
        assert compared.tokens == sum(map(len, TEXTS)) + 4  # characters, and one token that ends each
    else:
        compared = compare(saved(tmp_path), [selection])
    (played,) = compared.results["selection 1"]
    places = [[place for place, value in enumerate(row) if value == 2.0] for row in played.advantages_B_T.tolist()]
    assert places == ([[8], [], [0], []] if of_texts else [[4], [], [0], []])


def test_truncated_completions_are_masked(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "completion": "a b", "rewards": {"r": float(member)}, "truncated": member == 1}
        for member in range(3)
    ]
    masked = {"mask_truncated_completions": True, "advantage_hooks": ["centred"]}
    compared = compare(lines(tmp_path, rows), [{}, masked], tokenizer=str(EMBEDDED))
    plain, without = (compared.results[f"selection {number}"][0] for number in (1, 2))
    assert plain.mask_B_T.sum(1).tolist() == [4, 3, 4]
    assert without.mask_B_T.sum(1).tolist() == [4, 0, 4]
    assert without.advantages_B_T[1].tolist() == [0.0] * 4
    assert without.weights_B_T[0].tolist() == pytest.approx([1 / 8] * 4)  # eight tokens count, not eleven


def test_read_saved_takes_steps_and_a_limit(tmp_path: Path) -> None:
    for step in (3, 1, 2):
        rows = [
            {"group": group, "member": member, "prompt": f"{step}{group}", "completion": "a", "rewards": {"r": member}}
            for group in (0, 1)
            for member in range(3)
        ]
        write_words(tmp_path, rows, step)
    assert list(compare(tmp_path, [{}]).steps) == [1, 2, 3]
    some = compare(tmp_path, [{}], steps=(2, None), limit=10)
    assert (list(some.steps), some.completions, some.groups) == ([2, 3], 9, 3)
    assert compare(tmp_path, [{}], limit=1).completions == 3
    with pytest.raises(ConfigurationError, match="1 to 3"):
        compare(tmp_path, [{}], steps=(4, 9))


def test_the_file_of_a_whole_run_is_a_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "recipes")  # as for their script: some name rewards beside it
    files = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))
    assert files
    for file in files:
        given = yaml.safe_load(file.read_text())
        if "kl_in_reward" in str(given):
            continue  # which needs what nothing saves
        selection = load_selection("run", file)
        named = given.get("rewards")
        assert (selection.rewards is None) == (named is None), file
        assert len(selection.rewards or []) == len(named or []), file
        assert selection.settings["max_completion_length"] == given.get("max_completion_length", 512), file
        assert len(selection.hooks) == len(given.get("advantage_hooks", [])), file


# ---------------------------------------------------------------------------------------------- what is refused

Make = Callable[[Path], Path]


def _cut_off(folder: Path) -> Path:
    file = saved(folder) / "token_records" / "step_00010.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    return folder


def _text(text: str) -> Make:
    def make(folder: Path) -> Path:
        (folder / "x.jsonl").write_text(text)
        return folder / "x.jsonl"

    return make


def _rows(*rows: dict[str, Any]) -> Make:
    return lambda folder: lines(folder, [{"prompt": "a", "completion": "", **row} for row in rows])


REFUSED: dict[str, tuple[Make, str]] = {
    "nothing there": (lambda folder: folder / "no", "There are no token records in '.*no'"),
    "cut off": (_cut_off, "step_00010.parquet is damaged, truncated or still being written"),
    "foreign": (_text('{"a": 1}'), "x.jsonl holds no saved completions: it has no column 'completion'"),
    "not JSON": (_text('{"prompt": "a"}\n{'), "Line 2 of .*x.jsonl is not JSON"),
    "not an object": (_text("[1]"), r"x.jsonl, line 1 is not an object: '\[1\]'"),
    "not a text": (_rows({"completion": 3}), "row 0: the completion is 3"),
    "half records": (_rows({"token_ids": [1]}), "it has no column 'ends'"),
    "unequal groups": (_rows(*({"group": one} for one in "aab")), "group 'b' has 1, 'a' has 2"),
    "no tokenizer": (_rows({}), "has no tokens: give a model or a tokenizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_read_saved_refuses_in_one_sentence(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ConfigurationError, match=message) as raised:
        compare(make(tmp_path), [{}])
    assert "\n" not in str(raised.value)


def fragile(completions: list[str], **columns: Any) -> list[float]:
    return [1 / (text != "no") for text in completions]


def of_turns(completions: list[str], **columns: Any) -> list[Any]:
    return [Parts({"first": (0.5, Place(turn=0))}) for _ in completions]


SELECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "forward": ({"advantage_hooks": ["low_probability"]}, "no group has the log-probabilities that a hook needs"),
    "reference": ({"advantage_hooks": ["kl_in_reward"]}, "'kl_in_reward' needs ref_logps, which nothing saves"),
    "teacher": (
        {"advantage_hooks": [{"name": "teacher_log_ratio", "teacher": "some/model"}]},
        "'teacher_log_ratio' needs some/model, which nothing saves",
    ),
    "column": ({"rewards": ["gsm8k_accuracy"]}, "gsm8k_accuracy needs the column 'answer'"),
    "weights": ({"reward_weights": [1, 2]}, "2 reward_weights for 1 rewards"),
    "loss type": ({"loss_type": "nope"}, "loss_type is 'nope'; it must be one of .*dapo"),
    "a crash": ({"rewards": [fragile]}, r"step 10: .*'fragile' raised ZeroDivisionError.*at row 3 of 4, .*'no'"),
    "values of turns": ({"rewards": [of_turns]}, "the reward 'of_turns' scores turns"),
}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no selection": ({"selections": []}, "give at least one selection"),
    "no file": ({"selections": [Path("nowhere.yaml")]}, "There is no file"),
    "no prompts": ({"dataset": [{"a": 1}]}, "has neither a column 'prompt' nor 'question'"),
    "others": ({"dataset": [{"prompt": "other"}]}, r"A saved prompt is not in --dataset .* 'Q: 2\+3"),
    **{name: ({"selections": [{}, selection]}, message) for name, (selection, message) in SELECTIONS.items()},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_compare_refuses_by_name(tmp_path: Path, case: str) -> None:
    given, message = OPTIONS[case]
    options = {"selections": [{}], **given}
    if "dataset" in options:
        options["dataset"] = write_lines(tmp_path / "d.jsonl", options["dataset"])
    with pytest.raises(TRLGRPOExtError, match=message):
        compare(saved(tmp_path, rewards=[{"r": value} for value in (0.0, 1.0, 0.0, 1.0)]), **options)
