"""The engine asked for is the engine that runs, or the run stops.

Several things silently turn DeepSpeed, FSDP or DDP into another engine (docs/launching.md lists them). Before weights
load, `check_launch` compares the launcher's request, which is in the environment, with what Accelerate made of it. When
training begins, `EngineCheck` compares the wrapped model with it. Facts are of Accelerate 1.15 and transformers 5.23.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, gather_object
from transformers import TrainerCallback

from ..errors import EngineError

__all__ = ["ENGINES", "EngineCheck", "ExpectedRun", "check_launch", "launched_engine"]

ENGINES = ("one_process", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
_SHARDED = ("zero3", "fsdp1", "fsdp2")
"""Engines in which no rank holds all parameters."""


@dataclass(frozen=True)
class ExpectedRun:
    """What a run is meant to be; None leaves a question open."""

    engine: str | None = None  # one of `ENGINES`
    processes: int | None = None  # of the whole job, all nodes together
    dtype: str | None = None  # of the loaded floating-point weights, such as `bfloat16`
    bits: int | None = None  # 4 or 8 if bitsandbytes should quantise the base model's linear layers, else 0


@dataclass(frozen=True)
class Running:
    """What a run is, as one rank sees it."""

    engine: str  # also `apart`: several processes that each train alone; what is not checked has Accelerate's name
    processes: int
    backend: str | None
    wrapper: str
    parameters: int  # stored elements: two 4-bit weights in a byte count once
    parameters_here: int  # those that this rank stores
    trained: int
    bits: int
    quantised_layers: int
    dtype: str  # of the loaded model, before the engine wrapped it
    device: str  # several, with commas, if the model is split over them


def launched_engine(environment: Mapping[str, str] | None = None, args: Any = None) -> str | None:
    """The engine requested from the launcher, or by the `deepspeed` and `fsdp` of the training arguments.

    None if the script itself asks for FSDP; an `EngineError` if DeepSpeed's file cannot be read.
    """
    env = os.environ if environment is None else environment
    deepspeed = getattr(args, "deepspeed", None)
    if _true(env, "ACCELERATE_USE_DEEPSPEED") or deepspeed is not None:
        return f"zero{_stage(env, deepspeed)}"
    if _true(env, "ACCELERATE_USE_FSDP"):
        return f"fsdp{env.get('FSDP_VERSION', '1')}"
    if getattr(args, "fsdp", None):
        return None
    return "ddp" if int(env.get("WORLD_SIZE", "1")) > 1 else "one_process"


def check_launch(
    state: PartialState,
    expected: ExpectedRun | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    args: Any = None,
) -> None:
    """Stop if Accelerate made something else of the launch than was requested.

    `state` is Accelerate's, after the training arguments were constructed (they may choose the CPU); `expected` is what
    the run configuration asks for, if anything; the others are as for `launched_engine`.

    Raises:
        EngineError: One sentence for each difference, and what to do.
    """
    env = os.environ if environment is None else environment
    engine = launched_engine(env, args)
    expected = expected or ExpectedRun()
    different = []
    if engine is not None and expected.engine not in (None, engine):
        different.append(
            f"The settings were made for engine {expected.engine}, but the launch is {engine}. Choose another file "
            "after --config_file, or change `engine`."
        )
    if expected.processes not in (None, state.num_processes):
        different.append(
            f"The settings were made for `processes: {expected.processes}`, but the launch has {state.num_processes}. "
            f"Pass --num_processes {expected.processes}, or change `processes` and the batch sizes."
        )
    _raise([*_launcher_problems(state, env), *different, *_engine_problems(state, env, engine)])


def _launcher_problems(state: PartialState, env: Mapping[str, str]) -> Iterator[str]:
    started = int(env.get("WORLD_SIZE", "1"))
    nodes = int(env.get("GROUP_WORLD_SIZE", "1"))
    slurm_nodes = int(env.get("SLURM_STEP_NUM_NODES", "1"))
    if started != state.num_processes:
        yield (
            f"The launcher started {started} processes, but each would run alone, as {state.num_processes}. To run "
            f"on the CPU, pass --use_cpu to this script; use_cpu in the launch file is not enough."
        )
    elif slurm_nodes > nodes and state.num_processes > 0 and "GROUP_WORLD_SIZE" in env:
        yield (
            f"Slurm runs this step on {slurm_nodes} nodes, but they are {slurm_nodes} jobs of {nodes} node(s) each. "
            "Give each node's launcher --num_machines, its own --machine_rank and the first node's --main_process_ip."
        )


def _engine_problems(state: PartialState, env: Mapping[str, str], engine: str | None) -> Iterator[str]:
    if engine is None or engine in ("one_process", "ddp"):
        return
    if _true(env, "ACCELERATE_USE_CPU"):
        instead = "one process" if state.num_processes == 1 else "DDP"
        yield (
            f"The launcher was asked to start {engine}, but ACCELERATE_USE_CPU=true (the environment, or use_cpu in "
            f"the launcher's file) makes Accelerate run {instead} on the CPU. Remove it."
        )
    elif engine.startswith("fsdp") and state.num_processes == 1:
        yield f"The launcher was asked to start {engine}, which shards nothing with one process: start two or more."
    elif engine.startswith("fsdp") and state.distributed_type in (DistributedType.MULTI_CPU, DistributedType.NO):
        yield (
            f"The launcher was asked to start {engine}, but on the CPU Accelerate runs DDP in its place. Run it on "
            "GPUs, or choose recipes/accelerate/cpu_2_processes.yaml for DDP on the CPU."
        )
    elif engine.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        yield f"The launcher was asked to start {engine}, but DeepSpeed is not installed: pip install deepspeed."


def differences(expected: ExpectedRun, run: Running, kept_whole: list[str] | None = None) -> list[str]:
    """A sentence for each difference between a run and the request; `kept_whole` are unsharded parameters' names."""
    found = []
    if expected.engine not in (None, run.engine) and run.engine in (*ENGINES, "apart"):
        what = f"{run.processes} processes that train apart" if run.engine == "apart" else run.engine
        found.append(f"The engine asked for is {expected.engine}; what runs is {what} (the model is a {run.wrapper}).")
    if expected.processes not in (None, run.processes):
        found.append(f"{expected.processes} process(es) were requested; {run.processes} run.")
    if run.engine in ("one_process", "ddp") and ", " in run.device:
        found.append(
            f"One process holds the model on several devices, {run.device}, and only one works at a time (device_map "
            "auto, TRL's default). Set CUDA_VISIBLE_DEVICES to one of them, or launch a process for each."
        )
    # Half way between the even share and everything: uneven rows and small layers kept whole stay far below it.
    even = run.parameters / max(run.processes, 1)
    if run.engine in _SHARDED and run.processes > 1 and run.parameters_here > (run.parameters + even) / 2:
        largest = f", {', '.join((kept_whole or [])[:3])} among them" if kept_whole else ""
        found.append(
            f"{run.engine} was to shard the parameters over {run.processes} processes, but this one holds "
            f"{run.parameters_here:,} of {run.parameters:,}{largest}. With 4-bit weights set bnb_4bit_quant_storage to "
            "the dtype; with ZeRO-3 a model this small is below stage3_param_persistence_threshold."
        )
    if expected.bits not in (None, run.bits):
        wanted = f"{expected.bits}-bit weights" if expected.bits else "weights that are not quantised"
        got = f"{run.quantised_layers} layers of {run.bits} bits" if run.bits else "no quantised layer"
        found.append(f"{wanted} were asked for (load_in_4bit, load_in_8bit); the model has {got}.")
    if expected.dtype not in (None, "auto", run.dtype):
        found.append(f"Weights in {expected.dtype} were asked for (dtype); those of the model are {run.dtype}.")
    return found


class EngineCheck(TrainerCallback):
    """Check a trainer against the request when training begins, including what the environment asks of the launcher.
    The ranks exchange their findings, so all stop if one must. After the first backward pass it also checks that
    something has a gradient.

    The trainer is not yet training; the type of its weights is read here. `expected` is what the run should be.
    When training begins, `facts` is what runs, a mapping for `metrics.json`.

    Raises:
        EngineError: At once, if nothing is trained. In `trainer.train`: one sentence per difference.
    """

    def __init__(self, trainer: Any, expected: ExpectedRun | None = None) -> None:
        expected = expected or ExpectedRun()
        self.trainer = trainer
        self.facts: dict[str, Any] = {}
        self.expected = replace(expected, engine=expected.engine or launched_engine(args=trainer.args))
        self._dtype = _dtype_of(trainer.model)
        if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
            raise EngineError(
                "No parameter of the model is trained: all are frozen, as in an adapter loaded for inference. Name its "
                "base model and continue the adapter by resume_from_checkpoint, or merge it first."
            )
        self._gradients_seen = False
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare, on all ranks."""
        run = running(self.trainer, self._dtype)
        named = self.trainer.model.named_parameters()
        whole = sorted(((_elements(p), name) for name, p in named if _elements_here(p) == _elements(p)), reverse=True)
        _raise(gather_object(differences(self.expected, run, [name for _, name in whole])))
        self.facts = asdict(run)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Once: an adapter above layers without a backward pass silently trains nothing."""
        if self._gradients_seen or self.facts["engine"].startswith("zero"):  # DeepSpeed keeps gradients to itself
            return
        self._gradients_seen = True
        trained = [parameter for parameter in self.trainer.model.parameters() if parameter.requires_grad]
        problem = f"None of the {len(trained)} trained parameters got a gradient from the first backward pass."
        _raise(gather_object([problem] if all(parameter.grad is None for parameter in trained) else []))


def running(trainer: Any, dtype: str) -> Running:
    """Describe a trainer whose model is wrapped, as in `on_train_begin`; `dtype` is that of the loaded model."""
    state = trainer.accelerator.state
    wrapped = trainer.model_wrapped
    parameters = list(trainer.model.parameters())
    bits, layers = _quantised(trainer.model)
    return Running(
        engine=_engine_of(wrapped, state),
        processes=state.num_processes,
        backend=torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        wrapper=type(wrapped).__name__,
        parameters=sum(map(_elements, parameters)),
        parameters_here=sum(map(_elements_here, parameters)),
        trained=sum(_elements(parameter) for parameter in parameters if parameter.requires_grad),
        bits=bits,
        quantised_layers=layers,
        dtype=dtype,
        device=", ".join(_devices(trainer.model)),
    )


def _true(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "false").lower() in ("true", "1", "yes", "y", "on", "t")


def _stage(env: Mapping[str, str], deepspeed: Any) -> int:
    file = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") if deepspeed is None else deepspeed
    if not isinstance(file, Mapping):
        if not file or str(file).lower() == "none":
            return int(env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
        try:
            file = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EngineError(f"DeepSpeed's configuration {str(file)!r} cannot be read: {error}") from error
    return int(file.get("zero_optimization", {}).get("stage", 0))


def _engine_of(wrapped: Any, state: Any) -> str:
    if hasattr(wrapped, "zero_optimization_stage"):
        return f"zero{wrapped.zero_optimization_stage()}"
    if isinstance(wrapped, torch.distributed.fsdp.FSDPModule):
        return "fsdp2"
    if isinstance(wrapped, torch.distributed.fsdp.FullyShardedDataParallel):
        return "fsdp1"
    if isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
        return "ddp"
    if state.num_processes == 1:
        return "one_process"
    parallel = any(hasattr(parameter, "device_mesh") for parameter in wrapped.parameters())
    plain = state.distributed_type is DistributedType.NO or state.distributed_type.value.startswith("MULTI_")
    return "apart" if plain and not parallel else str(state.distributed_type.value).lower()


def _devices(model: torch.nn.Module) -> list[str]:
    """Where the weights are; for offloaded ones (on meta) the device map says where."""
    found = {str(parameter.device) for parameter in model.parameters()}
    places = {place for module in model.modules() for place in getattr(module, "hf_device_map", {}).values()}
    offloaded = places & {"cpu", "disk"}
    return sorted((found - {"meta"} if offloaded else found) | offloaded)


def _elements(parameter: Any) -> int:
    """Elements of the whole parameter, wherever its parts are: ZeRO-3 leaves an empty tensor, FSDP2 a `DTensor`."""
    return int(parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel())


def _elements_here(parameter: Any) -> int:
    if hasattr(parameter, "ds_numel"):
        persistent = getattr(parameter, "ds_persist", False)  # gathered at its first use, and kept
        return int(parameter.ds_numel if persistent else parameter.ds_tensor.numel())
    return int((parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel())


def _quantised(model: torch.nn.Module) -> tuple[int, int]:
    """Bits and number of the layers of bitsandbytes, recognised by their names so that it need not be installed."""
    kinds = [type(module) for module in model.modules()]
    names = [kind.__name__ for kind in kinds if kind.__module__.startswith("bitsandbytes")]  # PEFT has namesakes
    found = {bits: names.count(name) for bits, name in ((4, "Linear4bit"), (8, "Linear8bitLt"))}
    return next(((bits, count) for bits, count in found.items() if count), (0, 0))


def _dtype_of(model: torch.nn.Module) -> str:
    """The type of most floating-point elements that are not an adapter's; quantised ones don't count."""
    elements: dict[torch.dtype, int] = {}
    for name, parameter in model.named_parameters():
        quantised = type(parameter).__name__ in ("Params4bit", "Int8Params")
        if parameter.dtype.is_floating_point and not quantised and "lora_" not in name:
            elements[parameter.dtype] = elements.get(parameter.dtype, 0) + _elements(parameter)
    return str(max(elements, key=lambda dtype: elements[dtype])).removeprefix("torch.") if elements else "none"


def _raise(problems: Iterable[str]) -> None:
    """Raise all of them in one error, without duplicates."""
    if different := list(dict.fromkeys(problems)):
        raise EngineError(" ".join(different))
