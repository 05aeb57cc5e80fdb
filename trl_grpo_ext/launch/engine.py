"""The engine asked for is the engine that runs, or the run stops.

Several things silently turn DeepSpeed, FSDP or DDP into another engine (docs/launching.md lists them). Before weights
load, `check_launch` compares the launcher's request, which is in the environment, with what Accelerate made of it. When
training begins, `EngineCheck` compares the wrapped model with it. Facts are of Accelerate 1.15 and transformers 5.23.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, gather_object, str_to_bool
from transformers import TrainerCallback

from ..errors import EngineError

__all__ = ["ENGINES", "EngineCheck", "ExpectedRun", "check_launch", "launched_engine"]

ENGINES = ("one_process", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
_SHARDED = ("zero3", "fsdp1", "fsdp2")  # engines in which no rank holds all parameters


@dataclass(frozen=True)
class ExpectedRun:
    """What a run is meant to be; None leaves a question open."""

    engine: str | None = None  # one of `ENGINES`
    processes: int | None = None  # of the whole job, all nodes together
    dtype: str | None = None  # of the loaded floating-point weights, such as `bfloat16`
    bits: int | None = None  # 4 or 8 if bitsandbytes should quantise the base model's linear layers, else 0


def launched_engine(environment: Mapping[str, str] | None = None, args: Any = None) -> str | None:
    """The engine that launcher or training arguments ask for; None if it is the arguments' `fsdp`.

    An `EngineError` if DeepSpeed's file cannot be read.
    """
    env = os.environ if environment is None else environment
    deepspeed = getattr(args, "deepspeed", None)
    if str_to_bool(env.get("ACCELERATE_USE_DEEPSPEED", "false")) or deepspeed is not None:
        file = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") if deepspeed is None else deepspeed
        if not file or str(file).lower() == "none":
            return f"zero{env.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
        try:  # as DeepSpeed reads it, whatever it is called
            settings = file if isinstance(file, Mapping) else json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EngineError(f"DeepSpeed's configuration {str(file)!r} cannot be read: {error}") from error
        return f"zero{settings.get('zero_optimization', {}).get('stage', 0)}"
    if str_to_bool(env.get("ACCELERATE_USE_FSDP", "false")):
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
    the run configuration asks for; the others are as for `launched_engine`.

    Raises:
        EngineError: One sentence for each difference, and what to do.
    """
    env = os.environ if environment is None else environment
    expected = expected or ExpectedRun()
    engine = launched_engine(env, args)
    found = []
    processes = state.num_processes
    started = int(env.get("WORLD_SIZE", "1"))
    nodes = int(env.get("GROUP_WORLD_SIZE", "1"))
    slurm_nodes = int(env.get("SLURM_STEP_NUM_NODES", "1"))
    if started != processes:
        what = f"The launcher started {started} processes, but each would run alone, as {processes}"
        found.append(f"{what}. To run on the CPU, pass --use_cpu to this script, not in the launch file alone.")
    elif slurm_nodes > nodes and "GROUP_WORLD_SIZE" in env:
        what = f"Slurm runs this step on {slurm_nodes} nodes, but they are {slurm_nodes} jobs of {nodes} node(s) each"
        give = "--num_machines, its own --machine_rank and the first's address as --main_process_ip"
        found.append(f"{what}. Give each node {give}.")
    if engine is not None and expected.engine not in (None, engine):
        found.append(f"The settings were made for engine {expected.engine}, but the launch is {engine}: change one.")
    if expected.processes not in (None, processes):
        found.append(f"The settings were made for `processes: {expected.processes}`, but the launch has {processes}.")
    divided = engine is not None and engine.startswith(("zero", "fsdp"))
    apart = engine in ("fsdp1", "fsdp2") and state.distributed_type in (DistributedType.MULTI_CPU, DistributedType.NO)
    if apart or (divided and str_to_bool(env.get("ACCELERATE_USE_CPU", "false"))):
        what = "one process" if processes == 1 else "DDP"
        why = "ACCELERATE_USE_CPU=true (use_cpu in the launch file), or FSDP on the CPU or with one process"
        found.append(f"The launcher was asked for {engine}, but Accelerate runs {what} in its place, because of {why}.")
    _raise(found)


class EngineCheck(TrainerCallback):
    """Check a trainer against the request when training begins, including what the environment asks of the launcher.
    The ranks exchange their findings, so all stop if one must. The first backward pass has to leave a gradient.

    Made before the training, because the type of the weights is read here. `expected` is what the run should be. When
    training begins, `facts` is what runs, a mapping for `metrics.json`.

    Raises:
        EngineError: At once, if nothing is trained. In `trainer.train`: one sentence per difference.
    """

    def __init__(self, trainer: Any, expected: ExpectedRun | None = None) -> None:
        expected = expected or ExpectedRun()
        self.trainer = trainer
        self.facts: dict[str, Any] = {}
        self.expected = replace(expected, engine=expected.engine or launched_engine(args=trainer.args))
        self._dtype = _dtype_of(trainer.model)
        self._gradients_seen = False
        if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
            what = "No parameter of the model is trained: all are frozen, as in an adapter loaded for inference"
            raise EngineError(f"{what}. Name its base model and resume the adapter by resume_from_checkpoint.")
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare, on all ranks."""
        self.facts = _running(self.trainer, self._dtype)
        _raise(gather_object(differences(self.expected, self.facts)))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Once: an adapter above layers without a backward pass silently trains nothing."""
        if self._gradients_seen or self.facts["engine"].startswith("zero"):  # DeepSpeed keeps gradients to itself
            return
        self._gradients_seen = True
        trained = [parameter for parameter in self.trainer.model.parameters() if parameter.requires_grad]
        problem = f"None of the {len(trained)} trained parameters got a gradient from the first backward pass."
        _raise(gather_object([problem] if all(parameter.grad is None for parameter in trained) else []))


def differences(expected: ExpectedRun, run: Mapping[str, Any]) -> list[str]:
    """A sentence for each difference between the facts of a run and the request."""
    found = []
    engine = run["engine"]
    processes = run["processes"]
    if expected.engine not in (None, engine) and engine in (*ENGINES, "apart"):
        what = f"{processes} processes that train apart" if engine == "apart" else engine
        found.append(f"The engine asked for is {expected.engine}; what runs is {what} (a {run['wrapper']}).")
    if expected.processes not in (None, processes):
        found.append(f"{expected.processes} process(es) were requested; {processes} run.")
    # Half way between the even share and everything: uneven rows and small layers kept whole stay far below it.
    all_of_it = run["parameters"]
    if engine in _SHARDED and processes > 1 and run["parameters_here"] > (all_of_it + all_of_it / processes) / 2:
        what = f"{engine} was to shard the parameters over {processes} processes"
        held = f"this one holds {run['parameters_here']:,} of {all_of_it:,}"
        advice = "With 4-bit weights set bnb_4bit_quant_storage to the dtype"
        if engine == "zero3":
            advice += "; for a small model lower stage3_param_persistence_threshold"
        found.append(f"{what}, but {held}. {advice}.")
    if expected.bits not in (None, run["bits"]):
        got = f"{run['quantised_layers']} layers of {run['bits']} bits"
        found.append(f"{expected.bits}-bit weights were asked for (0: not quantised); the model has {got}.")
    if expected.dtype not in (None, "auto", run["dtype"]):
        found.append(f"Weights in {expected.dtype} were asked for (dtype); those of the model are {run['dtype']}.")
    return found


def _running(trainer: Any, dtype: str) -> dict[str, Any]:
    """What a trainer is whose model is wrapped, as this rank sees it."""
    state = trainer.accelerator.state
    parameters = list(trainer.model.parameters())
    kinds = [type(module) for module in trainer.model.modules()]
    names = [kind.__name__ for kind in kinds if kind.__module__.startswith("bitsandbytes")]  # PEFT has namesakes
    layers = {4: names.count("Linear4bit"), 8: names.count("Linear8bitLt")}
    bits = next((bits for bits in layers if layers[bits]), 0)
    return {
        "engine": _engine_of(trainer.model_wrapped, state),
        "processes": state.num_processes,
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "wrapper": type(trainer.model_wrapped).__name__,
        "parameters": sum(map(_elements, parameters)),  # two 4-bit weights in a byte count once
        "parameters_here": sum(map(_elements_here, parameters)),
        "trained": sum(_elements(parameter) for parameter in parameters if parameter.requires_grad),
        "bits": bits,
        "quantised_layers": layers.get(bits, 0),
        "dtype": dtype,
        "device": ", ".join(sorted({str(parameter.device) for parameter in parameters})),
    }


def _engine_of(wrapped: Any, state: Any) -> str:
    """One of `ENGINES`; `apart` is several processes that each train alone, and others have Accelerate's name."""
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
    kind = str(state.distributed_type.value)
    parallel = any(hasattr(parameter, "device_mesh") for parameter in wrapped.parameters())
    return "apart" if kind.startswith(("NO", "MULTI_")) and not parallel else kind.lower()


def _elements(parameter: Any) -> int:
    """Elements of the whole parameter, wherever its parts are: ZeRO-3 leaves an empty tensor, FSDP2 a `DTensor`."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _elements_here(parameter: Any) -> int:
    if hasattr(parameter, "ds_numel"):
        persistent = getattr(parameter, "ds_persist", False)  # gathered at its first use, and kept
        return int(parameter.ds_numel if persistent else parameter.ds_tensor.numel())
    return int((parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel())


def _dtype_of(model: torch.nn.Module) -> str:
    """The type of most floating-point elements that are not an adapter's; quantised ones don't count."""
    elements: dict[torch.dtype, int] = {}
    for name, parameter in model.named_parameters():
        quantised = type(parameter).__name__ in ("Params4bit", "Int8Params")
        if parameter.dtype.is_floating_point and not quantised and "lora_" not in name:
            elements[parameter.dtype] = elements.get(parameter.dtype, 0) + _elements(parameter)
    return str(max(elements, key=lambda dtype: elements[dtype])).removeprefix("torch.") if elements else "none"


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise EngineError(" ".join(dict.fromkeys(problems)))
