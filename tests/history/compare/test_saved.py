"""Files of all kinds, rewards called on them, and one clear sentence for what cannot be read."""

import json
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


def test_reward_is_called_once_as_trl_calls_it(tmp_path: Path) -> None:
    seen = Seen()
    file = saved(tmp_path, scored_step=[9] * 4)
    compare(file, [{"rewards": [seen]}, {"rewards": [seen]}], dataset=hints(tmp_path))
    (columns,) = seen.columns
    assert columns["completions"] == TEXTS
    assert columns["prompts"] == ["Q: 2+3?\nA:"] * 4
    assert columns["hint"] == ["a"] * 4
    assert columns["trainer_state"].global_step == 9
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


def test_mask_without_what_tools_wrote(tmp_path: Path) -> None:
    turns = [[0, 0, -1, 1, 1], [0, 0, 0], [0], [0]]
    live = [[False] * 5, [True] * 3, [False], [True]]
    file = saved(tmp_path, turns=turns, live=live, truncated=[True, False, True, False], rewards=[{"r": 1.0}] * 4)
    compared = compare(file, [{"mask_truncated_completions": False}, {}])
    unmasked, masked = (compared.results[name][0].mask_B_T.sum(dim=1).tolist() for name in compared.results)
    assert (unmasked, masked) == ([4, 3, 1, 1], [0, 3, 0, 1])


def test_saved_rewards_come_without_their_parts(tmp_path: Path) -> None:
    file = saved(tmp_path, parts=[["r/x"], [], [], []], rewards=[{"r": value} for value in (0.0, 1.0, 0.0, 1.0)])
    for hook in ("part_credit", "process_rewards"):
        with pytest.raises(ConfigurationError, match="list the rewards"):
            compare(file, [{"advantage_hooks": [hook]}, {}])
    assert compare(file, [{"advantage_hooks": ["centred"]}, {}]).selections[0].reward_mean == 0.5


def test_rewards_of_any_row_count(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "a", "rewards": {"x": 1.0}} for _ in range(4)]
    rows[2]["rewards"] = {"x": None, "y": 3}
    compared = compare(lines(tmp_path, rows), [{}], tokenizer=str(EMBEDDED))
    assert compared.batches[0].rewards == {"x": [1.0, 1.0, None, 1.0], "y": [None, None, 3.0, None]}
    assert compared.selections[0].reward_mean == 1.5


ROW = {"prompt": "a", "completion": "", "step": 10, "group": 0, "truncated": False}
REFUSED: dict[str, tuple[list[Any], str]] = {
    "foreign": ([{"a": 1}], "'completion'"),
    "not an object": ([[1]], "line 1"),
    "not a text": ([{**ROW, "completion": 3}], "row 0"),
    "half records": ([{**ROW, "token_ids": [1]}], "'ends'"),
    "no tokens": ([{**ROW, "token_ids": None, "live": [], "starts": [], "ends": []}], "row 0: the token_ids is None"),
    "rewards in a list": ([{**ROW, "rewards": [1, 2]}], r"row 0: the rewards is \[1, 2\]"),
    "a reward in letters": ([ROW, {**ROW, "rewards": {"r": "1"}}], "row 1: the rewards is {'r': '1'}"),
    "unequal groups": ([{**ROW, "group": one} for one in "aab"], "'b' has 1, 'a' has 2"),
    "no tokenizer": ([ROW], "tokenizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_read_saved_refuses_in_one_sentence(tmp_path: Path, case: str) -> None:
    rows, named = REFUSED[case]
    with pytest.raises(ConfigurationError, match=named) as raised:
        compare(write_lines(tmp_path / "x.jsonl", rows), [{}])
    assert "x.jsonl" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_read_saved_of_a_file_that_is_cut_off(tmp_path: Path) -> None:
    file = saved(tmp_path) / "token_records" / "step_00010.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ConfigurationError, match=file.name):
        compare(tmp_path, [{}])


def fragile(completions: list[str], **columns: Any) -> list[float]:
    return [1 / (text != "no") for text in completions]


def of_turns(completions: list[str], **columns: Any) -> list[Any]:
    return [Parts({"first": (0.5, Place(turn=0))}) for _ in completions]


TEACHER = {"name": "teacher_log_ratio", "teacher": "some/model"}
SELECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "forward": ({"advantage_hooks": ["low_probability"]}, "log-probabilities"),
    "reference": ({"advantage_hooks": ["kl_in_reward"]}, "'kl_in_reward' needs ref_logps"),
    "teacher": ({"advantage_hooks": [TEACHER]}, "'teacher_log_ratio' needs some/model"),
    "column": ({"rewards": ["gsm8k_accuracy"]}, "gsm8k_accuracy .*'answer'.*--dataset"),
    "weights": ({"reward_weights": [1, 2]}, "2 reward_weights for 1"),
    "loss type": ({"loss_type": "nope"}, "'nope'.*dapo"),
    "a crash": ({"rewards": [fragile]}, r"step 10: .*'fragile' .*ZeroDivisionError.*row 3 of 4, .*'no'"),
    "values of turns": ({"rewards": [of_turns]}, "'of_turns'"),
}


@pytest.mark.parametrize("case", SELECTIONS)
def test_compare_refuses_by_name(tmp_path: Path, case: str) -> None:
    selection, named = SELECTIONS[case]
    with pytest.raises(TRLGRPOExtError, match=named):
        compare(saved(tmp_path, rewards=[{"r": value} for value in (0.0, 1.0, 0.0, 1.0)]), [{}, selection])


def test_join_columns_refuses_other_data(tmp_path: Path) -> None:
    for row, named in (({"a": 1}, "'question'"), ({"prompt": "other"}, r"'Q: 2\+3")):
        with pytest.raises(ConfigurationError, match=named):
            compare(saved(tmp_path), [{}], dataset=write_lines(tmp_path / "d.jsonl", [row]))
