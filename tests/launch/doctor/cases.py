"""Cases for the doctor's pitfalls, made of facts by hand; the settings around them are TRL's own defaults."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import peft
from trl import GRPOConfig

from trl_grpo_ext.launch.doctor import Machine
from trl_grpo_ext.launch.doctor.case import Case
from trl_grpo_ext.launch.doctor.launch import Launch
from trl_grpo_ext.launch.doctor.model import Sizes, adapters_of, on_meta, shipped_config, sizes_of

GIB = 1024**3
A100 = 80 * GIB
QWEN = shipped_config("Qwen/Qwen2.5-0.5B")


@functools.cache
def defaults() -> dict[str, Any]:
    fields = dataclasses.fields(GRPOConfig)
    return {one.name: one.default for one in fields if one.default is not dataclasses.MISSING}


@functools.cache
def qwen() -> Sizes:
    return sizes_of(on_meta(QWEN))


def lora(*targets: str) -> dict[str, Any]:
    """An adapter's config, and what PEFT makes of it in Qwen2.5-0.5B."""
    config = peft.LoraConfig(r=2, target_modules=list(targets) or "all-linear", task_type="CAUSAL_LM")
    return adapted(config)


def adapted(config: peft.LoraConfig) -> dict[str, Any]:
    return {"peft_config": config, "adapters": adapters_of(on_meta(QWEN), config)}


def case(launch: Launch | None = None, *, dtype: str = "float32", **given: Any) -> Case:
    """A run on one A100 with some facts, and training arguments by their names."""
    launch = launch or launched()
    facts = {one.name for one in dataclasses.fields(Case)}
    settings = {**defaults(), "output_dir": "out", **{name: given.pop(name) for name in given.keys() - facts}}
    settings["bf16"] = not settings["fp16"] if settings["bf16"] is None else settings["bf16"]
    batch = settings["per_device_train_batch_size"] * (settings["gradient_accumulation_steps"] or 1) * launch.processes
    args = SimpleNamespace(**{**settings, "generation_batch_size": settings["generation_batch_size"] or batch})
    good: dict[str, Any] = {"devices": (A100,) * launch.processes_per_machine, "model": "somebody/a-model"}
    return Case(launch, args=args, model_settings={"dtype": dtype}, **{"machine": Machine(), **good, **given})


def launched(engine: str = "one_process", processes: int = 1, machines: int = 1, **facts: Any) -> Launch:
    """A launch by hand."""
    env = {"WORLD_SIZE": str(processes), **facts.pop("environment", {})}
    if engine.startswith("zero"):
        env |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": engine[-1]}
    if engine.startswith("fsdp"):
        env |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": engine[4]}
        env |= {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"} if engine.endswith("hybrid") else {}
    known = {"file": "launch.yaml", "asked_processes": processes, **facts}
    return Launch("train.py", environment=env, launcher="accelerate", processes=processes, machines=machines, **known)
