"""What the CPU needs to run TRL's `AsyncGRPOTrainer`, and a worker that samples from its model when asked.

TRL 1.16 asks for an attention kernel and the name of the GPU; both are replaced here, and on a GPU nothing would be.
"""

import multiprocessing
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AttentionInterface, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_rollout_worker, packing
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutGroup, TrainingSequence

from tests.support import Recorder, Run, prompts
from trl_grpo_ext.asynchronous.trainer import AsyncGRPOExtTrainer

FIELDS = {"content": {"close": "<eos>", "content": "text"}}
CONTENT = {"defaults": {"role": "assistant"}, "start_anchor": "# ", "fields": FIELDS}
SETTINGS: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
SETTINGS |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 1}
SETTINGS |= {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "gradient_checkpointing": False}
SETTINGS |= {"max_completion_length": 10, "token_budget": 0}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}# {% endif %}"


def tree_sdpa(module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: Any = None, **tree: Any) -> Any:
    """TRL's tree attention with torch's own, from the same arguments."""
    visible = torch.zeros(query.size(2), query.size(2), dtype=torch.bool)
    ends, path_ends = tree["tree_cu_seqlens_q"].tolist(), tree["tree_cu_seqlens_k"].tolist()
    for segment in range(len(ends) - 1):
        path = tree["tree_kv_index"][path_ends[segment] : path_ends[segment + 1]]
        length = ends[segment + 1] - ends[segment]
        for place in range(length):
            visible[ends[segment] + place, path[: len(path) - length + place + 1]] = True
    repeats = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    return found.transpose(1, 2).contiguous(), None


def without_cuda(patch: pytest.MonkeyPatch) -> None:
    """Let TRL's asynchronous trainer be constructed here."""
    patch.setattr(torch.cuda, "get_device_name", lambda device=None: "cpu")
    patch.setattr(async_rollout_worker, "is_vllm_available", lambda *arguments, **keywords: True)
    patch.setattr(packing, "tree_attention", tree_sdpa)
    AttentionInterface.register(packing.TREE_ATTENTION, tree_sdpa)


class NoTransfer:
    """Sends the weights nowhere, and counts how often."""

    sent = 0

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def send_weights(self, iterator: Any) -> None:
        self.sent += sum(1 for _ in iterator) > 0


class OnDemand(queue.Queue[Any]):
    """A queue that is filled when it is read and empty."""

    def __init__(self, fill: Callable[[], None]) -> None:
        super().__init__()
        self.fill = fill

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while self.empty():
            self.fill()
        return super().get(block, timeout)


class HereWorker(AsyncRolloutWorker):
    """TRL's worker without a process or a server: TRL's own loop, or ours, scores what the trainer's model samples.

    `off_policy` adds noise to the log-probabilities that the sampler is said to have had.
    """

    def __init__(self, *, off_policy: float = 0.3, **loop_kwargs: Any) -> None:
        super().__init__(**loop_kwargs)
        self.rollout_buffer = OnDemand(self.fill)
        self.metrics_queue = queue.Queue[Any]()
        self.off_policy = off_policy
        self.generator = torch.Generator().manual_seed(0)
        self.asked: list[Any] = []
        self.sent: list[Any] = []
        self.model: Any = None

    def start(self) -> None:
        shared = ("model_version_value", "heartbeat_value", "failed_event", "exception_info_queue")
        own = {name: getattr(self, f"_{name}") for name in shared}
        queues = {"rollout_buffer": self.rollout_buffer, "metrics_queue": self.metrics_queue}
        self.loop = self._loop_cls(**self._loop_kwargs, **own, **queues)
        self.rows = self.loop._repeat_iterator()

    def stop(self) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...

    @torch.no_grad()
    def fill(self) -> None:
        """Sample and score a group."""
        loop = self.loop
        *_, (group_id, row) = [next(self.rows) for _ in range(loop.num_generations)]
        self.asked.append(row)
        members = self.generated(row["prompt"])
        completions, completions_ids, sequences, calls, failures, rewards = map(list, zip(*members, strict=True))
        group = RolloutGroup(
            prompts=[row["prompt"]] * len(members),
            reward_kwargs={name: [value] * len(members) for name, value in row.items() if name != "prompt"},
            completions=completions,
            completions_ids=completions_ids,
            completions_sequences=sequences,
            tool_call_counts=calls,
            tool_failure_counts=failures,
            model_version=self.model_version,
            group_id=group_id,
            env_rewards=self.env_rewards(len(members)),
            rollout_rewards=rewards,
        )
        for sample in loop._loop.run_until_complete(loop._score_group(group)):
            self.sent.append(sample)
            self.rollout_buffer.put(sample)

    def generated(self, prompt: list[Any]) -> list[tuple[Any, ...]]:
        """What TRL's `_generate_one` returns of each member of a group."""
        loop, members = self.loop, []
        ids = loop.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        rows, logps = self.sampled(torch.tensor([ids] * loop.num_generations))
        for member, new in enumerate(rows[:, len(ids) :].tolist()):
            new = new[: new.index(1) + 1] if 1 in new else new
            said = [{"role": "assistant", "content": loop.tokenizer.decode(new, skip_special_tokens=True)}]
            members.append((said, new, self.sequences(ids, new, logps[member].tolist()), 0, 0, None))
        return members

    def env_rewards(self, members: int) -> list[tuple[type, float]]:
        """What environments said, of each member."""
        return []

    def sequences(self, prompt: list[int], new: list[int], logps: list[float]) -> list[TrainingSequence]:
        mask = [0] * len(prompt) + [1] * len(new)
        return [TrainingSequence(prompt + new, mask, [0.0] * len(prompt) + logps[: len(new)], "")]

    def sampled(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Completions by plain sampling, and their log-probabilities."""
        model, logps = self.model.eval(), []
        model.config._attn_implementation = "sdpa"
        for _ in range(self.loop.max_tokens):
            logits = model(input_ids=ids).logits[:, -1].float()
            likely = (logits + torch.nn.functional.one_hot(torch.tensor(1), logits.size(1)) * 2.0).softmax(-1)
            new = torch.multinomial(likely, 1, generator=self.generator)
            logps.append(logits.log_softmax(-1).gather(1, new))
            ids = torch.cat([ids, new], dim=1)
        model.train().config._attn_implementation = packing.TREE_ATTENTION
        return ids, self.noisy(torch.cat(logps, dim=1))

    def noisy(self, logps: torch.Tensor) -> torch.Tensor:
        return logps + self.off_policy * torch.randn(logps.shape, generator=self.generator)


def tokenizer_of(model: Path) -> Any:
    """With a template for prompts and one for what the model answers."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, CONTENT
    return tokenizer


def messages(count: int) -> Dataset:
    return prompts(count).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})


def letters(completions: list[Any], **columns: Any) -> list[float]:
    return [sum(letter in "0123456789" for letter in said[0]["content"]) / 4.0 for said in completions]


def made(
    model: Path,
    folder: Path,
    trainer_class: type = AsyncGRPOExtTrainer,
    *,
    reward_funcs: Any = letters,
    worker: dict[str, Any] | None = None,
    worker_class: type[HereWorker] | None = HereWorker,
    weight_transfer: Any = None,
    given: dict[str, Any] | None = None,
    data: Dataset | None = None,
    tokenizer: Any = None,
    **settings: Any,
) -> Any:
    """A trainer that has not trained; `given` are arguments of ours, `settings` those of TRL's config."""
    tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
    data = messages(8) if data is None else data
    args = AsyncGRPOConfig(str(folder), **{**SETTINGS, **settings})
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    more: dict[str, Any] = {}
    if worker_class and multiprocessing.parent_process() is None and args.process_index == 0:
        more["rollout_worker"] = worker_class(
            model_name="tiny",
            dataset=data,
            reward_funcs=list(functions),
            processing_class=tokenizer,
            eos_token_ids=[1],
            tools=(given or {}).get("tools"),
            num_generations=args.num_generations,
            max_tokens=args.max_completion_length,
            **(worker or {}),
        )
    more |= {"train_dataset": data, "processing_class": tokenizer, "weight_transfer": weight_transfer or NoTransfer()}
    trainer = trainer_class(model=str(model), reward_funcs=functions, args=args, **more, **(given or {}))
    if "rollout_worker" in more:
        more["rollout_worker"].model = trainer.model
    return trainer


def train(model: Path, folder: Path, trainer_class: type = AsyncGRPOExtTrainer, **settings: Any) -> Run:
    trainer, recorder = made(model, folder, trainer_class, **settings), Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return Run(trainer, recorder.gradients, recorder.logs, weights)


def trls(model: Path, folder: Path, **settings: Any) -> Run:
    return train(model, folder, AsyncGRPOTrainer, **settings)
