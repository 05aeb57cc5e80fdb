"""A command line read by the launcher that it names: what it would start, and in which environment.

`python -m trl_grpo_ext.launch.doctor.launch REQUEST ANSWER` calls the launcher, up to where it would start processes.
"""

import contextlib
import dataclasses
import difflib
import importlib.metadata
import io
import os
import pickle
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from ...errors import ConfigurationError
from ...guard.untrusted import one_line, read_settings
from ...plugins.discovery import suggest_names
from . import Problem, pretend

LAUNCHERS = ("accelerate", "accelerate-launch", "torchrun", "trl")
_AS_MODULES = {"accelerate.commands.launch": "accelerate-launch", "torch.distributed.run": "torchrun"}

RENAMED: Mapping[str, tuple[str, str]] = {
    "torch_dtype": ("dtype", "TRL 0.27"),
    "warmup_ratio": ("warmup_steps", "transformers 5.15, where a number below 1 is a share of the steps"),
    "max_prompt_length": ("", "TRL 0.28: filter the data set by the prompts' lengths, or longer ones are trained on"),
    "evaluation_strategy": ("eval_strategy", "transformers 4.51"),
    "no_cuda": ("use_cpu", "transformers 5.0"),
    "group_by_length": ("train_sampling_strategy", "transformers 5.2; its value is group_by_length"),
    "use_liger_loss": ("use_liger_kernel", "TRL 0.28"),
    "wandb_log_unique_prompts": ("log_unique_prompts", "TRL 0.27"),
    "vllm_max_model_len": ("vllm_max_model_length", "TRL 0.18"),
    "vllm_guided_decoding_regex": ("vllm_structured_outputs_regex", "TRL 0.28"),
    "overwrite_output_dir": ("", "transformers 5.0: a run continues only where resume_from_checkpoint says so"),
    "logging_dir": ("", "transformers 5.15: set the variable TENSORBOARD_LOGGING_DIR"),
    "vllm_device": ("", "TRL 0.18: vllm_mode colocate shares the trainer's GPUs, server has its own"),
}
"""Settings that today's releases refuse: the successor (empty if there is none), and the first release without it."""


@dataclass(frozen=True)
class Launch:
    """What a command starts; None in `script` if the launcher stopped."""

    script: str | None
    words: tuple[str, ...] = ()
    module: bool = False  # the script is a module's name, as after `python -m`
    environment: Mapping[str, str] = field(default_factory=dict)  # what the launcher sets
    launcher: str = "python"
    file: str | None = None  # the launch file
    processes: int = 1  # on all machines together
    asked_processes: int = 1  # those that file or command line ask for
    machines: int = 1
    rendezvous: str = "static"
    ranked: bool = True  # --machine_rank is on the command line
    settings_alone: bool = False  # a YAML file, with no script of its own
    problems: tuple[Problem, ...] = ()

    @property
    def name(self) -> str:
        """The launch file's name, or the launcher's."""
        return self.launcher if self.file is None else one_line(Path(self.file).name, 300)

    @property
    def processes_per_machine(self) -> int:
        return max(1, self.processes // max(1, self.machines))

    @property
    def needs_gpus(self) -> bool:
        """Whether it starts what is meant for GPUs."""
        asked = [self.environment.get(f"ACCELERATE_USE_{engine}", "") for engine in ("DEEPSPEED", "FSDP")]
        divided = any(one.lower() in ("1", "true", "yes") for one in asked)
        return self.settings_alone or self.processes_per_machine > 1 or divided

    def offloads(self, what: str) -> bool:
        """Whether DeepSpeed keeps the `optimizer` or the `param` on the CPU or a disk."""
        place = self.environment.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what.upper()}_DEVICE")
        path = self.environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        if path != "none":
            place = read_settings(path).get("zero_optimization", {}).get(f"offload_{what}", {}).get("device")
        return place in ("cpu", "nvme")


def read_command(words: Sequence[str]) -> Launch:
    """What can be said without a launcher; one that names a launcher has its name and no script."""
    rest = list(words)
    module = False
    if rest and re.fullmatch(r"python[\d.]*", Path(rest[0]).name):
        rest.pop(0)
        while not module and rest and rest[0].startswith("-"):
            module = rest.pop(0) == "-m"  # the others are options of the interpreter
    if not rest:
        raise ConfigurationError("No command to examine: write it after `--`, or name a YAML file.")
    script = rest.pop(0)
    name = _AS_MODULES.get(script, script) if module else Path(script).name
    if name == "accelerate" and rest[:1] == ["launch"]:
        name = "accelerate-launch"  # the same, without the imports of its other commands
        rest = rest[1:]
    if name in LAUNCHERS:
        return Launch(None, tuple(rest), launcher=name)
    if Path(script).suffix in (".yaml", ".yml") and Path(script).is_file():
        alone = "trl_grpo_ext.launch.doctor.settings_alone"
        return Launch(alone, ("--config", script, *rest), module=True, launcher=script, settings_alone=True)
    if not module and (Path(script).suffix != ".py" or not Path(script).is_file()):
        forms = "accelerate launch ..., torchrun ..., trl grpo ..., python train.py ..., or a YAML file alone"
        raise ConfigurationError(f"{one_line(script, 300)} is no Python script. Write what starts the run: {forms}.")
    return Launch(script, tuple(rest), module)


class _Started(BaseException):
    """What a launcher would start."""

    def __init__(self, **facts: Any) -> None:
        self.facts = facts


def read_launcher(launch: Launch) -> Launch:
    """Let the launcher read its command, and stop it where it would start processes; for a process of its own."""
    import accelerate.commands.launch as accelerate_launch
    import torch.distributed.run as torch_run

    given: list[Any] = []
    command = accelerate_launch.launch_command

    def launch_command(args: Any) -> None:
        given.append(args)
        command(args)

    def simple(words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
        (args,) = given
        rest = tuple(words)[list(words).index(args.training_script) + 1 :]
        raise _Started(script=args.training_script, words=rest, module=args.module, environment=dict(env))

    def torch_launch(args: Any) -> NoReturn:
        config, *_ = torch_run.config_from_args(args)
        count = config.nproc_per_node
        machines = config.max_nodes
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), 0)
        sizes = {"WORLD_SIZE": count * machines, "LOCAL_WORLD_SIZE": count, "GROUP_WORLD_SIZE": machines}
        master = {"MASTER_ADDR": args.master_addr or "127.0.0.1", "MASTER_PORT": args.master_port or 29500}
        variables = {name: str(value) for name, value in {**ranks, **sizes, **master}.items()}
        script = {"script": args.training_script, "words": tuple(args.training_script_args), "module": args.module}
        job = {"processes": count * machines, "machines": machines, "rendezvous": args.rdzv_backend}
        raise _Started(**script, **job, environment={**os.environ, **variables})

    accelerate_launch.launch_command = launch_command
    accelerate_launch.subprocess = SimpleNamespace(Popen=simple)
    torch_run.run = torch_launch
    before = dict(os.environ)
    said = io.StringIO()
    (point,) = importlib.metadata.entry_points(group="console_scripts", name=launch.launcher)
    sys.argv = [launch.launcher, *launch.words]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            point.load()()
    except _Started as started:
        facts = started.facts
        if given:
            facts |= {"asked_processes": given[0].num_processes or 1, "file": _launch_file(given[0])}
            facts["problems"] = tuple(unknown_keys(facts["file"])) if facts["file"] else ()
        ranked = any(word.startswith(("--machine_rank", "--machine-rank", "--node")) for word in launch.words)
        changed = {name: value for name, value in facts.pop("environment").items() if before.get(name) != value}
        return dataclasses.replace(launch, environment=changed, ranked=ranked, **facts)
    except SystemExit as stop:
        lines = [line for line in said.getvalue().splitlines() if line.strip()]
        why = lines[-1] if lines else f"it ended with {stop.code}"
    except (Exception, AssertionError) as error:  # whatever the launcher raises for what it was given
        why = f"{type(error).__name__}: {error}"
    renamed = what_to_write({name: "" for name in RENAMED if f"--{name}" in why}, ())  # which TRL's launcher passes on
    problem = Problem("error", "launch", one_line(f"{launch.launcher} stops: {why}", 900), " ".join(renamed))
    return dataclasses.replace(launch, problems=(problem,), file=_launch_file(given[0]) if given else None)


def _launch_file(args: Any) -> str | None:
    """The launch file in use, the default one of this machine too."""
    from accelerate.commands.config import config_args

    if args.config_file is None and not Path(config_args.default_config_file).is_file():
        return None
    return str(args.config_file or config_args.default_config_file)


def unknown_keys(path: str) -> list[Problem]:
    """Keys in the launch file's sections that no option of the launcher has, which Accelerate does not say."""
    from accelerate.commands.launch import launch_command_parser

    settings = read_settings(path)
    known = {action.dest for action in launch_command_parser()._actions}
    file = one_line(Path(path).name, 300)
    problems = []
    for section in ("deepspeed_config", "fsdp_config", "parallelism_config"):
        for key in settings.get(section) or {}:
            option = f"fsdp_{key}" if section == "fsdp_config" and not key.startswith("fsdp") else key
            if option not in known:
                what = f"{file} has {one_line(key, 60)!r}, which Accelerate ignores silently."
                problems.append(Problem("warning", "launch file", what, suggest_names(option, known).strip()))
    return problems


def what_to_write(unknown: Mapping[str, object], known: Iterable[str]) -> list[str]:
    """A sentence for each setting that was renamed or removed, or that is near a known one."""
    sentences = []
    names = list(known)
    for name, value in unknown.items():
        successor, since = RENAMED.get(name, ("", ""))
        if successor:
            written = f"{successor}: {value}" if value not in (None, "") and "value" not in since else successor
            sentences.append(f"{name} is {successor} since {since}: write {written}.")
        elif since:
            sentences.append(f"{name} has no successor since {since}.")
        elif near := difflib.get_close_matches(name, names, n=2, cutoff=0.85):
            sentences.append(f"{name}: did you mean {' or '.join(near)}?")
    return sentences


if __name__ == "__main__":
    asked, machine, _ = pickle.loads(Path(sys.argv[1]).read_bytes())
    if machine.gpus is not None:
        import torch

        pretend.gpus(torch, machine.gpus, machine.gpu_bytes)
    Path(sys.argv[2]).write_bytes(pickle.dumps(read_launcher(asked)))
