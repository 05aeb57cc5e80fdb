"""The embedded default of the GSM8K recipe: its problems, its tiny model, and the script that made the model."""

from __future__ import annotations

import random
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
EMBEDDED = RECIPES / "embedded"
MODEL = EMBEDDED / "model"
sys.path.insert(0, str(RECIPES))

from embedded import make_model, other_formats, word_problems  # noqa: E402
from embedded.word_problems import make_problems  # noqa: E402

# ---------------------------------------------------------------------------------------------------------- problems


def test_rows_are_gsm8k_rows_with_right_annotations() -> None:
    for split in ("train", "heldout"):
        rows = make_problems(split, 2000, 0)
        assert len(rows) == 2000
        for row in rows:
            assert row.keys() == {"question", "answer"}
            reasoning, _, final = row["answer"].partition("\n#### ")
            match = re.search(r"<<(\d+)([+-])(\d+)=(\d+)>>(\d+) ", reasoning)
            assert match is not None
            a, operation, b, result, shown = match.groups()
            right = int(a) + int(b) if operation == "+" else int(a) - int(b)
            assert right == int(result) == int(shown) == int(final) > 0
            assert sorted(re.findall(r"\d+", row["question"])) == sorted([a, b])


def test_the_two_whole_splits_are_disjoint_and_have_no_duplicates() -> None:
    whole = {split: make_problems(split, word_problems.problem_count(split), 0) for split in ("train", "heldout")}
    questions = {split: {row["question"] for row in rows} for split, rows in whole.items()}
    assert all(len(questions[split]) == len(whole[split]) for split in whole)
    assert not questions["train"] & questions["heldout"]
    share = len(whole["heldout"]) / sum(map(len, whole.values()))
    assert share == pytest.approx(word_problems.HELDOUT_SHARE, abs=0.04)


# ------------------------------------------------------------------------------------------------- pre-training texts


def test_only_the_right_way_of_answering_is_right() -> None:
    rng = random.Random(0)
    problems = word_problems.draw_problems("train", 1500, 0)
    for writer in other_formats.SHARES:
        rewards = make_model.rewards([writer(problem, rng) for problem in problems], problems)
        assert set(rewards) == {1.0 if writer is other_formats.right else 0.0}, writer.__name__
    assert sum(other_formats.SHARES.values()) == pytest.approx(1.0)


# -------------------------------------------------------------------------------------------------------------- model


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


def test_the_tokenizer_round_trips_all_generated_text(tokenizer: Any) -> None:
    rng = random.Random(1)
    problems = [p for split in ("train", "heldout") for p in word_problems.draw_problems(split, 3000, 5)]
    prompts = [make_model.PROMPT.format(question=p.question) for p in problems]
    texts = [f"{prompt} {other_formats.write_solution(p, rng)}" for prompt, p in zip(prompts, problems, strict=True)]
    encoded = tokenizer(texts)["input_ids"]
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert all(tokenizer.unk_token_id not in ids for ids in encoded)
    assert all(len(ids) == len(text) for ids, text in islice(zip(encoded, texts, strict=True), 50))


@pytest.mark.slow
def test_sampled_accuracy_starts_low_and_short_of_what_the_model_knows(model: Any, tokenizer: Any) -> None:
    problems = word_problems.draw_problems("heldout", 200, 1)
    torch.manual_seed(0)
    completions = make_model.answer(model, tokenizer, problems, sample=True)
    accuracy = sum(make_model.rewards(completions, problems)) / len(problems)
    assert 0.15 < accuracy <= 0.40
    # It ends its answers itself: what was cut off at the limit would have the limit's length.
    assert sum(len(completion) < 56 for completion in completions) > 195
