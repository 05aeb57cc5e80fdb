"""The rewards, the prompt and the evaluation of `configs/smollm2_1.7b_tutorial.yaml`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import AutoTokenizer

from tests.recipes.launching import RECIPES
from tests.support import arguments, save_tiny_model
from trl_grpo_ext import load_rewards

sys.path.insert(0, str(RECIPES))

from common.errors import RecipeError
from common.problems import as_dataset
from common.trainer import RecipeTrainer, stop_at_strings
from tutorial.rewards import answered_digits, tutorial_accuracy, tutorial_format

FORM = re.compile(r"<think>.*?</think>.*?<answer>\D*?(\d+)\D*?</answer>", re.DOTALL)
"""What the tutorial's expression comes down to; `re.match`, so from the beginning."""

SETTINGS = yaml.safe_load((RECIPES / "configs" / "smollm2_1.7b_tutorial.yaml").read_text())

# The reference is 18. Completion, correctness, format.
TABLE = [
    ("<think>2 * 9</think><answer>18</answer>", 1.0, 0.5),
    ("<think>2 * 9</think>\n<answer> 18 </answer>", 1.0, 0.5),
    ("<think></think><answer>18</answer>", 1.0, 0.5),
    ("<think>a\nb\n\nc</think>\n\nSo:\n<answer>The answer is 18.</answer>", 1.0, 0.5),
    ("<think>x</think><answer>$18</answer>", 1.0, 0.5),
    ("<think>x</think><answer>18 cookies</answer>", 1.0, 0.5),
    ("<think>x</think><answer>18</answer> and 19 more", 1.0, 0.5),
    ("<think>x</think><answer>018</answer>", 1.0, 0.5),
    ("<think>x</think><answer>-18</answer>", 1.0, 0.5),  # the sign is no digit
    ("<think>x</think><answer>17</answer>", 0.0, 0.5),
    ("<think>x</think><answer>180</answer>", 0.0, 0.5),
    ("<think>x</think><answer>18.0</answer>", 0.0, 0.0),
    ("<think>x</think><answer>1,8</answer>", 0.0, 0.0),
    ("<think>x</think><answer>9 + 9 = 18</answer>", 0.0, 0.0),
    ("<think>x</think><answer>eighteen</answer>", 0.0, 0.0),
    ("<think>x</think><answer></answer>", 0.0, 0.0),
    ("<think>x</think><answer>18", 0.0, 0.0),
    ("<think>x</think>18</answer>", 0.0, 0.0),
    ("<think>x</think>18", 0.0, 0.0),
    ("<think>x<answer>18</answer>", 0.0, 0.0),
    ("<answer>18</answer>", 0.0, 0.0),
    ("<answer>18</answer><think>x</think>", 0.0, 0.0),
    ("\n<think>x</think><answer>18</answer>", 0.0, 0.0),  # not from the beginning
    ("Sure! <think>x</think><answer>18</answer>", 0.0, 0.0),
    ("<Think>x</Think><Answer>18</Answer>", 0.0, 0.0),
    ("<think>x</think><answer>none</answer><answer>18</answer>", 1.0, 0.5),  # the first that matches
    ("<think>x</think><answer>18</answer><answer>19</answer>", 1.0, 0.5),
    ("<think>x</think><answer>19</answer><answer>18</answer>", 0.0, 0.5),
    ("<think>x</think>y</think> 3 <answer><answer>18</answer>", 1.0, 0.5),
    ("", 0.0, 0.0),
]


def test_the_table_of_30_completions() -> None:
    assert len(TABLE) == 30
    for form in (lambda text: text, lambda text: [{"role": "assistant", "content": text}]):
        completions = [form(text) for text, *_ in TABLE]
        assert tutorial_accuracy(completions, answer=["9 + 9 = 18\n#### 18"] * 30) == [right for _, right, _ in TABLE]
        assert tutorial_format(completions) == [points for *_, points in TABLE]


PARTS = ["<think>", "</think>", "<answer>", "</answer>", "7", "18", ",", ".", " ", "\n", "x", "٣", "²"]


@given(parts=st.lists(st.sampled_from(PARTS), max_size=14), opened=st.booleans())
def test_the_form_is_the_tutorial_s_expression(parts: list[str], opened: bool) -> None:
    text = "".join(["<think>", "</think>", *parts] if opened else parts)
    match = FORM.match(text)
    assert answered_digits(text) == (match and match[1])


def test_the_run_file_s_prompt_and_rewards() -> None:
    (row,) = as_dataset([{"question": "How many {x}?", "answer": "#### 2"}], "S", SETTINGS["user_prompt"])
    assert row["prompt"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Question: How many {x}?"},
    ]
    prompt = SETTINGS["system_prompt"]
    words = ("Question:", "go back", "<think>", "</think>", "<answer>", "</answer>", "cookies")
    assert all(word in prompt for word in words)
    # The worked example is one that both rewards pay in full.
    example = prompt[prompt.rindex("<think>") :]
    rewards = load_rewards(SETTINGS["rewards"])
    assert [reward(completions=[example], answer=["6"]) for reward in rewards] == [[1.0], [0.5]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def trainer_of(model: Path, folder: Path, seen: list[list[int]], pad: str = "<eos>", **settings: Any) -> RecipeTrainer:
    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        seen.extend(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = pad
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()  # without one, tokens are joined by spaces
    rows = Dataset.from_list([{"prompt": "abc "}] * 16)
    settings = {"max_steps": 1, "num_generations_eval": 8, "per_device_eval_batch_size": 16, **settings}
    args = arguments(folder, **settings)
    return RecipeTrainer(str(model), reward, args, rows, rows, tokenizer)


@pytest.mark.parametrize("backend", ["transformers", "nothing asked"])
def test_evaluations_sample_at_their_own_temperature_and_training_at_its_own(
    backend: str, model: Path, tmp_path: Path
) -> None:
    seen: list[list[int]] = []
    trainer = trainer_of(model, tmp_path, seen)
    trainer.eval_temperature = 1e-4 if backend == "transformers" else None
    trainer.evaluate()
    evaluated = {tuple(ids) for ids in seen}
    assert len(evaluated) == 1 if backend == "transformers" else len(evaluated) > 4
    seen.clear()
    trainer.train()
    assert len({tuple(ids) for ids in seen}) > 4
    assert trainer.generation_config.temperature == trainer.generation_kwargs["temperature"] == trainer.temperature


def test_generation_stops_at_a_string_and_what_is_trained_ends_there(model: Path, tmp_path: Path) -> None:
    seen: list[list[int]] = []
    stops = ["e", "7"]
    trainer = trainer_of(model, tmp_path, seen, generation_kwargs={"stop_strings": stops}, max_completion_length=40)
    stop_at_strings(trainer)
    trainer.train()
    tokenizer = trainer.processing_class
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in seen]
    stopped = [text for text in texts if any(stop in text for stop in stops)]
    assert stopped
    assert all(text[-1] in stops and not any(stop in text[:-1] for stop in stops) for text in stopped)
    assert not any(torch.tensor(ids).eq(tokenizer.eos_token_id)[:-1].any() for ids in seen)  # one end at most


def test_stop_strings_are_refused_where_padding_would_be_trained_on(model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(model, tmp_path, [], pad="<pad>", generation_kwargs={"stop_strings": ["e"]})
    with pytest.raises(RecipeError, match=r"stop_strings \['e'\] need a tokenizer that pads .* pads with '<pad>'"):
        stop_at_strings(trainer)


def test_the_run_file_s_settings_are_the_published_ones() -> None:
    published = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "max_completion_length": 300, "num_generations": 8}
    published |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 200}
    published |= {"learning_rate": 5e-5, "beta": 0.04, "loss_type": "grpo", "num_generations_eval": 8}
    published |= {"eval_temperature": 0.7, "eval_problems": 1319, "user_prompt": "Question: {question}"}
    settings = yaml.safe_load((RECIPES / "configs" / "smollm2_1.7b_tutorial.yaml").read_text())
    assert {name: settings[name] for name in published} == published
    assert "advantage_hooks" not in settings
    assert "loss_aggregation" not in settings
