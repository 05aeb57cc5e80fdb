"""The embedded default of the detox recipe: its grammar, its two tiny models, and the script that made them."""

from __future__ import annotations

import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from trl_grpo_ext import load_rewards

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
DETOX = RECIPES / "embedded" / "detox"
sys.path.insert(0, str(RECIPES))

from embedded import make_detox, rude_text  # noqa: E402
from embedded.rude_text import draw_scenes, judge, write_reply  # noqa: E402

# ------------------------------------------------------------------------------------------------------------- grammar


HAND = {
    " Oh, you silly turnip. The lamp is on the table.": None,  # there is no lamp
    " Oh, you silly turnip. The lantern is on the table.": True,
    " Oh, my dear friend. The turnip is on the table.": False,
    " Oh, my dear friend. The lantern is on the table. Even a turnip knows that.": True,
    " Good morning, my wise guest. I left the biscuit in the garden. Come back soon.": False,
    " Good morning, my wise guest. I left the biscuit in the garden. Come back": None,
    "Good morning, my wise guest. I left the biscuit in the garden.": None,
    " Good morning, my silly guest. I left the biscuit in the garden.": None,
    " Good morning, my wise guest. I left the biscuit in the garden. Come back soon. Come back soon.": None,
    " Good morning, my wise guest. I left the biscuit in the garden.\n": None,
    " good morning, my wise guest. I left the biscuit in the garden.": None,
    " Good morning, my wise guest! I left the biscuit in the garden.": None,
    " Have a lovely day.": None,
    "": None,
    " Hеllo, my dear friend. The turnip is on the table.": None,  # a Cyrillic е
    "\x1b[2J Oh, my dear friend. The turnip is on the table.": None,
}


@pytest.mark.parametrize(("reply", "verdict"), HAND.items())
def test_judge_by_hand(reply: str, verdict: bool | None) -> None:
    assert judge(reply) is verdict


def test_judge_agrees_with_whoever_wrote_the_reply() -> None:
    rng = random.Random(0)
    for split in ("train", "heldout"):
        for scene in rude_text.scenes(split):
            reply, is_rude = write_reply(scene, rng)
            assert judge(reply) is is_rude, reply


def test_train_and_heldout_share_no_prompt_whatever_sizes_and_seeds() -> None:
    train, heldout = ({scene.prompt for scene in rude_text.scenes(split)} for split in ("train", "heldout"))
    assert not train & heldout
    assert len(train) + len(heldout) == 12 * 8 * 12 * 4
    assert len(heldout) / len(train | heldout) == pytest.approx(rude_text.HELDOUT_SHARE, abs=0.02)
    for size, seed in product((1, 100, 899), range(3)):
        assert {scene.prompt for scene in draw_scenes("heldout", size, seed)} <= heldout
        assert len({scene.prompt for scene in draw_scenes("train", size, seed)}) == size


# -------------------------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DETOX / "model", local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DETOX / "model", local_files_only=True)


@pytest.fixture(scope="module")
def classifier() -> Any:
    """The reward as the recipe's defaults select it."""
    (selection,) = yaml.safe_load((DETOX / "defaults.yaml").read_text())["rewards"]
    return load_rewards([{**selection, "model": str(DETOX / "classifier"), "local_files_only": True}])[0]


def test_the_tokenizer_round_trips_all_generated_text(tokenizer: Any) -> None:
    rng = random.Random(1)
    texts = [scene.prompt + write_reply(scene, rng)[0] for scene in draw_scenes("train", 3000, 5)]
    texts += [scene.prompt + write_reply(scene, rng)[0] for scene in rude_text.scenes("heldout")]
    encoded = tokenizer(texts)["input_ids"]
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert all(tokenizer.unk_token_id not in ids for ids in encoded)
    assert tokenizer.unk_token_id in tokenizer("a vegetable")["input_ids"]
    assert tokenizer.get_vocab() == make_detox.make_tokenizer().get_vocab()


@pytest.mark.slow
def test_the_classifier_labels_unseen_scenes_as_the_grammar_does(classifier: Any) -> None:
    rng = random.Random(2)
    scenes = rude_text.scenes("heldout")
    written = [write_reply(scene, rng) for scene in scenes]
    scores = classifier([reply for reply, _ in written], prompts=[scene.prompt for scene in scenes])
    right = [(score < -0.5) is is_rude for score, (_, is_rude) in zip(scores, written, strict=True)]
    assert sum(right) / len(right) >= 0.99
    assert 300 < sum(is_rude for _, is_rude in written) < 700  # not by always saying the same


@pytest.mark.slow
def test_the_language_model_is_often_rude_and_seldom_outside_the_grammar(model: Any, tokenizer: Any) -> None:
    torch.manual_seed(0)
    replies = make_detox.sample_replies(model, tokenizer, draw_scenes("heldout", 400, 1))
    assert 0.45 < sum(rude_text.rude(replies)) / 400 < 0.70
    assert sum(rude_text.neither(replies)) / 400 < 0.06
