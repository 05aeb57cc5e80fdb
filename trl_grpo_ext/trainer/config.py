"""`GRPOExtConfig`: TRL's `GRPOConfig` with more fields, checked before anything heavy is loaded."""

# No `from __future__ import annotations` here: TRL's argument parser reads the types of the fields at run time.

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

from transformers import Trainer
from trl import GRPOConfig

from ..errors import ConfigurationError
from ..guard.calls import has_plugins, running_methods
from ..guard.parameters import checked_choice, checked_number, checked_text, checked_whole
from ..guard.untrusted import parse_yaml
from ..plugins.loading import Kind, find, parse_selection

_HOW = "Each is a name, `distribution:name`, `pkg.module:attribute`, or a mapping `{name: ..., parameter: value}`."


@dataclass
class GRPOExtConfig(GRPOConfig):
    """TRL's `GRPOConfig` plus the selection of plugins.

    A selection is a name, `distribution:name`, a dotted path `pkg.module:attribute`, or a mapping of `name` and
    parameters. On the command line a mapping is written as YAML: `--rewards gsm8k_accuracy '{name: think_format,
    weight: 0.2}'`. Names are looked up here in the metadata of installed distributions; nothing is imported before the
    trainer is constructed. A trainer that would ignore these settings is refused while it is constructed.

    Args:
        rewards: Reward plugins, added to the `reward_funcs` given in Python. A mapping may hold `weight`.
        advantage_hooks: Advantage hooks. They run in order of their roles; hooks of one role run in this order.
        loss_aggregation: One loss aggregation. None leaves TRL's own reduction (`loss_type`) in place. A mapping may
            hold `skip_zero_variance`, which excludes groups without signal from an aggregation by weights.
        token_losses: Token losses: further terms of the loss, or one in place of TRL's policy loss.
        prompt_sampler: Which prompts to sample for: one prompt sampler. None leaves TRL's own order in place.
        resample: Which groups to train on: a group filter, or a mapping of `filter` and `max_rounds` (4 by default).
            Other groups are replaced by groups of further prompts, until the generation batch is full or the rounds are
            used up; what is missing then is masked (see `trl_grpo_ext.trainer.resampling`).
        reward_timeout: Wall-clock seconds that all reward functions together may take for one generation batch on each
            rank; in several processes at most four fifths of `ddp_timeout`. It ends a hang before the waiting ranks
            time out, by an error on all ranks that names the reward. None means no limit.
        compact_updates: `off`, or `exact`: the update computes no padding and leaves out rows without signal, with the
            same gradient (see `trl_grpo_ext.trainer.compact.updates`).
        share_prompts: With `compact_updates: exact`, compute each prompt once for all its completions where that is
            exact: in updates (see `trl_grpo_ext.trainer.compact.packed`), and in sampling where one process samples
            with transformers (see `trl_grpo_ext.trainer.compact.sampling`).
        token_records: Completions of each generation batch to record token by token, in whole groups. Writes one
            parquet file per logging step to `output_dir/token_records`. 0 records nothing.
        plugin_changes: What to do when a run resumes from a checkpoint with different plugins: `stop` with an error
            that names every difference, or `warn` and continue (see `trl_grpo_ext.records.manifest`). A hook or sampler
            of another name than the checkpoint's then starts over.
        pass_at_k: Values of k, each at most `num_generations_eval`. An evaluation reports `pass@k`: the probability
            that at least one of k completions passes, estimated without bias from all completions of a problem (see
            `trl_grpo_ext.trainer.pass_at_k`).
        pass_thresholds: By reward name, the least value that passes. None means 1.0 for the run's only reward.

    Raises:
        ConfigurationError: A selection is malformed, weights are given twice, or the trainer is not `GRPOExtTrainer`
            and has no `GRPOExtMixin`, and something here is set.
        UnknownPluginError: No installed distribution offers that name.
        AmbiguousPluginError: Two distributions do.
    """

    rewards: list[str] | None = None
    advantage_hooks: list[str] | None = None
    loss_aggregation: dict[str, Any] | str | None = None
    token_losses: list[str] | None = None
    prompt_sampler: dict[str, Any] | str | None = None
    resample: dict[str, Any] | str | None = None
    reward_timeout: float | None = 3600.0
    compact_updates: str = "off"
    share_prompts: bool = False
    token_records: int = 0
    plugin_changes: str = "stop"
    pass_at_k: list[int] | None = None
    pass_thresholds: dict[str, Any] | str | None = None

    def __post_init__(self) -> None:
        """Check the selections against the installed plugins' metadata, after TRL's own checks."""
        self.rewards = _selected("rewards", "reward", self.rewards)
        self.advantage_hooks = _selected("advantage_hooks", "advantage_hook", self.advantage_hooks)
        self.token_losses = _selected("token_losses", "token_loss", self.token_losses)
        self.loss_aggregation = _plain("loss_aggregation", self.loss_aggregation)
        self.prompt_sampler = _plain("prompt_sampler", self.prompt_sampler)
        resample = read_resample(self.resample)
        self.resample = None
        if resample is not None:
            self.resample = vars(resample) | {"filter": _plain("group_filter", resample.filter)}
        self.compact_updates = {"False": "off"}.get(str(self.compact_updates), self.compact_updates)  # YAML's `off`
        checked_choice("plugin_changes", self.plugin_changes, ("stop", "warn"))
        checked_choice("compact_updates", self.compact_updates, ("off", "exact"))
        checked_whole("token_records", self.token_records, lowest=0)
        if self.compact_updates == "off" and self.share_prompts:
            raise ConfigurationError(
                "share_prompts needs compact_updates: exact. Set that as well, or leave share_prompts out."
            )
        if self.reward_timeout is not None:
            wanted = "a number of seconds above 0, or None"
            checked_number("reward_timeout", self.reward_timeout, wanted, lambda seconds: seconds > 0)
        self.pass_thresholds = _thresholds(self.pass_thresholds)
        asked = vars(self)["resume_from_checkpoint"]  # on the command line a text, to transformers a folder
        self.resume_from_checkpoint = {"true": True, "false": None}.get(str(asked).lower(), asked)
        super().__post_init__()
        self.pass_at_k = [self.pass_at_k] if isinstance(self.pass_at_k, int) else self.pass_at_k
        sampled = self.num_generations_eval or self.num_generations
        for k in self.pass_at_k or []:
            if checked_whole("pass_at_k", k, lowest=1) > sampled:
                what = f"{k} completions are more than the {sampled} that an evaluation samples per problem"
                raise ConfigurationError(f"pass_at_k: {what}. Raise num_generations_eval.")
        if self.pass_thresholds is not None and not self.pass_at_k:
            raise ConfigurationError(f"pass_thresholds={self.pass_thresholds!r} has no effect without pass_at_k.")
        weighted = [r for r in self.rewards or [] if isinstance(r, dict) and "weight" in r]
        if weighted and self.reward_weights is not None:
            both = f"reward_weights={self.reward_weights} and {weighted[0]!r} in rewards"
            raise ConfigurationError(f"Reward weights are given twice: {both}. Keep one of them.")

    def get_process_log_level(self) -> int:
        """The log level, which every trainer of transformers asks its config for while it is constructed.

        Raises:
            ConfigurationError: That trainer is not one of ours.
        """
        unset = vars(our_settings(None))
        lost = [f"{name}={value!r}" for name, value in vars(our_settings(self)).items() if value != unset[name]]
        for owner, names in running_methods() if lost else ():
            if isinstance(owner, Trainer) and names.get("args") is self and not has_plugins(owner):
                what = f"{type(owner).__name__} ignores {', '.join(lost)} of {type(self).__name__}"
                raise ConfigurationError(f"{what}. Construct GRPOExtTrainer, or put GRPOExtMixin first.")
        level: int = super().get_process_log_level()
        return level


def our_settings(args: Any) -> SimpleNamespace:
    """The settings that this package adds, of any config; of a plain `GRPOConfig`, or none, their defaults."""
    ours = [one for one in fields(GRPOExtConfig) if one.name not in GRPOConfig.__dataclass_fields__]
    return SimpleNamespace(**{one.name: getattr(args, one.name, one.default) for one in ours})


@dataclass(frozen=True)
class ResampleSettings:
    """The mapping `resample`, read."""

    filter: Any  # A selection of a group filter, or one
    max_rounds: int = 4  # most generations for one batch


def read_resample(value: Any) -> ResampleSettings | None:
    """Read the setting: None, a filter's name, or a mapping of `filter` and `max_rounds`, maybe in YAML."""
    if _is_unset(value):
        return None
    if isinstance(value, str):
        value = parse_yaml(value, "resample") if value.lstrip().startswith("{") else {"filter": value}
    how = "Write a filter's name, or {filter: signal, max_rounds: 4}."
    if not isinstance(value, Mapping) or value.get("filter") is None:
        raise ConfigurationError(f"resample: {value!r} does not say which groups to keep. {how}")
    if unknown := [key for key in value if key not in ResampleSettings.__dataclass_fields__]:
        raise ConfigurationError(f"resample has no {unknown[0]!r}. {how}")
    settings = ResampleSettings(**value)
    checked_whole("resample: max_rounds", settings.max_rounds, lowest=1)
    return settings


def _is_unset(value: Any) -> bool:
    """Whether a setting is None; TRL's command line spells that as a word, to override what a YAML file selects."""
    return value is None or str(value).lower() in ("none", "null")


def _thresholds(value: Any) -> dict[str, float] | None:
    if isinstance(value, str):
        value = parse_yaml(value, "pass_thresholds")
    if value is None:
        return None
    if not isinstance(value, dict) or not value:
        raise ConfigurationError(f"pass_thresholds must be a mapping {{reward: number}}, got {value!r}.")
    return {
        checked_text("pass_thresholds: a reward", name): checked_number(f"pass_thresholds: {name}", least, "a number")
        for name, least in value.items()
    }


def _selected(field_name: str, kind: Kind, values: Any) -> Any:
    """Return selections as plain strings and mappings (they are saved with the arguments), each looked up once."""
    if values is not None and not isinstance(values, (str, dict, list, tuple)):
        raise ConfigurationError(f"{field_name} must be a list of selections, got {values!r}. {_HOW}")
    listed = [values] if isinstance(values, (str, dict)) else list(values or [])
    if values is None or (len(listed) == 1 and _is_unset(listed[0])):
        return None
    return [_plain(kind, value) for value in listed]


def _plain(kind: Kind, value: Any) -> Any:
    """A selection as a plain string or mapping, after its name was looked up; None for none."""
    if _is_unset(value):
        return None
    selection = parse_selection(kind, value)
    find(kind, selection)
    return selection.plain()
