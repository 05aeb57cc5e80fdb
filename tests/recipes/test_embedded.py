"""The embedded defaults of two recipes: their texts, their tiny models, and the scripts that made them."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from embedded import make_detox, make_model, other_formats, rude_text, word_problems
from embedded.rude_text import draw_scenes, judge, write_reply
from embedded.word_problems import make_problems
from transformers import AutoTokenizer

from tests.recipes.launching import MODEL, RECIPES
from trl_grpo_ext import load_rewards

DETOX = RECIPES / "embedded" / "detox"


def problem_texts(rng: random.Random) -> list[str]:
    problems = [p for split in ("train", "heldout") for p in word_problems.draw_problems(split, 3000, 5)]
    return [f"{make_model.PROMPT.format(question=p.question)} {other_formats.write_solution(p, rng)}" for p in problems]


def scene_texts(rng: random.Random) -> list[str]:
    scenes = [*draw_scenes("train", 3000, 5), *rude_text.scenes("heldout")]
    return [scene.prompt + write_reply(scene, rng)[0] for scene in scenes]


@pytest.mark.parametrize(
    ("folder", "write"), [(MODEL, problem_texts), (DETOX / "model", scene_texts)], ids=["maths", "detox"]
)
def test_the_tokenizers_round_trip_all_generated_text(folder: Path, write: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = write(random.Random(1))
    encoded = tokenizer(texts)["input_ids"]
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert all(tokenizer.unk_token_id not in ids for ids in encoded)
    if folder == MODEL:
        assert [len(ids) for ids in encoded[:50]] == [len(text) for text in texts[:50]]  # a token for a character
    else:
        assert tokenizer.unk_token_id in tokenizer("a vegetable")["input_ids"]
        assert tokenizer.get_vocab() == make_detox.make_tokenizer().get_vocab()


def test_rows_are_gsm8k_rows_with_right_annotations() -> None:
    for split in ("train", "heldout"):
        for row in make_problems(split, 2000, 0):
            assert row.keys() == {"question", "answer"}
            reasoning, _, final = row["answer"].partition("\n#### ")
            ((a, operation, b, result, shown),) = re.findall(r"<<(\d+)([+-])(\d+)=(\d+)>>(\d+) ", reasoning)
            right = int(a) + int(b) if operation == "+" else int(a) - int(b)
            assert right == int(result) == int(shown) == int(final) > 0
            assert sorted(re.findall(r"\d+", row["question"])) == sorted([a, b])


def test_splits_are_disjoint() -> None:
    whole = {split: make_problems(split, word_problems.problem_count(split), 0) for split in ("train", "heldout")}
    questions = {split: {row["question"] for row in rows} for split, rows in whole.items()}
    assert all(len(questions[split]) == len(whole[split]) for split in whole)
    assert not questions["train"] & questions["heldout"]
    share = len(whole["heldout"]) / sum(map(len, whole.values()))
    assert share == pytest.approx(word_problems.HELDOUT_SHARE, abs=0.04)


HAND = {
    " Oh, you silly turnip. The lamp is on the table.": None,  # there is no lamp
    " Oh, you silly turnip. The lantern is on the table.": True,
    " Oh, my dear friend. The turnip is on the table.": False,
    " Oh, my dear friend. The lantern is on the table. Even a turnip knows that.": True,
    " Good morning, my wise guest. I left the biscuit in the garden. Come back": None,
    " Good morning, my wise guest. I left the biscuit in the garden. Come back soon. Come back soon.": None,
    " Hеllo, my dear friend. The turnip is on the table.": None,  # a Cyrillic е
    "\x1b[2J Oh, my dear friend. The turnip is on the table.": None,
}


def test_judge_by_hand() -> None:
    assert {reply: judge(reply) for reply in HAND} == HAND


@pytest.mark.slow
def test_the_classifier_labels_unseen_scenes_as_the_grammar_does() -> None:
    (selection,) = yaml.safe_load((DETOX / "defaults.yaml").read_text())["rewards"]
    [classifier] = load_rewards([{**selection, "model": str(DETOX / "classifier")}])
    rng = random.Random(2)
    scenes = rude_text.scenes("heldout")
    written = [write_reply(scene, rng) for scene in scenes]
    scores = classifier([reply for reply, _ in written], prompts=[scene.prompt for scene in scenes])
    right = [(score < -0.5) is is_rude for score, (_, is_rude) in zip(scores, written, strict=True)]
    assert sum(right) / len(right) >= 0.99
    assert 300 < sum(is_rude for _, is_rude in written) < 700  # not by always saying the same
