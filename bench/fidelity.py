"""Our advantages, losses and aggregations beside verl's, SkyRL's and TRL's own functions on the same made-up numbers.

    python -m bench.fidelity --verl FOLDER --skyrl FOLDER [--docs docs/evidence.md]

The folders are clones of verl-project/verl and NovaSky-AI/SkyRL, whose functions are imported from there; for what they
import that is not installed here, empty modules stand in this process. `fidelity.yaml` says what is compared. The
results go to `docs/results/fidelity.jsonl`, and with `--docs` as a table into that page.
"""

import argparse
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import yaml
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from bench.tables import write_block
from tests.support import arguments, length_reward, prompts, save_tiny_model
from trl_grpo_ext import Rollout, load_advantage_hooks, load_loss_aggregation, load_token_losses
from trl_grpo_ext.advantages.policies import kl_estimate
from trl_grpo_ext.advantages.returns import live_tokens_after
from trl_grpo_ext.credit import flow
from trl_grpo_ext.credit.chain import HookChain
from trl_grpo_ext.credit.terms import take_apart
from trl_grpo_ext.credit.token_losses import carried_values, run_token_loss
from trl_grpo_ext.testing import make_forward, make_rollout, make_terms

COMPARED = Path(__file__).with_suffix(".yaml")
RESULTS = Path(__file__).parents[1] / "docs" / "results" / "fidelity.jsonl"
BLOCK = "beside verl and SkyRL"
ROWS = 24
WIDTH = 10
MICRO_BATCH = 8
MODULES = {"verl": "verl.trainer.ppo.core_algos", "SkyRL": "skyrl.backends.skyrl_train.utils.ppo_utils"}
BY_VERL = ("ray", "omegaconf", "tensordict", "tensordict.tensorclass", "orjson", "codetiming", "hydra")
BY_SKYRL = ("ray", "jaxtyping", "loguru", "skyrl_gym", "skyrl_gym.envs.search.env", "skyrl_gym.envs.sql.env")
IMPORTED_THERE = {"verl": BY_VERL, "SkyRL": (*BY_SKYRL, "omegaconf")}


def made_up(batch: str = "", moved: float = 0.6, by_token: bool = False) -> tuple[Rollout, torch.Tensor]:
    """Completions of 1 to 10 tokens, some of them a tool's, in float64, and log π, `moved` away from log π_old."""
    drawn = torch.Generator().manual_seed(55)
    uniform_2_B_T = torch.rand(2, ROWS, WIDTH, generator=drawn, dtype=torch.float64)
    normal_3_B_T = torch.randn(3, ROWS, WIDTH, generator=drawn, dtype=torch.float64)
    rewards_B_K = uniform_2_B_T[0, :, :2].clone()
    weights_K = torch.tensor([1.0, 0.5], dtype=torch.float64)
    rewards_B_K[:4] = 1.0
    rewards_B_K[4:8] = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    if batch == "equal rewards in float32":
        rewards_B_K = torch.full((ROWS, 2), 0.9)
        weights_K = torch.tensor([1.0, 0.0])
    rewards_B = (rewards_B_K * weights_K).sum(dim=1)
    members = {"groups of one": 1, "equal rewards in float32": 8}.get(batch, 4)
    old_B_T = -0.1 - 3.0 * uniform_2_B_T[1]
    rollout = make_rollout(
        [0 if batch == "one completion without a token" and row == 3 else 7 * row % WIDTH + 1 for row in range(ROWS)],
        rewards_B.tolist(),
        [row // members for row in range(ROWS)],
        limit=WIDTH,
        rewards_B=rewards_B,
        rewards_B_K=rewards_B_K,
        reward_names=("r0", "r1"),
        reward_weights_K=weights_K,
        old_logps_B_T=old_B_T,
        ref_logps_B_T=old_B_T + 0.3 * normal_3_B_T[0],
    )
    mask_B_T = rollout.mask_B_T.clone()
    mask_B_T[mask_B_T.sum(dim=1) > 4, 2] = 0.0
    mask_B_T[mask_B_T.sum(dim=1) > 7, 5:7] = 0.0
    rollout = replace(rollout, mask_B_T=mask_B_T, totals=replace(rollout.totals, tokens=int(mask_B_T.sum())))
    advantages_B_T = normal_3_B_T[1] * mask_B_T if by_token else our_advantages(["normalised"], rollout)
    return replace(rollout, advantages_B_T=advantages_B_T), (old_B_T + moved * normal_3_B_T[2]).clamp(max=-0.01)


def our_advantages(hooks: Sequence[Any], rollout: Rollout) -> torch.Tensor:
    chain = HookChain(load_advantage_hooks(hooks))
    return chain.on_rollout(torch.zeros_like(rollout.rewards_B), rollout)[0] * rollout.mask_B_T


def aggregated(name: str, loss_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
    aggregation = load_loss_aggregation(name)
    if not hasattr(aggregation, "reduce"):
        return (flow.token_weights(aggregation, rollout) * loss_B_T).sum()
    micro_batches = zip(loss_B_T.split(MICRO_BATCH), rollout.mask_B_T.split(MICRO_BATCH), strict=True)
    return torch.stack([flow.reduced_loss(aggregation, *one, rollout.totals) for one in micro_batches]).mean()


class Given:
    """Gives a trainer of TRL's the log-probabilities of its policy."""

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        return self.logps_B_T, torch.zeros_like(self.logps_B_T), None


def trls_loss(settings: Mapping[str, Any], rollout: Rollout, logps_B_T: Any, advantages_B_T: Any) -> torch.Tensor:
    """TRL's own loss of the batch; without a loss type that of its `GMPOTrainer`, which has an advantage per row."""
    gmpo = "loss_type" not in settings
    config_class, trainer_class = (GMPOConfig, GMPOTrainer) if gmpo else (GRPOConfig, GRPOTrainer)
    size = {"per_device_train_batch_size": ROWS, "max_completion_length": WIDTH}
    with TemporaryDirectory() as folder:
        args = arguments(Path(folder), config_class, **size, **settings)
        model = str(save_tiny_model(Path(folder) / "model"))
        given_class = type("GivenTrainer", (Given, trainer_class), {})
        trainer = given_class(model, length_reward, args, train_dataset=prompts(ROWS))
    trainer.logps_B_T = logps_B_T
    trainer.current_gradient_accumulation_steps = 1
    inputs = {
        "prompt_ids": rollout.prompt_ids_B_P,
        "prompt_mask": rollout.prompt_mask_B_P,
        "completion_ids": rollout.completion_ids_B_T,
        "completion_mask": rollout.mask_B_T,
        "advantages": advantages_B_T[:, 0] if gmpo else advantages_B_T,
        "old_per_token_logps": rollout.old_logps_B_T,
        "ref_per_token_logps": rollout.ref_logps_B_T,
        "num_items_in_batch": rollout.mask_B_T.sum(),
    }
    loss: torch.Tensor = trainer.compute_loss(trainer.model, inputs)
    return loss


def our_loss(row: Mapping[str, Any], rollout: Rollout, logps_B_T: torch.Tensor) -> torch.Tensor:
    """TRL's loss taken apart, with the row's hooks and token losses, aggregated by the row's aggregation."""
    settings = row["trl"]
    old_B_T = rollout.old_logps_B_T
    mask_B_T = rollout.mask_B_T
    forward = make_forward(logps_B_T.detach(), 0.0 * mask_B_T, mask_B_T, old_logps_B_T=old_B_T)
    hooks = load_advantage_hooks(row.get("hooks", []))
    leaf_B_T = flow.apply_hooks(rollout.advantages_B_T, hooks, forward).clone().requires_grad_()
    loss = trls_loss(settings, rollout, logps_B_T, leaf_B_T)
    if "loss_type" not in settings:  # GMPO's is a loss of rows, beside which an aggregation is refused
        return loss
    weights_B_T = flow.token_weights(load_loss_aggregation(flow.TRL_REDUCTIONS[settings["loss_type"]]), rollout)
    level = settings.get("importance_sampling_level", "token")
    ratio_B_T = flow.importance_ratio(logps_B_T, old_B_T, mask_B_T, level)
    correction_B_T = ratio_B_T if settings.get("use_bias_correction_kl", True) else None
    kl_B_T = settings.get("beta", 0.0) * flow.kl_k3(logps_B_T, rollout.ref_logps_B_T, correction_B_T)
    own, replaced = [], False
    for plugin in load_token_losses(row.get("token_losses", [])):
        more = {"mask_B_T": mask_B_T, "carried_B_T": carried_values(plugin, rollout)}
        own.append(run_token_loss(plugin, make_terms(logps_B_T, old_B_T, leaf_B_T.detach(), **more)))
        replaced |= plugin.declares.replaces
    apart = take_apart(loss, leaf_B_T, weights_B_T, mask_B_T, kl_B_T, False, own, replaced)
    return aggregated(row.get("aggregation", "token_mean"), apart.loss_B_T, rollout)


# -------------------------------------------------------------------------------------------------------------- theirs


def import_theirs(project: str, folder: Path) -> ModuleType:
    """The module with a project's functions, from a clone."""
    sys.path.insert(0, str(folder))
    for name in IMPORTED_THERE[project]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            sys.modules[name] = MagicMock(__path__=[], __spec__=None, is_initialized=lambda: False)
    if project == "SkyRL":  # the package of its backends would import every one of them
        sys.modules["skyrl.backends"] = ModuleType("skyrl.backends")
        sys.modules["skyrl.backends"].__path__ = [str(folder / "skyrl" / "backends")]
    return importlib.import_module(MODULES[project])


def call(function: Callable[..., Any], given: Mapping[str, Any], **more: Any) -> torch.Tensor:
    """Call a function of theirs with what it has a parameter for; of several results the first."""
    given = {**given, **more}
    found = function(**{name: given[name] for name in inspect.signature(function).parameters if name in given})
    return found[0] if isinstance(found, tuple) else found


def configured(config: Any, settings: Mapping[str, Any]) -> Any:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            configured(getattr(config, name), value)
        else:
            object.__setattr__(config, name, value)  # verl's are frozen
    return config


def what_they_take(rollout: Rollout, leaf_B_T: torch.Tensor, mode: str) -> dict[str, Any]:
    """The batch by the names of their parameters; the leaf is log-probabilities, or losses to be aggregated."""
    mask_B_T = rollout.mask_B_T
    members = rollout.num_generations
    last_B_T = (mask_B_T > 0) & (live_tokens_after(mask_B_T > 0) == 0)
    rewards_B_T = torch.where(last_B_T, rollout.rewards_B.unsqueeze(1), 0.0)
    return {
        **dict.fromkeys(("response_mask", "loss_mask"), mask_B_T),
        **dict.fromkeys(("token_level_rewards", "token_level_scores"), rewards_B_T),
        **dict.fromkeys(("log_prob", "log_probs", "logprob", "loss_mat"), leaf_B_T),
        **dict.fromkeys(("old_log_prob", "old_log_probs"), rollout.old_logps_B_T),
        **dict.fromkeys(("ref_log_prob", "ref_logprob", "log_probs_base"), rollout.ref_logps_B_T),
        **dict.fromkeys(("kl_penalty", "kl_estimator_type"), "k3"),
        "index": rollout.group_ids_B.numpy(),
        "values": rollout.group_baselines_B.unsqueeze(1) * mask_B_T,
        "gamma": 1.0,
        "lam": 0.95,
        "lambd": 0.95,
        "non_tensor_batch": dict(zip(rollout.reward_names, rollout.rewards_B_K.T.numpy(), strict=True)),
        "batch": {"prompts": mask_B_T[:, :0], "attention_mask": rollout.completion_mask_B_T.long()},
        "advantages": rollout.advantages_B_T,
        "loss_agg_mode": mode.replace("_", "-"),
        "loss_reduction": {"seq_mean_token_mean": "sequence_mean"}.get(mode, mode),
        "micro_batch_size": MICRO_BATCH,
        "max_seq_len": WIDTH,
        "prompt_boundaries": [(first, first + members) for first in range(0, ROWS, members)],
    }


def verls(core: Any, kind: str, name: str, given: Mapping[str, Any], settings: Mapping[str, Any]) -> torch.Tensor:
    """What a function of verl's returns, by its registered name or the mode that it has as an argument."""
    if kind == "divergences":
        return call(core.kl_penalty, given, kl_penalty=name)
    if kind == "aggregations":
        return call(core.agg_loss, given, loss_agg_mode=name)
    if kind == "advantages":
        given = {**given, **settings, "config": configured(core.AlgoConfig(), settings)}
        shaped = {"token_level_rewards": call(core.compute_rewards, given)} if "kl_ratio" in settings else {}
        return call(core.get_adv_estimator_fn(name), given, **shaped)
    config = configured(core.ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1), settings)
    kl_B_T = settings.get("kl", 0.0) * call(core.kl_penalty, given)
    return call(core.get_policy_loss_fn(name), given, config=config) + call(core.agg_loss, given, loss_mat=kl_B_T)


def skyrls(core: Any, kind: str, name: str, given: Mapping[str, Any], settings: Mapping[str, Any]) -> torch.Tensor:
    """The same of SkyRL, whose losses are sums over advantages that are scaled before."""
    scale = core.apply_loss_reduction_to_advantages_minibatch
    if kind == "divergences":
        return call(core.compute_approx_kl, given, kl_estimator_type=name)
    if kind == "aggregations":
        scaled_B_T = call(scale, given, advantages=given["loss_mat"], loss_reduction=name)
        return core.reduce_loss(scaled_B_T, given["loss_mask"])
    if kind == "advantages":
        return call(core.AdvantageEstimatorRegistry.get(name), given, **settings)
    config = configured(core.AlgorithmConfig(policy_loss_type=name), settings)
    loss = call(core.PolicyLossRegistry.get(name), given, advantages=call(scale, given), config=config)
    kl_B_T = settings.get("kl", 0.0) * call(core.compute_approx_kl, given)
    return loss + core.masked_mean(kl_B_T, given["loss_mask"], dim=-1).mean()  # as its worker adds it


# --------------------------------------------------------------------------------------------------------- side by side


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, in parts of the largest number of either."""
    largest = max(float(ours.abs().max()), float(theirs.abs().max()))
    return float((ours - theirs).abs().max()) / largest if largest else 0.0


def compare(kind: str, row: Mapping[str, Any], cores: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A result for each of the row's functions that is TRL's or of a project that is there."""
    rollout, point_B_T = made_up(row.get("batch", ""), row.get("moved", 0.6), row.get("by_token", False))

    def evaluated(function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        leaf_B_T = point_B_T.clone().requires_grad_()
        value = function(leaf_B_T)
        value = value * rollout.mask_B_T if value.dim() else value
        slopes = torch.autograd.grad(value.sum(), leaf_B_T) if value.requires_grad else ()
        return [value.detach(), *(slope_B_T * rollout.mask_B_T for slope_B_T in slopes)]

    def of_ours(leaf_B_T: torch.Tensor) -> torch.Tensor:
        if kind == "advantages":
            return our_advantages(row["ours"], rollout)
        if kind == "losses":
            return our_loss(row, rollout, leaf_B_T)
        if kind == "divergences":
            return kl_estimate(leaf_B_T, rollout.ref_logps_B_T, row["ours"])
        return aggregated(row["ours"], leaf_B_T, rollout)

    def of_theirs(leaf_B_T: torch.Tensor) -> torch.Tensor:
        if project == "TRL":
            return trls_loss(row["trl"], rollout, leaf_B_T, rollout.advantages_B_T)
        given = what_they_take(rollout, leaf_B_T, row.get("aggregation", "token_mean"))
        return {"verl": verls, "SkyRL": skyrls}[project](cores[project], kind, name, given, settings)

    ours = evaluated(of_ours)
    for theirs in row["theirs"]:
        (project, name), *others = theirs.items()
        settings = {key: value for key, value in others if key != "why"}
        if project != "TRL" and project not in cores:
            continue
        measured = ("values", "gradients")[: len(ours)]
        gaps = {what: gap(*pair) for what, *pair in zip(measured, ours, evaluated(of_theirs), strict=True)}
        yield {"ours": label(row), "project": project, "theirs": name, **gaps, "why": theirs.get("why", "")}


def label(row: Mapping[str, Any]) -> str:
    """What of ours is compared, in words."""
    batch = [row["batch"]] if "batch" in row else []
    if "trl" in row:
        return "; ".join([row["ours"], *batch])
    selected = row["ours"] if isinstance(row["ours"], list) else [row["ours"]]
    hooks = [{"name": one} if isinstance(one, str) else one for one in selected]
    words = [f"`{one['name']}`" + "".join(f" {key} {one[key]}" for key in one if key != "name") for one in hooks]
    return "; ".join([", ".join(words), *batch])


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown: what is equal, by name; what differs and why, as a table; the releases of theirs below."""
    equal: dict[str, None] = {}
    lines = ["| Ours | Theirs | Values | Gradients | Why |", "| --- | --- | ---: | ---: | --- |"]
    for one in results:
        theirs = f"{one['project']} `{one['theirs']}`"
        if not one["why"]:
            equal[one["ours"]] = None
            continue
        gaps = [f"{one[what]:.2g}" if what in one else "" for what in ("values", "gradients")]
        lines.append(f"| {' | '.join([one['ours'], theirs, *gaps, one['why']])} |")
    same = "; ".join(equal)
    releases = dict.fromkeys(f"{one['project']} {one['release']}" for one in results)
    return "\n".join(
        [f"Equal up to 5e-8 beside one of them or more: {same}.", "", *lines, "", f"{', '.join(releases)}."]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verl", type=Path, required=True, help="a clone of verl-project/verl")
    parser.add_argument("--skyrl", type=Path, required=True, help="a clone of NovaSky-AI/SkyRL")
    parser.add_argument("--docs", type=Path, help="a page that gets the table")
    args = parser.parse_args()
    folders = {"verl": args.verl, "SkyRL": args.skyrl}
    cores = {project: import_theirs(project, folder) for project, folder in folders.items()}
    releases = {"TRL": version("trl")}
    for project, folder in folders.items():
        releases[project] = subprocess.check_output(["git", "-C", folder, "rev-parse", "HEAD"], text=True).strip()
    kinds = yaml.safe_load(COMPARED.read_text(encoding="utf-8"))
    found = [one for kind, rows in kinds.items() for row in rows for one in compare(kind, row, cores)]
    results = [{**one, "release": releases[one["project"]]} for one in found]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in results), encoding="utf-8")
    print(table(results))
    if args.docs is not None:
        write_block(args.docs, BLOCK, table(results), create=True)


if __name__ == "__main__":
    main()
