"""`Classifier` with real tiny models: against scores computed text by text, in batches, on hostile texts."""

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations import deepspeed

from tests.tiny_classifier import LABELS, save_tiny_classifier
from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.rewards import classifier
from trl_grpo_ext.rewards.classifier import Classifier

TEXTS = ["hello there", "a", "you are 100 fools.", "nice", "what is this about then", "zz 9", "hello there"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return save_tiny_classifier(tmp_path_factory.mktemp("bert"), tiny_model)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return save_tiny_classifier(tmp_path_factory.mktemp("llama"), tiny_model, kind="llama")


def scored(reward: Classifier, completions: list[Any], **columns: Any) -> list[float | None]:
    return reward(completions=completions, completion_ids=[[1]] * len(completions), **columns)


@torch.no_grad()
def logits_one_by_one(folder: Path, texts: list[str]) -> torch.Tensor:
    """`(B, labels)`, without padding or batches."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return torch.cat([model(input_ids=torch.tensor([tokenizer(text).input_ids])).logits for text in texts])


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_classifier_score_is_the_labels_softmax(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    wanted = logits_one_by_one(folder, TEXTS).softmax(dim=-1)
    for label in range(3):
        ours = wanted[:, label].tolist()
        signed = scored(Classifier(folder, label=label, sign=-2.0), TEXTS)
        assert signed == pytest.approx([-2 * x for x in ours], abs=1e-6)
        assert max(ours) - min(ours) > 0.05  # the texts do differ
        for size in (1, 3, 32):
            reward = Classifier(folder, label=LABELS[label], batch_size=size)
            assert scored(reward, TEXTS[::-1]) == pytest.approx(ours[::-1], abs=1e-6)


def test_classifier_multi_label_has_sigmoids_and_a_chat_template_is_used(tmp_path: Path, tiny_model: Path) -> None:
    folder = save_tiny_classifier(tmp_path, tiny_model, problem_type="multi_label_classification")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}#{{ m.role }} {{ m.content }}.{% endfor %}"
    tokenizer.save_pretrained(folder)
    wanted = logits_one_by_one(folder, ["#user ask.#assistant nice."]).sigmoid()[:, 1].tolist()
    both = Classifier(folder, label=1, text="prompt_and_completion")
    prompts = [[{"role": "user", "content": "ask"}]]
    assert scored(both, ["nice"], prompts=prompts) == pytest.approx(wanted, abs=1e-6)
    logits = logits_one_by_one(folder, TEXTS)[:, 1]
    assert scored(Classifier(folder, label="toxic"), TEXTS) == pytest.approx(logits.sigmoid().tolist(), abs=1e-6)
    raw = Classifier(folder, label="toxic", score="logit", sign=-1.0)
    assert scored(raw, TEXTS) == pytest.approx((-logits).tolist(), abs=1e-5)


def test_classifier_with_one_output(tmp_path: Path, tiny_model: Path) -> None:
    folder = save_tiny_classifier(tmp_path, tiny_model, kind="llama", labels=1)
    wanted = logits_one_by_one(folder, TEXTS)[:, 0].tolist()
    assert scored(Classifier(folder), TEXTS) == pytest.approx(wanted, abs=1e-5)
    assert min(wanted) < 0


def test_messages_are_read_and_prompts_go_before_when_asked_for(bert: Path) -> None:
    answers = [[{"role": "assistant", "content": text}] for text in TEXTS]
    assert scored(Classifier(bert, label=1), answers) == scored(Classifier(bert, label=1), TEXTS)
    reward = Classifier(bert, label=1, text="prompt_and_completion")
    for prompt, start, said in (("ask ", "ask ", TEXTS), ([{"role": "user", "content": "ask"}], "ask\n", answers)):
        wanted = logits_one_by_one(bert, [f"{start}{text}" for text in TEXTS]).softmax(dim=-1)[:, 1].tolist()
        assert scored(reward, said, prompts=[prompt] * len(TEXTS)) == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(RewardError, match="'prompts'"):
        scored(reward, TEXTS)


def test_classifier_truncates_prompts_first(bert: Path) -> None:
    both = Classifier(bert, label=1, max_length=5, text="prompt_and_completion")
    assert scored(both, ["vwxyz"], prompts=["abc"]) == scored(both, ["vwxyz"], prompts=["q"])
    assert scored(both, ["z"], prompts=["vwxy"]) == scored(both, ["wxyz"], prompts=["v"])
    reward = Classifier(bert, label=1, max_length=10_000)  # the model has 64 positions
    assert scored(reward, ["ab" * 32]) == scored(reward, ["ab" * 33]) == scored(reward, ["ab" * 500_000])


def test_classifier_on_hostile_and_empty_texts(bert: Path) -> None:
    reward = Classifier(bert, label=1)
    hostile = ["\x00", "\ud800", "a\udfff", "é漢🙂", "<pad><pad>", "<eos>", "\n"]
    scores = scored(reward, [*hostile, "", None, [], "a"])
    assert all(score is not None and 0 <= score <= 1 for score in scores[: len(hostile)])
    assert scores[len(hostile) :] == [None] * 3 + [pytest.approx(scored(reward, ["a"])[0], abs=1e-6)]
    assert scored(reward, []) == []


def test_classifier_loads_once_and_pickles_without(bert: Path) -> None:
    classifier._load.cache_clear()
    first, second = Classifier(bert, label="toxic"), Classifier(str(bert), label="rude", sign=-1.0)
    assert classifier._load.cache_info().misses == 0
    scored(first, ["a"])
    scored(second, ["a"])
    assert classifier._load.cache_info().misses == 1
    pickled = pickle.dumps(first)
    assert len(pickled) < 1000
    assert scored(pickle.loads(pickled), TEXTS) == scored(first, TEXTS)


def test_a_model_without_the_label_a_trained_head_or_finite_scores_is_refused(tmp_path: Path, bert: Path) -> None:
    AutoModel.from_pretrained(bert).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    for label in ("Toxic", 3, None):
        with pytest.raises(ConfigurationError, match="'toxic'"):
            scored(Classifier(bert, label=label), ["a"])
    with pytest.raises(RewardError, match="weight"):
        scored(Classifier(tmp_path, label=0), ["a"])
    model = AutoModelForSequenceClassification.from_pretrained(bert)
    model.classifier.bias.data.fill_(math.nan)
    model.save_pretrained(tmp_path)
    with pytest.raises(RewardError, match="row 0"):
        scored(Classifier(tmp_path, label=0), ["a"])


def test_it_is_not_cut_over_the_ranks_under_zero_3(bert: Path) -> None:
    settings = type("ZeRO3", (), {"config": {}, "is_zero3": lambda self: True})()  # what transformers keeps of it
    classifier._load.cache_clear()
    deepspeed.set_hf_deepspeed_config(settings)
    try:
        assert scored(Classifier(bert, label=1), ["a"])[0] is not None
        assert deepspeed.is_deepspeed_zero3_enabled()  # as before, for the models that are trained
    finally:
        deepspeed.unset_hf_deepspeed_config()
