"""What is done to TRL's trainer, and the context in which it is undone."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from trl import GRPOTrainer
from trl.kernels import chunked_logprob
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import add_fused_lm_head, pad

from ...errors import ConfigurationError
from ..batch import whole_rows
from . import contract, reading
from .reading import RunFacts

HEAD_TOKENS = 240  # with 32,768 of the vocabulary less than 32 MiB: more glibc maps page by page


@contextmanager
def attributes(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which these attributes have other values; afterwards they have their own again."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def lent(owner: Any, **values: Any) -> Iterator[None]:
    """The same, but what a class or a reward of the user's sets inside stays."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in [name for name, value in values.items() if getattr(owner, name) is value]:
            setattr(owner, name, before[name])


def small_head_tiles(device: torch.device) -> AbstractContextManager[None]:
    """A context in which TRL's head makes the logits of few tokens at a time on a CPU, which takes half of the time."""
    return attributes(chunked_logprob, TOKEN_CHUNK_SIZE=HEAD_TOKENS) if device.type == "cpu" else nullcontext()


def keep_adapter_as_reference(model: Any, args: Any, peft_config: Any) -> None:
    """Keep a frozen copy, named `ref`, of an adapter that will be trained further, as TRL does if `beta` is above 0."""
    beta = getattr(args, "beta", 0.0)
    known = isinstance(model, str) or peft_config is not None or beta != 0.0 or not is_peft_model(model)
    if known or "ref" in model.peft_config:
        return
    trained = model.active_adapter
    model.add_adapter("ref", model.peft_config[trained])
    set_peft_model_state_dict(model, get_peft_model_state_dict(model, adapter_name=trained), adapter_name="ref")


def prepare_like_policy(trainer: Any, model: Any) -> Any:
    """Put another model on the policy's device, sharded like it, with the head that TRL gives the policy."""
    add_fused_lm_head(model, temperature=trainer.temperature)
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(model, trainer.accelerator)
    if trainer.is_fsdp_enabled:
        return prepare_fsdp(model, trainer.accelerator)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True)


def pad_rows(facts: RunFacts, rows: Sequence[Any], value: float, side: str = "right") -> torch.Tensor:
    """Rows of different lengths as one tensor, by TRL's own function."""
    tensors = [torch.as_tensor(row) for row in rows]
    padded: torch.Tensor = pad(tensors, value, padding_side=side, pad_to_multiple_of=facts.pad_to_multiple_of)
    return padded.to(facts.device)


@contextmanager
def reward_columns(trainer: Any) -> Iterator[Callable[[Sequence[str], torch.Tensor | None], None]]:
    """A context in which TRL's reward functions, names and weights match the columns of rewards."""
    added: Sequence[str] = ()
    ours = before = torch.empty(0)
    with ExitStack() as shown:

        def show(names: Sequence[str], weights_K: torch.Tensor | None) -> None:
            nonlocal added, ours, before
            shown.close()
            added = names
            if weights_K is not None:
                before = weights_K
                ours = weights_K.clone()
                columns: dict[str, Any] = {"reward_func_names": [*trainer.reward_func_names, *added]}
                columns["reward_funcs"] = [*trainer.reward_funcs, *[None] * len(added)]
                shown.enter_context(lent(trainer, **columns, reward_weights=ours))

        yield show
        now = trainer.reward_weights
        if added and len(now) == len(ours) and not (now is ours and torch.equal(now, before)):
            what = f"A base class changes reward_weights while those of {', '.join(added)} are among them"
            raise ConfigurationError(f"{what}. Set them before the rewards are computed.")


def restore_after_trial(trainer: Any) -> AbstractContextManager[None]:
    """Restore metrics and entropy controller after trials of TRL's loss, without entropy bonus and auxiliary loss."""
    names = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")
    tried = {name: getattr(trainer, name) for name in names} | {"_metrics": copy.deepcopy(trainer._metrics)}
    return attributes(trainer, **tried, _entropy_bonus_enabled=False, aux_loss_enabled=False)


@contextmanager
def without_policy_metrics(trainer: Any) -> Iterator[None]:
    """A context in which TRL logs nothing of its policy loss, because another is trained."""
    kept = trainer._metrics["train" if trainer.model.training else "eval"]
    before = {name: len(values) for name, values in kept.items()}
    yield
    for name in [name for name in kept if name.startswith(contract.POLICY_METRICS)]:
        del kept[name][before.get(name, 0) :]
        if not kept[name]:
            del kept[name]


def drop_undefined_metrics(trainer: Any) -> None:
    """Remove metrics without a value from what TRL is about to log, since its loggers would print None."""
    for kept in trainer._metrics.values():
        for name, values in list(kept.items()):
            if values and all(isinstance(value, float) and math.isnan(value) for value in values):
                del kept[name]


def add_metrics(trainer: Any, metrics: Mapping[str, float]) -> None:
    kept = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in metrics.items():
        kept[name].append(value)


def show_mean_advantages(trainer: Any, row_ids: Sequence[int], means: Sequence[float], row_count: int) -> None:
    """Put mean advantages into TRL's table of completions, whose last row has the number `row_count - 1`."""
    table = trainer._logs["advantages"]
    for row_id, mean in zip(row_ids, means, strict=True):
        if (row := row_id - row_count + len(table)) >= 0:  # else it has left the table
            table[row] = mean


def trls_policy_loss(trainer: Any, model: Any, inputs: Any) -> Any:
    return GRPOTrainer._compute_loss(trainer, model, inputs)


def policy_pass(
    trainer: Any, batch: dict[str, Any], rows_at_once: int, entropies: bool, model: Any = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities and entropies of a batch, `(B, T)`, by TRL's own method; without gradient.

    They are the policy's, or those of another model that TRL has prepared.
    """
    options = {"batch_size": rows_at_once, "compute_entropy": entropies, **reading.images_of(batch)}
    length = batch["completion_ids"].size(1)
    with torch.no_grad():
        logps_B_T, entropies_B_T, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model if model is None else model, *whole_rows(batch), length, **options
        )
    return logps_B_T.detach(), entropies_B_T.detach() if entropies else None


def prompt_tokens(trainer: Any, prompts: list[Any]) -> Any:
    return trainer._tokenize_prompts(prompts)[0]
