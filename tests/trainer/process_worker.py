"""A list of short trainings in one process or, under `launch.Ranks`, in several."""

import gc
import json
import os
import pkgutil
import sys
import time
import zlib
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from tests.support import flat, length_reward, prompts, scripted_rollout, train
from tests.trainer.hostile import hostile_settings, is_last_rank
from trl_grpo_ext import GRPOExtMixin, GRPOExtTrainer, Rollout, load_loss_aggregation
from trl_grpo_ext.errors import TRLGRPOExtError
from trl_grpo_ext.rewards.judge import Judge
from trl_grpo_ext.types import HookDeclaration, Part, Parts, Place

Job = dict[str, Any]
"""Settings of `tests.support.train`, the keys of `FLAGS`, and

- `stock`: TRL's own trainer runs them; `float64`: log-probabilities in float64, which TRL's own are not,
- `evaluate`: on so many other prompts; `judge`: a judge's address, behind a reward that waits until it was asked,
- `hooks`: with `Watch` behind them; `aggregations`: one for each optimizer step, in turn,
- `hostile`: what of `tests.trainer.hostile` is selected, or `loss`; its error is kept instead of a result.
"""


def norms_in_float64(model: torch.nn.Module) -> None:
    """Let a Llama's or Qwen's norms compute in the precision of their input."""

    def norm(module: Any) -> Any:
        return lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = norm(module)


class Float64Trainer(GRPOTrainer):
    """TRL's trainer, with log-probabilities and entropies as precise as the model; TRL's fused head has float32."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        for model in (self.model, self.ref_model):
            if model is not None and model.dtype == torch.float64:
                norms_in_float64(model)

    @wraps(GRPOTrainer._get_per_token_logps_and_entropies)
    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: Any = None, **_: Any
    ) -> Any:
        def score(ids: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
            # Positions that don't depend on the padding: the angles of rotary embeddings are float32 in any model.
            position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
            output = model(input_ids=ids, attention_mask=mask, position_ids=position_ids)
            all_logps = output.logits[:, -logits_to_keep - 1 : -1].log_softmax(-1)
            logps = all_logps.gather(-1, ids[:, -logits_to_keep:].unsqueeze(-1)).squeeze(-1)
            return logps, -(all_logps.exp() * all_logps).sum(-1)

        size = batch_size or len(input_ids)  # the old policy and the reference run a few rows at a time
        parts = [score(*rows) for rows in zip(input_ids.split(size), attention_mask.split(size), strict=True)]
        logps, entropies = (torch.cat(found) for found in zip(*parts, strict=True))
        return logps, entropies, None


class Float64ExtTrainer(GRPOExtMixin, Float64Trainer):
    """The same with plugins: our mixin in front of somebody's own trainer."""


class DoubledTrainer(GRPOTrainer):
    """Twice TRL's loss on the last rank."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs) * (2 if is_last_rank() else 1)


class DoubledExtTrainer(GRPOExtMixin, DoubledTrainer):
    """Which the check of the first step finds."""


class Watch:
    """Changes nothing and keeps what this rank saw of each generation batch."""

    declares = HookDeclaration(role="transform")

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        live_B_T = rollout.mask_B_T > 0
        self.seen.append(
            {
                "group_ids": rollout.group_ids_B.tolist(),
                "all_group_ids": rollout.gather(rollout.group_ids_B).tolist(),
                "local_rows": rollout.local_rows,
                "all_rewards": rollout.gather(rollout.rewards_B).tolist(),
                "totals": rollout.totals,
                "advantages": [row[live].tolist() for row, live in zip(advantages_B_T, live_B_T, strict=True)],
                "parts": {name: (table.names, table.scores_B_M.tolist()) for name, table in rollout.parts.items()},
            }
        )
        return advantages_B_T


class Shapes:
    """A shaper that gives tokens their own and looks at all ranks."""

    __name__ = "shapes"
    declares = HookDeclaration(role="shaper", needs=("old_logps",))

    def on_rewards(self, rollout: Rollout) -> torch.Tensor:
        longest = rollout.gather(rollout.lengths_B).max()
        return 0.3 * rollout.old_logps_B_T * rollout.lengths_B.unsqueeze(1) / longest


class Change(TrainerCallback):
    """Gives the trainer another loss aggregation before each optimizer step."""

    def __init__(self, selections: list[Any]) -> None:
        self.aggregations = [load_loss_aggregation(selection) for selection in selections]
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.trainer._trl_grpo_ext.losses.reduction.aggregation = self.aggregations[state.global_step]


def uneven_rollout(prompts_: list[str], trainer: Any) -> dict[str, Any]:
    """`scripted_rollout` after prompts of 3 to 8 tokens."""
    output = scripted_rollout(prompts_, trainer)
    lengths = [zlib.crc32(prompt.encode()) % 6 for prompt in prompts_]
    output["prompt_ids"] = [[*ids[:1] * more, *ids] for ids, more in zip(output["prompt_ids"], lengths, strict=True)]
    return output


def endless_at_first(prompts_: list[str], trainer: Any) -> dict[str, Any]:
    """`uneven_rollout`; at the first step the first rank's completions run into the limit."""
    output = uneven_rollout(prompts_, trainer)
    endless = trainer.state.global_step == 0 and trainer.accelerator.is_main_process
    return output | ({"completion_ids": [[5] * trainer.max_completion_length] * len(prompts_)} if endless else {})


def vowels(completions: list[str], **columns: Any) -> list[Parts | None]:
    """Every vowel is worth its place in the alphabet; nothing to say about completions that begin with one."""
    scores: list[Parts | None] = []
    for text in completions:
        worth = {place: "aeiou".index(c) / 5 + 0.1 for place, c in enumerate(text) if c in "aeiou"}
        parts = [Part("vowel", value, places=(place, place + 1)) for place, value in worth.items()]
        scores.append(None if 0 in worth else Parts(parts, sum(worth.values())))
    return scores


def first_half(completions: list[str], **columns: Any) -> list[Parts]:
    """The first half is worth as much as it has different characters."""
    halves = [text[: len(text) // 2] for text in completions]
    return [Parts({"half": (float(len({*half})), (0, len(half)))}) for half in halves]


def turns_of(ids: list[int]) -> list[int]:
    """Which tokens the model wrote: every fourth was written by an environment, from the third on."""
    return [int(place % 4 != 2) for place in range(len(ids))]


def rollout_with_turns(prompts_: list[str], trainer: Any) -> dict[str, Any]:
    rollout = scripted_rollout(prompts_, trainer)
    return {**rollout, "env_mask": [turns_of(ids) for ids in rollout["completion_ids"]]}


def by_turn(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """Each turn is worth something else; nothing to say about some completions, and a plain number about others."""
    scores: list[float | None] = []
    for ids in completion_ids:
        turns = (len(ids) + 1) // 4 + (1 if (len(ids) + 1) % 4 else 0)
        values = {f"turn {k}": ((sum(ids) + 3 * k) % 5 / 4, Place(turn=k)) for k in range(turns)}
        scores.append([Parts(values, sum(value for value, _ in values.values())), 0.5, None][sum(ids) % 7 % 3])
    return scores


def first_prompts_only(prompts: list[str], **columns: Any) -> list[float | None]:
    """Parts for one prompt, a number for the next, nothing for the others: with two ranks each sees only one kind."""
    kinds: dict[str, float | None] = {"a": Parts({"first": (1.0, (0, 1))}), "b": 0.5}
    return [kinds.get(prompt[0]) for prompt in prompts]


def judged(url: str) -> list[Any]:
    """A reward that is 1 if the judge behind it was asked while it ran, and the judge."""
    model = f"rank{os.environ.get('RANK', 0)}"

    def waits(completions: list[str], **columns: Any) -> list[float]:
        until, asked = time.monotonic() + 10, False
        while not asked and time.monotonic() < until:
            with urlopen(f"{url}/asked/{model}") as answer:
                asked = json.load(answer) > 0
        return [float(asked)] * len(completions)

    return [waits, Judge(model, "Is it right?", base_url=url)]


FLAGS: dict[str, dict[str, Any]] = {
    "flat_groups": {"reward_funcs": flat("aceg")},
    "quiet_rank": {"reward_funcs": flat("abef")},  # of four prompts, the two of the first rank
    "part_rewards": {"reward_funcs": [length_reward, vowels, first_half]},
    "turns": {"reward_funcs": [length_reward, by_turn], "rollout_func": rollout_with_turns},
    "uneven_parts": {"reward_funcs": [length_reward, first_prompts_only]},
    "uneven": {"rollout_func": uneven_rollout},
    "masked_rank": {"rollout_func": endless_at_first, "mask_truncated_completions": True},
}


def run_job(model: Path, folder: Path, job: Job) -> dict[str, Any]:
    """Run one training and return plain values and tensors."""
    job = dict(job)
    watch = Watch()
    trainer_class = GRPOTrainer if (stock := job.pop("stock", False)) else GRPOExtTrainer
    if job.pop("float64", False):
        trainer_class = Float64Trainer if stock else Float64ExtTrainer
        job["dtype"] = "float64"
    if evaluated := job.pop("evaluate", 0):
        data = prompts(24).select(range(8, 8 + evaluated))
        job |= {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": data}
    for name, settings in FLAGS.items():
        job |= settings if job.pop(name, False) else {}
    if (url := job.pop("judge", None)) is not None:
        job["reward_funcs"] = judged(url)
    if "hooks" in job:
        job["hooks"] = [*job["hooks"], watch]
    if (in_turn := job.pop("aggregations", None)) is not None:
        job |= {"loss_aggregation": in_turn[0], "max_steps": len(in_turn), "callbacks": [Change(in_turn)]}
    hostile = job.pop("hostile", None)
    if hostile == "loss":
        trainer_class, job["loss_aggregation"] = DoubledExtTrainer, "prompt_mean"
    elif hostile is not None:
        job |= hostile_settings(hostile)
    try:
        run = train(model, folder, trainer_class, **job)
    except (TRLGRPOExtError, KeyboardInterrupt) as error:
        if hostile is None:
            raise
        return {"error": type(error).__name__, "message": str(error), "cause": repr(error.__cause__)}
    assert hostile is None, f"{hostile} was not refused"
    accelerator = run.trainer.accelerator
    return {
        "processes": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type.value,
        "model_class": type(run.trainer.model_wrapped).__name__,
        "gradients": run.gradients,
        "weights": run.weights,
        "logs": run.logs,
        "advantages": list(run.trainer._logs["advantages"]),
        "rollouts": watch.seen,
    }


def run_jobs(jobs: dict[str, Job], model: str, folder: str) -> dict[str, Any]:
    """Run every job on this rank of several."""
    processes, results = int(os.environ["WORLD_SIZE"]), {}
    for number, (name, job) in enumerate(jobs.items()):
        results[name] = run_job(Path(model), Path(folder) / str(number), job)
        # A set-up that is not what it should be would pass for one process, silently.
        assert torch.distributed.get_world_size() == processes > 1
        assert torch.distributed.get_backend() == "gloo"
        if "error" not in results[name]:
            assert results[name]["processes"] == processes
            assert results[name]["model_class"] == "DistributedDataParallel"
    return results


def main() -> None:
    """Call what each line of the standard input asks for: the name of a function, arguments, a file for the result."""
    for line in sys.stdin:
        function, arguments, answer = json.loads(line)
        result = pkgutil.resolve_name(function)(*arguments)
        torch.save(result, f"{answer}.part")
        Path(f"{answer}.part").rename(answer)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        time.sleep(0.2)  # as `leave` of the recipes does: gloo's threads may still hold tensors


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # transformers collects garbage after every training, which costs more than these trainings do
    main()
