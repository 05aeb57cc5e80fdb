"""What the shipped launch and run configs become: the objects of Accelerate, DeepSpeed, TRL and this package.

A command line is taken from the comment at the head of a file. `resolve` runs it up to the point where the model would
load: Accelerate's launcher prepares its environment, and in a process with that environment, as rank 0 of as many as
the launcher would start, the recipe parses its settings and Accelerate and DeepSpeed build their objects from them.
The other ranks are left out by PyTorch's own `fake` backend; engines with real ones are tests of their own. On the CPU
Accelerate makes DDP of FSDP, so FSDP's cases set the distributed type that a GPU would give.

Run as a script it imports everything once and forks a child for each case on stdin.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
LAUNCH_FILES = sorted((RECIPES / "accelerate").iterdir())
RUN_FILES = sorted((RECIPES / "configs").iterdir())
DEEPSPEED_FILES = sorted((RECIPES / "deepspeed").iterdir())


def header(path: Path) -> list[str]:
    """The comment at the head of a file, without its marks."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return [line[1:] for line in lines[:end] if not line.startswith(("#!", "#SBATCH"))]


def commands(path: Path) -> list[list[str]]:
    """The command lines in the comment at the head of a file, as a shell would split them."""
    shown = "\n".join(line.strip() for line in header(path) if line.startswith("   ")).replace("\\\n", "")
    return [shlex.split(line) for line in shown.splitlines()]


def launches(path: Path) -> list[list[str]]:
    """Those that start `accelerate launch`, from the words behind it on."""
    found = []
    for words in commands(path):
        if words[:2] != ["accelerate", "launch"]:
            words = words[next((n for n, word in enumerate(words) if "=" not in word), 0) :]
        if words[:2] == ["accelerate", "launch"]:
            found.append(words[2:])
    return found


def option(words: Sequence[str], name: str) -> str | None:
    """The word behind an option."""
    return words[words.index(name) + 1] if name in words else None


def resolve(cases: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Return what becomes of each command line, or `error` where it fails."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, __file__],
            input="".join(f"{json.dumps([name, list(words)])}\n" for name, words in cases.items()),
            cwd=ROOT,
            env=clean
            | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            | {"HF_HOME": empty, "PYTHONPATH": f"{RECIPES}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


# ------------------------------------------------------------------------------------------------- in the child process


def described(words: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    first = next(number for number, word in enumerate(words) if "=" not in word)
    os.environ.update(word.split("=", 1) for word in words[:first])
    script, environment = launched(words[first:], facts)
    os.environ.update(environment)
    recipe, args, state = parsed(script, facts)
    engine(args, state, facts)
    facts["recipe"] = {**vars(recipe), "embedded": bool(recipe.embedded)}
    return facts


def launched(words: list[str], facts: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The script's words and the environment of rank 0, by Accelerate's launcher and as torchrun adds to it."""
    from accelerate.commands import launch
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    before = dict(os.environ)
    free = [] if "--main_process_port" in words else ["--main_process_port", "0"]
    args, defaults, from_file = launch._validate_launch_command(launch.launch_command_parser().parse_args(free + words))
    command = None
    if args.use_deepspeed:  # as `launch_command` does, which then starts the processes
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        command, environment = prepare_deepspeed_cmd_env(args)
    elif args.use_fsdp or args.multi_gpu:
        environment = prepare_multi_gpu_env(args)
    else:
        _, environment = prepare_simple_launcher_cmd_env(args)
    facts["launcher"] = {
        name: value for name, value in vars(args).items() if value is None or isinstance(value, (int, str))
    }
    facts["cluster"] = {name: str(value) for name, value in vars(defaults).items()} if defaults else None
    facts["own_command"] = command
    facts["environment"] = {name: value for name, value in environment.items() if before.get(name) != value}
    processes = args.num_processes
    if processes > 1:
        here = processes // args.num_machines
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(here)}
        environment |= {"GROUP_WORLD_SIZE": str(args.num_machines), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return [args.training_script, *args.training_script_args], environment


def parsed(script: list[str], facts: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The settings, through the recipe's own parser, defaults and checks."""
    import runpy

    import torch
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        torch.distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    sys.argv = script
    recipe, args, model_args = runpy.run_path(script[0])["parse"]()
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    state = PartialState()
    from common.settings import asked_for, check_setup

    check_setup(args, model_args, state, asked_for(model_args, recipe.engine, recipe.processes))
    facts["training"] = {name: value for name, value in vars(args).items() if isinstance(value, (int, float, str))}
    facts["world"] = state.num_processes
    return recipe, args, state


def engine(args: Any, state: Any, facts: dict[str, Any]) -> None:
    """What `Trainer` makes of the settings: the `Accelerator`, its plugins, and DeepSpeed's configuration."""
    import torch
    from accelerate import Accelerator
    from transformers.integrations.deepspeed import propagate_args_to_deepspeed

    accelerator = Accelerator(mixed_precision=args.mixed_precision, deepspeed_plugin=args.deepspeed_plugin)
    facts["distributed_type"] = str(accelerator.distributed_type.value)
    facts["mixed_precision"] = accelerator.mixed_precision
    if accelerator.state.deepspeed_plugin is not None:
        import deepspeed
        from deepspeed.runtime.config import DeepSpeedConfig

        propagate_args_to_deepspeed(accelerator, args)
        hf_config = accelerator.state.deepspeed_plugin.hf_ds_config
        hf_config.trainer_config_finalize(args, tiny_model(64), args.max_steps)
        facts["deepspeed"] = hf_config.config
        deepspeed.init_distributed(dist_init_required=False, verbose=False)  # joins what is there, as its engine does
        config = DeepSpeedConfig({k: v for k, v in hf_config.config.items() if k != "steps_per_print"})
        zero = config.zero_config
        facts["resolved"] = {
            "world": config.world_size,
            "stage": int(zero.stage),
            "micro_batch": config.train_micro_batch_size_per_gpu,
            "accumulation": config.gradient_accumulation_steps,
            "batch": config.train_batch_size,
            "clipping": config.gradient_clipping,
            "bf16": config.bfloat16_config.enabled,
            "fp16": config.float16_config.enabled,
            "hpz": zero.zero_hpz_partition_size,
            "gather_on_save": zero.gather_16bit_weights_on_model_save,
            "offload_optimizer": zero.offload_optimizer and str(zero.offload_optimizer.device),
            "offload_param": zero.offload_param and str(zero.offload_param.device),
            "init": accelerator.state.deepspeed_plugin.zero3_init_flag,
        }
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        plugin = accelerator.state.fsdp_plugin
        policy = plugin.mixed_precision_policy
        facts["fsdp"] = {
            "version": plugin.fsdp_version,
            "reshard_after_forward": plugin.reshard_after_forward,
            "wrap": getattr(plugin.auto_wrap_policy, "__name__", None),
            "state_dict": plugin.state_dict_type.name,
            "efficient_loading": plugin.cpu_ram_efficient_loading,
            "activation_checkpointing": plugin.activation_checkpointing,
            "param_dtype": str(policy.param_dtype) if policy else None,
        }
        model = tiny_model(64).to(torch.bfloat16)
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
        facts["weight"] = {
            "placements": [str(placement) for placement in weight.placements],
            "whole": list(weight.shape),
            "here": list(weight.to_local().shape),
            "dtype": str(weight.dtype),
        }
    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is not None:
        both = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]  # what `fully_shard` is given
        facts["mesh"] = {"names": list(both.mesh_dim_names), "shape": list(both.shape), "ranks": both.mesh.tolist()}


def tiny_model(hidden: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(hidden_size=hidden, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    )


def main() -> None:
    import importlib
    import runpy

    for module in (
        *("accelerate.commands.launch", "deepspeed.runtime.config", "torch.distributed.fsdp"),
        *("torch.testing._internal.distributed.fake_pg", "transformers.models.llama.modeling_llama", "trl"),
    ):
        importlib.import_module(module)
    runpy.run_path(str(RECIPES / "gsm8k_grpo.py"))  # its imports; `main` is not called

    for line in sys.stdin:
        name, words = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)  # what libraries print
            try:
                facts = described(words)
            except BaseException as error:
                facts = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            with os.fdopen(writer, "w") as pipe:
                json.dump([name, facts], pipe, default=str)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            print(pipe.read(), flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
