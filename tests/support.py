"""What the trainer tests share: a tiny model, scripted rollouts, and a run that records its gradients.

The rollouts go through TRL's public `rollout_func`, so two trainers, or two cuts of a batch, see the same completions.
"""

import string
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig

from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.credit.flow import TRL_REDUCTIONS
from trl_grpo_ext.trainer.mixin import GRPOExtMixin

OWN_AGGREGATION = TRL_REDUCTIONS

CHARACTERS = string.ascii_lowercase + string.digits + " .#"
NAMED = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "padding_side": "left"}

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
"""Of a tiny model."""


def save_tiny_model(folder: Path, seed: int = 0, head_dim: int = 8) -> Path:
    """Save a Llama of about 30,000 parameters with wide initial weights, so that its distributions are not flat."""
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: number for number, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    torch.manual_seed(seed)
    config = LlamaConfig(**{**SIZES, "vocab_size": len(vocabulary), "head_dim": head_dim})
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **NAMED).save_pretrained(folder)
    return folder


def prompts(count: int = 4) -> Dataset:
    texts = [f"{'abcdefgh'[number % 8]}{number} " for number in range(count)]
    return Dataset.from_dict({"prompt": texts, "answer": list(range(count))})


def scripted_completion(prompt: str, member: int, longest: int) -> list[int]:
    """Tokens that depend on prompt and member alone; lengths from 1 to `longest`, some without an end."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{prompt}/{member}".encode()))
    length = int(torch.randint(1, longest + 1, (), generator=generator))
    ids = torch.randint(3, 3 + len(CHARACTERS), (length,), generator=generator).tolist()
    if length < longest:
        ids[-1] = 1
    return [int(i) for i in ids]


def scripted_rollout(prompts_: list[str], trainer: Any) -> dict[str, Any]:
    """A `rollout_func`: the members of a prompt's group are numbered in the order in which they come."""
    first = trainer.accelerator.process_index * len(prompts_)
    completion_ids = []
    for row, prompt in enumerate(prompts_):
        member = (first + row) % trainer.num_generations
        completion_ids.append(scripted_completion(prompt, member, trainer.max_completion_length))
    prompt_ids = [trainer.processing_class(p)["input_ids"] for p in prompts_]
    logprobs = [[-1.0] * len(ids) for ids in completion_ids]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


def length_reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Different for nearly every completion, so that no group is without signal."""
    return [(sum(ids) % 7) / 3.0 - len(ids) / 10.0 for ids in completion_ids]


def flat(letters: str) -> Callable[..., list[float]]:
    """`length_reward`, but the same for all completions of the prompts that begin with these letters."""

    def reward(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        rewards = length_reward(completion_ids)
        return [0.1 if prompt[0] in letters else r for prompt, r in zip(prompts, rewards, strict=True)]

    return reward


class Recorder(TrainerCallback):
    """Keeps the gradient before every optimizer step, and every log line."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.logs: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = model.named_parameters()
        self.gradients.append({n: p.grad.detach().clone() for n, p in named if p.grad is not None})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        timings = ("_time", "_runtime", "_per_second", "train_runtime", "train_tokens_per_second")
        self.logs.append({k: v for k, v in logs.items() if not k.endswith(timings) and not k.startswith("time/")})


@dataclass
class Run:
    """A finished run."""

    trainer: Any
    gradients: list[dict[str, torch.Tensor]]
    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        return [log["loss"] for log in self.logs if "loss" in log]


def arguments(output_dir: Path, config_class: type = GRPOExtConfig, **overrides: Any) -> Any:
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 10, "max_steps": 2}
    optimizer = {"learning_rate": 0.05, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0}
    plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "beta": 0.0, "shuffle_dataset": False}
    quiet = {"logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return config_class(str(output_dir), **{**sizes, **optimizer, **plain, **quiet, **overrides})


OF_THE_TRAINER = {"callbacks", "eval_dataset", "peft_config", "processing_class", "rollout_func", "train_dataset"}
"""Arguments of `train` that go to the trainer; the other settings go to its config."""


def train(
    model: Path,
    output_dir: Path,
    trainer_class: type = GRPOExtTrainer,
    *,
    scripted: bool = True,
    config_class: type | None = None,
    reward_funcs: Callable[..., Any] | list[Any] | None = length_reward,
    dtype: str = "float32",
    prompt_count: int = 4,
    hooks: list[Any] | None = None,
    trainer_arguments: dict[str, Any] | None = None,
    resume: str | None = None,
    **overrides: Any,
) -> Run:
    """Train for a few steps and keep gradients, logs and final weights."""
    if config_class is None:
        config_class = GRPOExtConfig if issubclass(trainer_class, GRPOExtMixin) else GRPOConfig
    recorder = Recorder()
    given = {"rollout_func": scripted_rollout if scripted else None, "train_dataset": prompts(prompt_count)}
    given |= (trainer_arguments or {}) | ({} if hooks is None else {"advantage_hooks": hooks})
    given |= {name: overrides.pop(name) for name in OF_THE_TRAINER & overrides.keys()}
    callbacks = given.pop("callbacks", [])
    model_init = {"dtype": getattr(torch, dtype), **overrides.pop("model_init_kwargs", {})}
    args = arguments(output_dir, config_class, model_init_kwargs=model_init, **overrides)
    trainer = trainer_class(str(model), reward_funcs, args, callbacks=[recorder, *callbacks], **given)
    for callback in callbacks:
        callback.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return Run(trainer, recorder.gradients, recorder.logs, weights)


def trl_metrics(log: dict[str, float]) -> dict[str, float]:
    """A log line without what an aggregation adds to it."""
    return {name: value for name, value in log.items() if not name.startswith(("loss_weight/", "groups/"))}


def relative_gap(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """‖ours - theirs‖ / ‖theirs‖ over all parameters together."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[n].double() - theirs[n].double()).pow(2).sum()) for n in ours) ** 0.5
    size = sum(float(theirs[n].double().pow(2).sum()) for n in theirs) ** 0.5
    return difference / size if size or difference else 0.0
