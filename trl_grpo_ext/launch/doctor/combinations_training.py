"""Rules about losses, plugins and compact updates: what this package or TRL refuses once the model is there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from packaging.version import Version

from ...errors import ConfigurationError
from ...types import implements
from .case import Case, Rule, error, note, warning
from .problem import Problem
from .settings_file import shown

_LOSS_WITHOUT_LIGER = Version("1.16")
"""From this TRL on `use_liger_kernel` leaves GRPO's loss alone; in 1.14 it replaces it."""


def liger_replaces_the_loss(case: Case) -> Problem | None:
    """TRL 1.14's Liger path goes past `_compute_loss`, where aggregations and forward hooks act."""
    version = case.environment.version("trl")
    acts = case.plugins.aggregation is not None or any(implements(h, "on_forward") for h in case.plugins.hooks.values())
    if not case.run["use_liger_kernel"] or not acts or version is None or version >= _LOSS_WITHOUT_LIGER:
        return None
    message = (
        f"use_liger_kernel with TRL {version} computes a loss of its own, past the selected aggregation and hooks."
    )
    return error("liger", message, "Set use_liger_kernel: false, or install TRL 1.16.")


def liger_with_compact_updates(case: Case) -> Problem | None:
    """Refused by compact updates, whatever the TRL."""
    if not case.run["use_liger_kernel"] or case.run["compact_updates"] != "exact":
        return None
    message = (
        "compact_updates: exact does not go with use_liger_kernel, whose loss counts the rows of each micro-batch."
    )
    return error("liger", message, "Switch one of them off.")


def liger_replaces_the_head(case: Case) -> Problem | None:
    """TRL 1.16 patches the model's head itself."""
    config = case.run["liger_kernel_config"]
    if not case.run["use_liger_kernel"] or not isinstance(config, dict) or not config.get("fused_linear_cross_entropy"):
        return None
    message = "liger_kernel_config with fused_linear_cross_entropy: TRL refuses it, since it replaces the model's head."
    return error("liger", message, "Take fused_linear_cross_entropy out.")


def unknown_loss_type(case: Case) -> Problem | None:
    """TRL finds an unknown loss at the first training step, this package when the trainer is made."""
    from ...trainer import upstream

    loss = case.run["loss_type"]
    if loss in upstream.LOSS_TYPES:
        return None
    message = f"loss_type {shown(repr(loss), 60)} is none of {', '.join(sorted(upstream.LOSS_TYPES))}."
    return error("loss", message, "Choose one of them.")


def aggregation_that_needs_whole_steps(case: Case) -> Problem | None:
    """Some aggregations need the counts of each optimizer step, which must not straddle generation batches."""
    if not getattr(case.plugins.aggregation, "needs_step_totals", False) or case.run.config is None:
        return None
    steps, accumulation = case.run.config.steps_per_generation, case.run["gradient_accumulation_steps"]
    if steps is None or not accumulation or steps % accumulation == 0:
        return None
    name = shown(case.run["loss_aggregation"], 60)
    message = (
        f"loss_aggregation {name} needs whole optimizer steps, but steps_per_generation {steps} is no multiple of "
    )
    message += f"gradient_accumulation_steps {accumulation}."
    return error("loss", message, "Change one of the two, or select another aggregation.")


def compact_updates_that_cannot_be_exact(case: Case) -> Problem | None:
    """The trainer's own check (`compact.CompactUpdates`), asked with what is known of the run."""
    if case.run.config is None or case.run["compact_updates"] != "exact" or case.run["use_liger_kernel"]:
        return None
    from ...trainer.compact.updates import CompactUpdates

    try:
        described: Any = _described(case, CompactUpdates)
        described._check_compact()
    except ConfigurationError as refusal:
        return error("compact", shown(refusal, 600), "Change what it names.")
    return None


def kl_counted_twice(case: Case) -> Problem | None:
    """`beta` adds a KL penalty to the loss, the hook one to the reward."""
    names = [name for name in case.plugins.hooks if name.rpartition(":")[2] == "kl_in_reward"]
    if not names or not case.run["beta"]:
        return None
    message = (
        f"beta {case.run['beta']} and the hook kl_in_reward both hold the policy to the reference: KL counts twice."
    )
    return warning("kl", message, "Set beta: 0.0, or take kl_in_reward out.")


def reference_that_is_not_kept(case: Case) -> Problem | None:
    """`sync_ref_model` needs a reference model of its own."""
    if not case.run["sync_ref_model"]:
        return None
    if not case.run["beta"]:
        fix = "Set beta above 0, or sync_ref_model: false."
        return error("reference", "sync_ref_model: true with beta 0: there is no reference model.", fix)
    if case.run["use_peft"]:
        message = "sync_ref_model: true with use_peft: the reference is the model without its adapter."
        return error("reference", message, "Set sync_ref_model: false.")
    return None


def references_nobody_looked_at(case: Case) -> Problem | None:
    """A reference that a reward cannot parse teaches nothing or the wrong thing; the audit finds it beforehand."""
    names = [name for name, reward in case.plugins.rewards.items() if getattr(reward, "reference_column", None)]
    data = case.run.get("dataset_path") or case.run.get("dataset_name")
    if not names or not data:
        return None
    message = f"{', '.join(names)} compare with references of {shown(data, 100)}, which may not parse."
    return note("references", message, f"Run: trl-grpo-ext audit {shown(data, 100)} --reward {names[0]}")


def column_that_the_data_lack(case: Case) -> Problem | None:
    """A reward names the column that it compares with."""
    if case.columns is None:
        return None
    lacking = {
        name: column
        for name, reward in case.plugins.rewards.items()
        if isinstance(column := getattr(reward, "reference_column", None), str) and column not in case.columns
    }
    if not lacking:
        return None
    told = ", ".join(f"{name} wants {column!r}" for name, column in lacking.items())
    have = shown(", ".join(sorted(case.columns)), 200)
    return error(
        "data", f"The data set has the columns {have}; {told}.", "Rename the column, or choose another reward."
    )


def weights_that_do_not_match(case: Case) -> Problem | None:
    """`reward_weights` is one number for each reward."""
    weights, rewards = case.run["reward_weights"], case.plugins.rewards
    script = case.run.script
    if weights is None or not rewards or case.plugins.problems or (script is not None and script.is_recipe):
        return None  # recipes measure one reward more
    if len(weights) == len(rewards):
        return None
    message = f"reward_weights has {len(weights)} numbers for {len(rewards)} selected rewards."
    return error("rewards", message, "Give one number for each reward, those passed in Python included.")


def nothing_to_train_on(case: Case) -> Problem | None:
    """TRL wants a reward; a script may pass its own."""
    if case.run["rewards"] or case.plugins.problems or case.run.script is not None:
        return None
    message = "No rewards are selected: the script must pass reward_funcs itself."
    return note("rewards", message, "Select some with `rewards`, `trl-grpo-ext` lists them in its documentation.")


def completions_that_never_end(case: Case) -> Problem | None:
    """Where every completion is clipped at the limit, all rewards are alike, and training does nothing silently."""
    if case.environment.chat_template is not False:
        return None
    message = (
        f"The tokenizer of {shown(case.run['model_name_or_path'], 80)} has no chat template: a base model that writes "
        f"no end of text is clipped at {case.run['max_completion_length']} tokens every time, and learns nothing."
    )
    fix = "Watch completions/clipped_ratio and frac_reward_zero_std in the first steps; both at 1 means no training."
    return warning("silent", message, fix)


def sequence_ratios_under_token_means(case: Case) -> Problem | None:
    """GSPO's sequence ratios with a token-mean loss weigh sequences by length."""
    level, loss = case.run["importance_sampling_level"], case.run["loss_type"]
    if level != "sequence" or loss not in ("bnpo", "dr_grpo", "dapo", "cispo") or case.plugins.aggregation is not None:
        return None
    message = f"importance_sampling_level sequence with loss_type {loss} weighs each sequence by its length."
    return warning("loss", message, "Set loss_type: grpo, as the GSPO paper has it.")


def rewards_slower_than_the_ranks_wait(case: Case) -> Problem | None:
    """The other ranks give up at `ddp_timeout`."""
    limit, patience = case.run["reward_timeout"], case.run["ddp_timeout"]
    if limit is None or case.launch.processes == 1 or float(limit) < float(patience):
        return None
    message = f"reward_timeout {limit:g} s is not below ddp_timeout {patience} s, at which the other ranks give up."
    return warning("rewards", message, "Raise ddp_timeout, or lower reward_timeout.")


def _described(case: Case, base: type) -> Any:
    """As much of a trainer as the check of compact updates looks at."""
    run = case.run
    text = case.model_config.get_text_config() if case.model_config is not None else None
    coefficient = run["router_aux_loss_coef"]
    coefficient = getattr(text, "router_aux_loss_coef", 0.0) if coefficient is None else coefficient
    described: Any = base()
    described.args = run.config
    described.model = SimpleNamespace(config=SimpleNamespace(rope_theta=1.0) if text is None else text)
    described.loss_aggregation, described.advantage_hooks = case.plugins.aggregation, list(case.plugins.hooks.values())
    described.loss_type, described.beta = run["loss_type"], run["beta"]
    described.top_entropy_quantile = run["top_entropy_quantile"]
    described._entropy_bonus_enabled = run["entropy_coef"] != 0.0 or bool(run["use_adaptive_entropy"])
    described.aux_loss_enabled = hasattr(text, "output_router_logits") and coefficient != 0.0
    return described


RULES: tuple[Rule, ...] = (
    liger_replaces_the_loss,
    liger_with_compact_updates,
    liger_replaces_the_head,
    unknown_loss_type,
    aggregation_that_needs_whole_steps,
    compact_updates_that_cannot_be_exact,
    kl_counted_twice,
    reference_that_is_not_kept,
    references_nobody_looked_at,
    column_that_the_data_lack,
    weights_that_do_not_match,
    nothing_to_train_on,
    completions_that_never_end,
    sequence_ratios_under_token_means,
    rewards_slower_than_the_ranks_wait,
)
