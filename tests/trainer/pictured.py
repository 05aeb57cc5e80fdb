"""Trainings of tiny vision-language models, in one process or on several ranks."""

import tempfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests import tiny_vision
from tests.support import Run, length_reward, train
from trl_grpo_ext import GRPOExtTrainer


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
    folder, processor = (
        settings.pop("folder", None) or saved(name)[0],
        settings.pop("processor", None) or saved(name)[1],
    )
    shown = {key: settings.pop(key) for key in ("several", "same_text") if key in settings}
    rows = tiny_vision.pictures(settings.pop("prompt_count", 4), **shown)
    settings = {
        "train_dataset": rows,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "learning_rate": 0.01,
        "seed": 3,
        "rollout_func": scripted,
        **settings,
    }
    reward = settings.get("reward_funcs", "by_length")
    settings["reward_funcs"] = REWARDS[reward] if isinstance(reward, str) else reward
    hooks = settings.pop("advantage_hooks", None)
    if hooks is not None:
        settings["hooks"] = hooks
    if settings.pop("evaluates", False):
        settings |= {"eval_dataset": rows, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    return train(folder, Path(where), trainer, scripted=False, processing_class=processor, **settings)


def gradients_of(jobs: dict[str, dict[str, Any]], where: str) -> dict[str, Any]:
    """Of each job its gradients; a job names the folder of its model, which only one rank can save."""
    found = {}
    for job, settings in jobs.items():
        processor = tiny_vision.MAKERS[settings["name"]]()[1]
        found[job] = pictured(where=Path(where) / job, processor=processor, **settings).gradients
    return found
