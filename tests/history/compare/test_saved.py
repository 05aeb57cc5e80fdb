"""Files of all kinds, rewards called on them, and one clear sentence for what cannot be read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.history.compare.saved_files import write_lines, write_table
from trl_grpo_ext.errors import ConfigurationError, RewardError, TRLGRPOExtError
from trl_grpo_ext.history.compare import compare, load_policy
from trl_grpo_ext.history.compare.saved import load_tokenizer
from trl_grpo_ext.history.compare.selections import load_selection
from trl_grpo_ext.types import HookDeclaration, Parts, Place, Rollout

ROOT = Path(__file__).parents[3]
EMBEDDED = ROOT / "recipes" / "embedded" / "model"
TEXTS = ["2 + 3 = 5", "it is 6", "5", "no"]


def trl_table(folder: Path, **columns: list[Any]) -> Path:
    write_table(
        folder / "completions" / "completions_00010.parquet",
        **{"step": [10] * 4, "prompt": ["Q: 2+3?\nA:"] * 4, "completion": TEXTS, **columns, "advantage": [0.0] * 4},
    )
    return folder


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
    compare(trl_table(tmp_path, hint=["a", "b", "c", "d"]), [{"rewards": [seen]}, {"rewards": [seen]}])
    (columns,) = seen.columns
    assert columns["completions"] == TEXTS
    assert columns["prompts"] == ["Q: 2+3?\nA:"] * 4
    assert columns["hint"] == ["a", "b", "c", "d"]
    assert columns["trainer_state"].global_step == 10
    assert [len(ids) for ids in columns["completion_ids"]] == [6, 4, 2, 2]  # words, and what ends them
    assert {"step", "advantage", "prompt", "completion"}.isdisjoint(columns)


def test_messages_come_as_they_were(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    said = [[{"role": "assistant", "content": text}] for text in TEXTS]
    said[0] = [{"role": "assistant", "content": "hm ", "tool_calls": "f"}, {"role": "assistant", "content": "5"}]
    write_table(tmp_path / "x.parquet", prompt=[prompt] * 4, completion=said, reward=[0.0, 1.0, 0.0, 1.0])
    seen = Seen()
    compared = compare(tmp_path, [{"rewards": [seen]}])
    assert seen.columns[0]["prompts"][0] == prompt
    assert seen.columns[0]["completions"] == said  # without the empty tool_calls that parquet adds
    assert compared.batches[0].texts[0] == "hm 5"


def test_join_columns_by_the_prompt(tmp_path: Path) -> None:
    data = write_lines(
        tmp_path / "data.jsonl", [{"question": "2+3", "answer": "#### 5"}, {"question": "+", "answer": 0}]
    )
    compared = compare(trl_table(tmp_path, old=[0.5] * 4), [{"rewards": ["gsm8k_accuracy"]}], dataset=data)
    assert compared.selections[0].rewards == {"gsm8k_accuracy": 0.5}
    assert compared.correct_by == "gsm8k_accuracy"
    assert [(part.name, part.completions) for part in compared.by_correctness] == [("right", 2), ("wrong", 2)]


@pytest.mark.parametrize("tokenizer", [None, str(EMBEDDED)])
def test_spans_reach_their_tokens(tmp_path: Path, tokenizer: str | None) -> None:
    class Mark:
        declares = HookDeclaration(role="transform", needs=("offsets",))

        def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
            return 2.0 * rollout.parts["spans"].tokens(0)

    def spans(completions: list[Any], **columns: Any) -> list[Any]:
        at = [text.find("5") for text in completions]
        return [None if place < 0 else Parts({"five": (2.0, (place, place + 1))}) for place in at]

    spans.__name__ = "spans"
    compared = compare(trl_table(tmp_path), [{"rewards": [spans], "advantage_hooks": [Mark()]}], tokenizer=tokenizer)
    (played,) = compared.results["selection 1"]
    places = [[place for place, value in enumerate(row) if value == 2.0] for row in played.advantages_B_T.tolist()]
    if tokenizer is not None:  # and one token that ends each
        assert compared.tokens == sum(map(len, (text.replace(" ", " ") for text in TEXTS))) + 4
    # Words: 2, +, 3, =, 5. The tokenizer's tokens are characters.
    assert places == ([[4], [], [0], []] if tokenizer is None else [[8], [], [0], []])


def test_truncated_completions_are_masked(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "completion": "a b", "reward": float(member), "truncated": member == 1} for member in range(3)
    ]
    masked = {"mask_truncated_completions": True, "advantage_hooks": ["centred"]}
    compared = compare(write_lines(tmp_path / "s.jsonl", rows), [{}, masked])
    plain, without = (compared.results[f"selection {number}"][0] for number in (1, 2))
    assert plain.mask_B_T.sum(1).tolist() == [3, 2, 3]
    assert without.mask_B_T.sum(1).tolist() == [3, 0, 3]
    assert without.advantages_B_T[1].tolist() == [0.0] * 3
    assert without.weights_B_T[0].tolist() == pytest.approx([1 / 6] * 3)  # six tokens count, not eight


def test_read_saved_takes_steps_and_a_limit(tmp_path: Path) -> None:
    rows = [
        {"step": step, "group": group, "prompt": f"{step}{group}", "completion": str(member), "reward": float(member)}
        for step in (1, 2, 3)
        for group in "ab"
        for member in range(3)
    ]
    file = write_lines(tmp_path / "s.jsonl", rows[::-1])  # in any order
    assert list(compare(file, [{}]).steps) == [1, 2, 3]
    some = compare(file, [{}], steps=(2, None), limit=10)
    assert (list(some.steps), some.completions, some.groups) == ([2, 3], 9, 3)
    assert compare(file, [{}], limit=1).completions == 3
    with pytest.raises(ConfigurationError, match="1 to 3"):
        compare(file, [{}], steps=(4, 9))


def test_saved_groups_of_a_repeated_prompt(tmp_path: Path) -> None:
    folder = trl_table(tmp_path, r=[0.0, 1.0, 0.0, 1.0])
    assert compare(folder, [{}]).groups == 1
    assert compare(folder, [{"num_generations": 2}]).groups == 2
    assert compare(folder, [{}], num_generations=2).groups == 2


def test_a_reward_that_logged_a_number_can_be_left_out(tmp_path: Path) -> None:
    folder = trl_table(tmp_path, r=[0.0, 1.0, 0.0, 1.0], logged=[5.0, 6.0, 7.0, 8.0], count=[1, 2, 3, 4])
    both = compare(folder, [{}, {"reward_weights": [2.0, 0.0]}])
    assert [*both.selections[0].rewards] == ["r", "logged"]
    assert [one.reward_mean for one in both.selections] == [7.0, 1.0]
    seen = Seen()
    compare(folder, [{"rewards": [seen]}])
    assert seen.columns[0]["count"] == [1, 2, 3, 4]  # a column of numbers may be what a reward needs


def test_the_file_of_a_whole_run_is_a_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "recipes")  # as for their script: some name rewards beside it
    files = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))
    assert files
    for file in files:
        given = yaml.safe_load(file.read_text())
        selection = load_selection("run", file)
        named = given.get("rewards")
        assert (selection.rewards is None) == (named is None), file
        assert len(selection.rewards or []) == len(named or []), file
        assert selection.settings["max_completion_length"] == given.get("max_completion_length", 512), file
        assert len(selection.hooks) == len(given.get("advantage_hooks", [])), file


# ---------------------------------------------------------------------------------------------- what is refused

Make = Callable[[Path], Path]


def _cut_off(folder: Path) -> Path:
    file = trl_table(folder, r=[0.0, 1.0, 0.0, 1.0]) / "completions" / "completions_00010.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    return folder


def _text(name: str, text: str) -> Make:
    def make(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder / name

    return make


REFUSED: dict[str, tuple[Make, str]] = {
    "nothing there": (lambda folder: folder / "no", "There is no file or folder '.*no' with saved completions"),
    "only a log": (lambda f: _text("trl_grpo_ext_log.jsonl", "")(f).parent, "Train with log_completions: true"),
    "cut off": (_cut_off, "completions_00010.parquet is not a complete parquet file .*; it may be truncated"),
    "foreign": (
        lambda folder: write_table(folder / "x.parquet", a=[1], b=[2]),
        "x.parquet holds no saved completions: it has no column 'completion' and no 'prompt', but: a, b",
    ),
    "no rows": (lambda folder: write_table(folder / "x.parquet", prompt=[], completion=[]), "no completions in it"),
    "not JSON": (_text("x.jsonl", '{"prompt": "a"}\n{'), "Line 2 of .*x.jsonl is not JSON"),
    "not an object": (_text("x.jsonl", "[1]"), r"x.jsonl, line 1 is not an object: '\[1\]'"),
    "not a text": (_text("x.jsonl", '{"prompt": "a", "completion": 3}'), "row 0: the completion is 3; it must be text"),
    "no step": (_text("x.jsonl", '{"prompt": "a", "completion": "", "step": "x"}'), "the step 'x' is no whole number"),
    "half records": (
        lambda folder: write_table(folder / "x.parquet", prompt=["a"], completion=["b"], token_ids=[[1]]),
        "it has no column 'ends' and no 'group'",
    ),
    "unequal groups": (
        lambda folder: write_lines(
            folder / "x.jsonl", [{"prompt": "a", "completion": "", "group": group} for group in "aab"]
        ),
        "all groups must have as many completions, and group 'b' has 1, 'a' has 2",
    ),
    "cut into a prompt": (
        lambda folder: write_lines(folder / "x.jsonl", [{"prompt": prompt, "completion": ""} for prompt in "aaabbb"]),
        "3 completions of one prompt stand in a row, which is no multiple of num_generations=2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_read_saved_refuses_in_one_sentence(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ConfigurationError, match=message) as raised:
        compare(make(tmp_path), [{}], num_generations=2)
    assert "\n" not in str(raised.value)


def fragile(completions: list[str], **columns: Any) -> list[float]:
    return [1 / (text != "no") for text in completions]


def of_turns(completions: list[str], **columns: Any) -> list[Any]:
    return [Parts({"first": (0.5, Place(turn=0))}) for _ in completions]


def strict(completions: list[str], **columns: Any) -> list[float]:
    raise RewardError("the reference of row 2 cannot be read")


SELECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "forward": (
        {"advantage_hooks": ["low_probability"]},
        "'low_probability' needs log-probabilities, which only token",
    ),
    "reference": ({"advantage_hooks": ["kl_in_reward"]}, "'kl_in_reward' needs log-probabilities under a reference"),
    "teacher": (
        {"advantage_hooks": [{"name": "teacher_log_ratio", "teacher": "some/model"}]},
        "'teacher_log_ratio' needs the model 'some/model', but a comparison loads no teacher",
    ),
    "column": ({"rewards": ["gsm8k_accuracy"]}, "gsm8k_accuracy needs the column 'answer'.*--dataset FILE"),
    "weights": ({"reward_weights": [1, 2]}, "2 reward_weights for 1 rewards"),
    "weights twice": (
        {"rewards": [{"name": "think_format", "weight": 2}], "reward_weights": [1]},
        "reward weights are given twice",
    ),
    "loss type": ({"loss_type": "nope"}, "loss_type is 'nope'; it must be one of .*dapo"),
    "masking": ({"mask_truncated_completions": True}, "mask_truncated_completions needs to know"),
    "a crash": ({"rewards": [fragile]}, r"step 10: .*'fragile' raised ZeroDivisionError.*at row 3 of 4, .*'no'"),
    "an error": ({"rewards": [strict]}, r"completions_00010.parquet, step 10: the reference of row 2 cannot"),
    "values of turns": ({"rewards": [of_turns]}, "the reward 'of_turns' scores turns"),
}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no selection": ({"selections": []}, "give at least one selection"),
    "no file": ({"selections": [Path("nowhere.yaml")]}, "There is no file"),
    "no prompts": ({"dataset": [{"a": 1}]}, "has neither a column 'prompt' nor 'question'"),
    "others": ({"dataset": [{"prompt": "other"}]}, r"A saved prompt is not in --dataset .* 'Q: 2\+3"),
    "no tokenizer": ({"tokenizer": Path("nowhere")}, r"--tokenizer '.*nowhere' cannot be loaded"),
    **{name: ({"selections": [{}, selection]}, message) for name, (selection, message) in SELECTIONS.items()},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_compare_refuses_by_name(tmp_path: Path, case: str) -> None:
    given, message = OPTIONS[case]
    options = {"selections": [{}], **given}
    if "dataset" in options:
        options["dataset"] = write_lines(tmp_path / "d.jsonl", options["dataset"])
    with pytest.raises(TRLGRPOExtError, match=message):
        compare(trl_table(tmp_path, r=[0.0, 1.0, 0.0, 1.0], word=list("abcd")), **options)


def test_text_tokens_of_odd_texts(tmp_path: Path) -> None:
    rows = [
        {"prompt": "\ud800", "completion": text, "r": 1.0 * (text == "")} for text in ("\ud800 a", "x " * 50_000, "")
    ]
    file = write_lines(tmp_path / "s.jsonl", rows)
    compared = compare(file, [{}, {"loss_aggregation": "seq_mean_token_mean"}])
    assert compared.tokens == 3 + 50_001 + 1
    with_tokens = compare(file, [{}], tokenizer=str(EMBEDDED))
    assert with_tokens.tokens > 100_000
    json.dumps(compared.plain(), allow_nan=False)


def test_loading_does_not_hide_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **keywords: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", full)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", full)
    for load in (load_tokenizer, load_policy):
        with pytest.raises(torch.OutOfMemoryError):
            load("some/name")
