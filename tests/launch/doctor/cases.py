"""Cases for the doctor's rules, made of facts by hand; the settings around them are TRL's own defaults."""

import functools
from dataclasses import replace
from typing import Any

import peft
from transformers import Qwen2Config

from trl_grpo_ext.launch.doctor.case import Case, Plugins
from trl_grpo_ext.launch.doctor.environment import Environment
from trl_grpo_ext.launch.doctor.launch_file import LaunchPlan
from trl_grpo_ext.launch.doctor.model import Adapters, Sizes, adapters_of, on_meta, sizes_of
from trl_grpo_ext.launch.doctor.run_file import RunPlan, Script, build_configs, read_run

GIB = 1024**3
A100 = 80 * GIB
RECIPE = Script("recipe.py", frozenset({"check_setup"}))

TESTED = {
    "trl": "1.16.0",
    "transformers": "5.23.0",
    "torch": "2.13.0",
    "deepspeed": "0.19.8",
    "vllm": "0.30.0",
    "liger-kernel": "0.6.0",
    "flash-attn": "2.8.0",
}


QWEN = Qwen2Config(  # Qwen2.5-0.5B
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151_936,
    tie_word_embeddings=True,
    max_position_embeddings=32_768,
)


@functools.cache
def defaults() -> RunPlan:
    return read_run([])


@functools.cache
def qwen() -> Sizes:
    return sizes_of(on_meta(QWEN))


def adapters(*targets: str) -> Adapters:
    config = peft.LoraConfig(r=2, target_modules=list(targets), task_type="CAUSAL_LM")
    return adapters_of(on_meta(QWEN), config)


def machine(*devices: int, versions: dict[str, str | None] | None = None, **facts: Any) -> Environment:
    """A machine on which nothing is wrong, but for what is said."""
    good: dict[str, Any] = {
        "versions": {**TESTED, **(versions or {})},
        "devices": devices,
        "torch_build": "CUDA 12.8",
        "disk_free": 1000 * GIB,
        "output_dir": "out",
    }
    return Environment(**good | facts)


def case(
    launch: LaunchPlan | None = None,
    environment: Environment | None = None,
    *,
    own: dict[str, Any] | None = None,
    script: Script | None = None,
    built: bool = False,
    sizes: Sizes | None = None,
    adapters: Adapters | None = None,
    plugins: Plugins | None = None,
    **settings: Any,
) -> Case:
    """A run on one A100 with some settings; `built` makes the real configuration objects too."""
    plan = defaults()
    unknown = settings.keys() - plan.settings.keys()
    assert not unknown, f"no such settings: {unknown}"
    rewards = {"rewards": ["gsm8k_accuracy"]}
    run = replace(plan, settings={**plan.settings, **rewards, **settings}, own=own or {}, script=script)
    launch = launch or LaunchPlan()
    if built:
        run = build_configs(run, processes=launch.processes)
        assert run.config is not None, run.problems
    environment = environment or machine(A100)
    return Case(launch, run, environment, sizes, adapters, plugins or Plugins())


def launched(engine: str = "one_process", processes: int = 1, **facts: Any) -> LaunchPlan:
    """A launch file's plan, by hand."""
    kinds = {"o": "NO", "d": "MULTI_GPU", "z": "DEEPSPEED", "f": "FSDP"}
    source = facts.pop("source", "launch.yaml")
    kind = facts.pop("distributed_type", kinds[engine[0]])
    return LaunchPlan(source=source, engine=engine, processes=processes, distributed_type=kind, **facts)  # type: ignore[arg-type]
