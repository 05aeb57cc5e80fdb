"""What the trainings of this folder share: hooks, trainers in between, gradients by hand, tools, pictures."""

import json
import re
import string
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests import tiny_vision
from tests.support import SIZES, Run, length_reward, prompts, relative_gap, scripted_completion, train
from trl_grpo_ext import Forward, GRPOExtMixin, GRPOExtTrainer, Rollout
from trl_grpo_ext.types import HookDeclaration


class Watch:
    """Keeps the advantages and the rollout of each generation batch."""

    def __init__(self, *needs: str, teachers: tuple[str, ...] = ()) -> None:
        self.declares = HookDeclaration(role="transform", needs=needs, teachers=teachers)
        self.seen: list[tuple[torch.Tensor, Rollout]] = []

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for _, rollout in self.seen]

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        self.seen.append((advantages_B_T, rollout))
        return advantages_B_T


class WatchBoth(Watch):
    """Keeps those of each loss forward too."""

    def __init__(self, *needs: str) -> None:
        super().__init__(*needs)
        self.forwards: list[tuple[torch.Tensor, Forward]] = []

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        self.forwards.append((advantages_B_T.clone(), forward))
        return advantages_B_T


PAGE = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")
EXACT = 2e-5  # relative, in float32
Row = tuple[list[int], list[int]]
"""Tokens of a prompt and of a completion."""


def theirs(name: str) -> Any:
    """A trainer of somebody else's, as the page has it; `PerToken` is `PerCompletion` with the page's edit."""
    names: dict[str, Any] = {}
    exec("import torch\nfrom trl import GRPOTrainer\n", names)
    of_page = "PerCompletion" if name == "PerToken" else name
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if f"class {of_page}(" in block]
    if name == "PerToken":
        ((before, after),) = re.findall(r"```diff\n-(.*)\n\+(.*)\n```", PAGE)
        assert code.count(before) == 1
        code = code.replace(before, after).replace(of_page, name)
    exec(code, names)
    return names[name]


def mixed(base: type) -> Any:
    return type(f"Mine{base.__name__}", (GRPOExtMixin, base), {})


def on_top(base: type) -> Any:
    return type(f"Mine{base.__name__}", (base, GRPOExtTrainer), {})


def rows_of(model: Path, count: int = 2, longest: int = 10) -> list[Row]:
    """The scripted generation batch of the first `count` prompts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = prompts(count)["prompt"]
    return [(tokenizer(t)["input_ids"], scripted_completion(t, m, longest)) for t in texts for m in range(4)]


def group_advantages(rows: Sequence[Row]) -> torch.Tensor:
    """GRPO's, of `length_reward`."""
    rewards_Q_G = torch.tensor(length_reward([ids for _, ids in rows])).view(-1, 4)
    centred_Q_G = rewards_Q_G - rewards_Q_G.mean(1, keepdim=True)
    return (centred_Q_G / (rewards_Q_G.std(1, keepdim=True) + 1e-4)).flatten()


def expected_gradient(
    model: Path,
    rows: Sequence[Row],
    advantages: Sequence[Sequence[float]],
    weights: Sequence[Sequence[float]],
    temperature: float = 1.0,
) -> dict[str, torch.Tensor]:
    """The gradient of -Σ w·A·log π at ratio 1: row by row, without padding and without any trainer."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for (prompt, completion), row_advantages, row_weights in zip(rows, advantages, weights, strict=True):
        logits = policy(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
        logps = logits.log_softmax(-1)[torch.arange(len(completion)), completion]
        (-(torch.tensor(row_weights) * torch.tensor(row_advantages) * logps).sum()).backward()
    return {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}


def assert_gradient(run: Run, model: Path, rows: Sequence[Row], advantages: Any, weights: Any) -> None:
    assert relative_gap(run.gradients[0], expected_gradient(model, rows, advantages, weights)) < EXACT


def sequence_means(rows: Sequence[Row], sequences: int | None = None) -> list[list[float]]:
    """The weights of a mean over completions of token means."""
    return [[1.0 / len(ids) / (sequences or len(rows))] * len(ids) for _, ids in rows]


def falling(values: Sequence[float], rows: Sequence[Row]) -> list[list[float]]:
    """Advantages that `Falling` makes of one number per completion."""
    return [[float(value) / (1 + t) for t in range(len(ids))] for value, (_, ids) in zip(values, rows, strict=True)]


def constant(values: Sequence[float], rows: Sequence[Row]) -> list[list[float]]:
    return [[float(value)] * len(ids) for value, (_, ids) in zip(values, rows, strict=True)]


class Falling:
    """The first token of a completion gets all of the advantage, the second half of it, and so on."""

    declares = HookDeclaration(role="transform")

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.rollouts: list[Any] = []

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        self.seen.append(advantages_B_T.clone())
        self.rollouts.append(rollout)
        return advantages_B_T / torch.arange(1.0, 1.0 + advantages_B_T.size(1))


class Doubled(Falling):
    """Twice the advantage, at the rollout."""

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return 2.0 * advantages_B_T


class AtForward:
    """What a hook does at the rollout, at the loss forward."""

    declares = HookDeclaration(independent=True)
    hook: Any

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        changed_B_T: torch.Tensor = self.hook().on_rollout(advantages_B_T, forward)
        return changed_B_T


class FallingForward(AtForward):
    hook = Falling


class DoubledForward(AtForward):
    hook = Doubled


# A tiny model that calls a tool: it generates with biases that make it write one of a few scripts.

START, END, CALL, CALLED = "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": CALL,
            "close": CALLED,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": END, "content": "text"},
    },
}


def save_tool_model(folder: Path) -> Path:
    """Save a Llama and a tokenizer of single characters with a chat template that has tools."""
    special = ["<pad>", START, END]
    vocabulary = {token: number for number, token in enumerate([*special, CALL, CALLED, *string.printable, "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in (CALL, CALLED)])
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=END, unk_token="<unk>", padding_side="left"
    )
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "vocab_size": len(vocabulary), "max_position_embeddings": 512, "eos_token_id": 2})
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def biases(tokenizer: Any, scripts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """`generation_kwargs` under which the model writes one of the texts behind each context."""
    found: dict[tuple[int, ...], float] = {}
    for context, texts in scripts.items():
        before = tokenizer(context)["input_ids"]
        for text in texts:
            ids = tokenizer(text + END)["input_ids"]
            for place in range(len(ids)):
                found[(*before, *ids[: place + 1])] = 600.0
    return {"sequence_bias": [[list(ids), bias] for ids, bias in found.items()]}


def talker(model: Path) -> Any:
    """The tokenizer of a model that calls tools."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = RESPONSE
    return tokenizer


TEMPERATURE = 20.0
ASKED = f"?{END}\n{START}assistant\n"


def call(name: str, **values: int) -> str:
    return f"{CALL}{json.dumps({'name': name, 'arguments': values})}{CALLED}"


def result(value: str) -> str:
    """What the chat template writes for a tool's answer, until the model goes on."""
    return f"\n{START}tool\n{value}{END}\n{START}assistant\n"


# Trainings of tiny vision-language models.


@cache
def saved(name: str) -> tuple[Path, Any]:
    """A model's folder, and its processor."""
    return tiny_vision.save_vision_model(name, Path(tempfile.mkdtemp(prefix=name)))


def by_length(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return length_reward(completion_ids)


def flat_for_some(completion_ids: list[list[int]], answer: list[int], **columns: Any) -> list[float]:
    """No signal in groups with an even answer."""
    rewards = length_reward(completion_ids)
    return [1.0 if number % 2 == 0 else reward for number, reward in zip(answer, rewards, strict=True)]


REWARDS = {"by_length": by_length, "flat_for_some": flat_for_some}


def scripted(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """A `rollout_func`: completions depend on the prompt's text and the place in the group."""
    prompt_ids = trainer._tokenize_prompts(prompts)[0]
    first = trainer.accelerator.process_index * len(prompts)
    completion_ids = []
    for row, ids in enumerate(prompt_ids):
        seed = zlib.crc32(f"{ids}/{(first + row) % trainer.num_generations}".encode())
        generator = torch.Generator().manual_seed(seed)
        length = int(torch.randint(1, trainer.max_completion_length + 1, (), generator=generator))
        completion_ids.append(torch.randint(20, 40, (length,), generator=generator).tolist())
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": [[-1.0] * len(c) for c in completion_ids],
    }


def pictured(name: str, where: Path | str, trainer: type = GRPOExtTrainer, **settings: Any) -> Run:
    """A training; `several` and `same_text` are of the data."""
    folder = settings.pop("folder", None) or saved(name)[0]
    processor = settings.pop("processor", None) or saved(name)[1]
    shown = {key: settings.pop(key) for key in ("several", "same_text") if key in settings}
    rows = tiny_vision.pictures(settings.pop("prompt_count", 4), **shown)
    batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "learning_rate": 0.01, "seed": 3}
    settings = {"train_dataset": rows, **batch, "rollout_func": scripted, **settings}
    reward = settings.get("reward_funcs", "by_length")
    settings["reward_funcs"] = REWARDS[reward] if isinstance(reward, str) else reward
    if settings.pop("evaluates", False):
        settings |= {"eval_dataset": rows, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    return train(folder, Path(where), trainer, scripted=False, processing_class=processor, **settings)


def gradients_of(jobs: dict[str, dict[str, Any]], where: str) -> dict[str, Any]:
    """Of each job its gradients; a job names the folder of its model, which only one rank can save."""
    found = {}
    for job, settings in jobs.items():
        processor = tiny_vision.MAKERS[settings["name"]]()[2]
        found[job] = pictured(where=Path(where) / job, processor=processor, **settings).gradients
    return found
