"""Reading settings (command line over `--config` over defaults), and checks before anything heavy is loaded."""

import argparse
import difflib
import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import PartialState
from trl import GRPOConfig, ModelConfig, TrlParser

from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.guard.untrusted import read_settings
from trl_grpo_ext.launch.checkpoints import last_complete_checkpoint
from trl_grpo_ext.launch.engine import ExpectedRun, check_launch
from trl_grpo_ext.launch.ranges import quantised_with_vllm, vllm_without_cuda, wrong_values

from . import models
from .errors import RecipeError, one_line, settings_errors


class RecipeParser(TrlParser):
    """TRL's parser, which also takes `--config=FILE`, allows no abbreviations and reports errors in a sentence."""

    def __init__(self, dataclasses: Sequence[type]) -> None:
        super().__init__(dataclasses, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """In place of argparse's page of usage."""
        raise ConfigurationError(f"{message[:1].upper()}{message[1:]}.")

    def parse(self, command_line: Sequence[str], defaults: Mapping[str, Any]) -> Any:
        """Return one instance of each dataclass."""
        words = split_config(command_line)
        known = {action.dest for action in self._actions}
        self.set_defaults_with_config(**defaults)
        config = config_of(words)
        numbers = {action.dest for action in self._actions if action.type in (int, float) and action.nargs is None}
        for name, value in config.items():
            if name not in known and name != "env":
                raise ConfigurationError(f"There is no setting {name!r} (in the file of --config).{_near(name, known)}")
            if name in numbers and isinstance(value, list | dict):
                raise ConfigurationError(f"{name} is {value!r:.60} (in the file of --config), not a number.")
        place = words.index("--config") if "--config" in words else len(words)
        parsed, unknown = self.parse_known_args(words[:place] + words[place + 2 :])
        for word in unknown:
            name = word.lstrip("-").split("=")[0].replace("-", "_")
            raise ConfigurationError(f"There is no setting {word!r} (command line).{_near(name, known)}")
        if wrong := wrong_values(config) or wrong_values(vars(parsed)):
            raise ConfigurationError(f"{'; '.join(wrong)}.")
        with settings_errors():
            return self.parse_args_and_config(words)


def split_config(command_line: Sequence[str]) -> list[str]:
    """Write `--config=FILE` as two words, the only form that TRL's parser sees."""
    words = [part for word in command_line for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if "--config" in words[-1:]:
        raise ConfigurationError("No file is named after --config.")
    return words


def config_of(command_line: Sequence[str]) -> dict[str, Any]:
    """Return the settings in the file of `--config`; empty without one."""
    words = split_config(command_line)
    return read_yaml(words[words.index("--config") + 1]) if "--config" in words else {}


def value_of(name: str, command_line: Sequence[str], config: Mapping[str, Any]) -> Any:
    """Return one setting before the rest is parsed: from the command line, or else from `config`, or else None."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?", const="true", dest="value")
    value = parser.parse_known_args(list(command_line))[0].value
    return config.get(name) if value is None else value


def embedded_or_hub(command_line: Sequence[str], config: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether to use the embedded model and data, and why: as given, or else if no model is named and there is no GPU.

    Read before the rest is parsed, because the defaults depend on it.
    """
    named = value_of("model_name_or_path", command_line, config)
    wanted = value_of("embedded", command_line, config)
    if wanted is not None:
        embedded = str(wanted).lower() in ("true", "1", "yes")
        why = "asked for"
    else:
        cuda = torch.cuda.is_available()
        embedded = named is None and not cuda
        why = "a CUDA device is here" if cuda else "no CUDA device is here"
    return embedded, why if named is None else "the model is named"


def machine_defaults(embedded: bool) -> dict[str, Any]:
    """Settings that TRL needs on a machine without an accelerator; they override the recipe's own defaults.

    The embedded default was made for CPUs, and runs on one if it was chosen for lack of a CUDA device.
    """
    cuda = torch.cuda.is_available()
    on_cpu = not cuda and (embedded or not torch.accelerator.is_available())
    return {"use_cpu": True, "bf16": False} if on_cpu else {}


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the settings of a YAML file."""
    if not Path(path).is_file():
        raise ConfigurationError(f"There is no file {str(path)!r} (--config).")
    try:
        return read_settings(path)
    except ConfigurationError as error:
        raise ConfigurationError(f"{one_line(error)} (--config)") from error


def asked_for(model_args: ModelConfig, engine: str | None, processes: int | None) -> ExpectedRun:
    """What the settings require of the run; `check_setup` and `EngineCheck` enforce it."""
    bits = 4 if model_args.load_in_4bit else 8 if model_args.load_in_8bit else 0
    return ExpectedRun(engine, processes, model_args.dtype, bits)


def check_setup(
    args: GRPOConfig, model_args: ModelConfig, state: PartialState, asked: ExpectedRun | None = None
) -> None:
    """Stop if the run cannot be what was asked for, and finish the settings that TRL's parser leaves undone."""
    check_launch(state, asked, args=args)
    if model_args.model_name_or_path == models.NAME:
        with state.local_main_process_first():
            models.make(models.cache_folder())
        model_args.model_name_or_path = str(models.cache_folder())
    output = Path(args.output_dir).absolute()
    there = next(one for one in (output, *output.parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RecipeError(f"{args.output_dir!r} (--output_dir): {str(there)!r} is no folder that can be written to.")
    if Path(args.output_dir).resolve() == Path(str(model_args.model_name_or_path)).resolve():
        raise RecipeError(
            f"{args.output_dir!r} is both --output_dir and the model to start from: choose another folder."
        )
    _check_quantisation(args, model_args)
    if args.device.type == "cpu" and (wrong := vllm_without_cuda(vars(args))):
        raise RecipeError(" ".join(wrong))
    target = model_args.lora_target_modules
    if isinstance(target, str) and target.isidentifier():  # TRL unwraps a list of one, PEFT then reads it as a regex
        model_args.lora_target_modules = [target]
    eval_batch = args.per_device_eval_batch_size * state.num_processes
    samples = samples_per_problem(args)
    if eval_batch % samples:
        raise RecipeError(
            f"The evaluation batch of {eval_batch} completions (per_device_eval_batch_size times processes) cannot be "
            f"divided into groups of {samples} (num_generations_eval, or else num_generations): change one of them."
        )
    args.resume_from_checkpoint = _checkpoint(args, model_args.use_peft)
    args.eval_on_start = args.resume_from_checkpoint is None  # resumed, the history has it
    # Given to the model class by TRL's own scripts too; the trainer does not read ModelConfig.
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **_on_one_device(args, state),
        **(args.model_init_kwargs or {}),
    }


def _on_one_device(args: GRPOConfig, state: PartialState) -> dict[str, Any]:
    """Set one process's device: by default TRL and transformers would spread its model over all GPUs.

    The other GPUs are not counted either: for a model on one of several, the Trainer would use `nn.DataParallel`.
    """
    device = args.device
    if state.num_processes > 1 or device.type in ("cpu", "mps"):
        return {}
    args._n_gpu = 1
    return {"device_map": {"": str(device)}}


def _check_quantisation(args: GRPOConfig, model_args: ModelConfig) -> None:
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError("Quantised weights need bitsandbytes, which is not installed: pip install bitsandbytes")
    if model_args.load_in_4bit and model_args.dtype == "auto":
        raise RecipeError("load_in_4bit computes in the dtype, which must not be auto. Write dtype: bfloat16")
    if wrong := quantised_with_vllm(args.use_vllm, quantised=True):
        raise RecipeError(" ".join(wrong))


def _checkpoint(args: GRPOConfig, use_peft: bool) -> str | None:
    asked = args.resume_from_checkpoint
    if asked is None or str(asked).lower() == "false":
        return None
    found = asked
    if str(asked).lower() == "true":
        found = last_complete_checkpoint(args.output_dir)
        if found is None:
            raise RecipeError(
                f"There is no complete checkpoint in {args.output_dir!r} (--output_dir) to resume from: remove "
                f"--resume_from_checkpoint, or name a checkpoint's folder."
            )
    if not (Path(found) / "trainer_state.json").is_file():
        raise RecipeError(
            f"{found!r} (--resume_from_checkpoint) is not a checkpoint. Name a folder checkpoint-N of an earlier run."
        )
    has_adapter = (Path(found) / "adapter_config.json").is_file()
    if has_adapter != use_peft:
        was = "an adapter" if has_adapter else "all weights"
        raise RecipeError(f"The checkpoint {found!r} holds {was}: {'add' if has_adapter else 'remove'} --use_peft.")
    return str(found)


def samples_per_problem(args: GRPOConfig) -> int:
    """Completions that an evaluation samples per problem."""
    return int(args.num_generations_eval or args.num_generations)


def measure(args: GRPOExtConfig, *wanted: str | dict[str, Any]) -> None:
    """Add rewards with weight 0: they are measured, not trained on. If none is selected, train on the first.

    By default pass@k uses the first, too.
    """
    names = [_name(selected) for selected in args.rewards or []]
    if args.pass_at_k and args.pass_thresholds is None:
        args.pass_thresholds = {_name(wanted[0]): 1.0}
    rewards: list[Any] = list(args.rewards or [])
    for reward in wanted:
        if _name(reward) in [*names, *(name.rpartition(":")[2] for name in names)]:
            continue
        if not rewards:
            rewards.append(reward)
        elif args.reward_weights is not None:
            rewards.append(reward)
            args.reward_weights = [*args.reward_weights, 0.0]
        else:
            rewards.append({**(reward if isinstance(reward, dict) else {"name": reward}), "weight": 0.0})
    args.rewards = rewards


def _name(selected: str | dict[str, Any]) -> str:
    return str(selected["name"]) if isinstance(selected, dict) else selected


def print_task(model: str | None, embedded: Path, data: str, why: str) -> None:
    """Print which model is trained on which data, once."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{'The embedded tiny model' if model == str(embedded) else model} on {data} ({why})", flush=True)


def _near(name: str, names: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(names), n=2)
    return f" Did you mean {' or '.join(map(repr, matches))}?" if matches else ""
