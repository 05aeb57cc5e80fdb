"""`GRPOExtConfig`: TRL's `GRPOConfig` with four more fields, checked before anything heavy is loaded."""

# No `from __future__ import annotations` here: TRL's argument parser reads the types of the fields at run time.

from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from .errors import ConfigurationError
from .plugins import Kind, find, parse_selection

_HOW = "Each is a name, `distribution:name`, `pkg.module:attribute`, or a mapping `{name: ..., parameter: value}`."


@dataclass
class GRPOExtConfig(GRPOConfig):
    """TRL's `GRPOConfig` plus the selection of plugins.

    A selection is a name, `distribution:name`, a dotted path `pkg.module:attribute`, or a mapping of `name` and
    parameters. On the command line a mapping is written as YAML: `--rewards gsm8k_accuracy '{name: think_format,
    weight: 0.2}'`. Names are looked up here, in the installed distributions' metadata; nothing is imported before the
    trainer is constructed.

    Args:
        rewards: Reward plugins, added to the `reward_funcs` given in Python. A mapping may hold `weight`.
        advantage_hooks: Advantage hooks, in the order in which they act. A mapping may hold `preserve_sign` and
            `preserve_sum`.
        loss_aggregation: One loss aggregation. None leaves TRL's own reduction (`loss_type`) in place. A mapping may
            hold `skip_zero_variance`, which leaves groups without signal out of an aggregation by weights.
        token_records: How many completions of each generation batch to record token by token, in whole groups, as
            parquet files under `output_dir/token_records`, one per logging step. 0 records nothing.

    Raises:
        ConfigurationError: A selection is malformed, or weights are given twice.
        UnknownPluginError: No installed distribution offers that name.
        AmbiguousPluginError: Two distributions do.
    """

    rewards: list[str] | None = field(
        default=None, metadata={"help": f"Reward plugins. {_HOW} A reward's mapping may also hold `weight`."}
    )
    advantage_hooks: list[str] | None = field(
        default=None, metadata={"help": f"Advantage hooks, in the order in which they act. {_HOW}"}
    )
    loss_aggregation: dict[str, Any] | str | None = field(
        default=None, metadata={"help": f"One loss aggregation in place of TRL's own reduction. {_HOW}"}
    )

    token_records: int = field(
        default=0, metadata={"help": "Completions of each generation batch to record token by token, in whole groups."}
    )

    def __post_init__(self) -> None:
        """Check the selections against the installed plugins' metadata, after TRL's own checks."""
        self.rewards = _selected("rewards", "reward", self.rewards)
        self.advantage_hooks = _selected("advantage_hooks", "advantage_hook", self.advantage_hooks)
        if self.loss_aggregation is not None:
            selected = _selected("loss_aggregation", "loss_aggregation", [self.loss_aggregation])
            self.loss_aggregation = None if selected is None else selected[0]
        if isinstance(self.token_records, bool) or not isinstance(self.token_records, int) or self.token_records < 0:
            raise ConfigurationError(f"token_records must be a number from 0 up, got {self.token_records!r}.")
        super().__post_init__()
        weighted = [r for r in self.rewards or [] if isinstance(r, dict) and "weight" in r]
        if weighted and self.reward_weights is not None:
            raise ConfigurationError(
                f"Reward weights are given twice: reward_weights={self.reward_weights} and {weighted[0]!r} in rewards. "
                "Keep one of them."
            )


def _selected(field_name: str, kind: Kind, values: Any) -> Any:
    """Return selections as plain strings and mappings (they are saved with the arguments), each looked up once."""
    if isinstance(values, (str, dict)):
        values = [values]
    # How TRL's command line spells "not set", to switch off what a YAML file selects.
    if values is None or (
        isinstance(values, list) and [str(value).lower() for value in values] in (["none"], ["null"])
    ):
        return None
    if not isinstance(values, (list, tuple)):
        raise ConfigurationError(f"{field_name} must be a list of selections, got {values!r}. {_HOW}")
    plain = []
    for value in values:
        selection = parse_selection(kind, value)
        find(kind, selection)
        plain.append(selection.plain())
    return plain
