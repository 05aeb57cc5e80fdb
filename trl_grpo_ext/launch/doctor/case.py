"""What a rule about combinations looks at: the launch, the run, the machine, the model and the plugins together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .environment import Environment
from .launch_file import LaunchPlan
from .problem import Problem
from .run_file import RunPlan

if TYPE_CHECKING:
    from .model_shape import ModelShape


@dataclass(frozen=True)
class Plugins:
    """The plugins that the run selects, built.

    Attributes:
        rewards: Reward functions by name.
        hooks: Advantage hooks by name.
        aggregation: The loss aggregation.
        problems: Those that could not be built, and why.
    """

    rewards: Mapping[str, Any] = field(default_factory=dict)
    hooks: Mapping[str, Any] = field(default_factory=dict)
    aggregation: Any = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Case:
    """Everything that is known before weights load.

    Attributes:
        launch: What the launcher starts.
        run: The settings of the run.
        environment: The machine.
        shape: The model's; None where its config cannot be found.
        plugins: Those selected.
        columns: Of the data set, where it is a file that can be looked into; None where not.
        model_config: The model's own configuration.
    """

    launch: LaunchPlan
    run: RunPlan
    environment: Environment
    shape: ModelShape | None = None
    plugins: Plugins = field(default_factory=Plugins)
    columns: frozenset[str] | None = None
    model_config: Any = None

    @property
    def bits(self) -> int:
        """4 or 8 where the base model is quantised, else 0."""
        return 4 if self.run["load_in_4bit"] else 8 if self.run["load_in_8bit"] else 0

    @property
    def engine(self) -> str:
        """The launcher's."""
        return self.launch.engine

    @property
    def is_fsdp2(self) -> bool:
        """With or without replicas."""
        return self.engine in ("fsdp2", "fsdp2_hybrid")

    @property
    def on_cpu(self) -> bool:
        """The script says so."""
        return bool(self.run["use_cpu"])

    @property
    def dtype(self) -> str:
        """Of the weights as they load; transformers reads None as the checkpoint's own."""
        return str(self.run["dtype"] or "auto")

    @property
    def checkpointing(self) -> bool:
        """Activations are recomputed, by either of the two names of that setting."""
        new = self.run.get("activation_checkpointing")
        return bool(self.run.get("gradient_checkpointing") if new is None else new)

    @property
    def checkpointing_kwargs(self) -> Mapping[str, Any]:
        """Of either name."""
        for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
            if isinstance(value := self.run.get(name), Mapping):
                return value
        return {}

    @property
    def learning_rate(self) -> float:
        """As a number."""
        return float(self.run["learning_rate"])

    @property
    def package(self) -> str:
        """Severity of a package that is missing: an error here, unless another machine is described."""
        return "warning" if self.environment.elsewhere else "error"


Rule = Callable[[Case], Problem | None]


def error(subject: str, message: str, fix: str) -> Problem:
    """The run will fail, or be something else than was asked for."""
    return Problem("error", subject, message, fix)


def warning(subject: str, message: str, fix: str) -> Problem:
    """It will run, but not as meant."""
    return Problem("warning", subject, message, fix)


def note(subject: str, message: str, fix: str) -> Problem:
    """Worth knowing."""
    return Problem("note", subject, message, fix)
