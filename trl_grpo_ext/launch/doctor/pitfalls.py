"""The pitfalls that the doctor knows: what changes the engine silently, crashes later, or trains nothing.

What the launcher, TRL's parser or the trainer refuses by itself at its start is none: they have said it by then. Shares
of changed weights were measured on a model of 88,000 parameters.
"""

import difflib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...errors import EngineError
from ...guard.untrusted import one_line
from ...trainer.upstream import contract
from ..engine import check_launch
from ..ranges import quantised_with_vllm, vllm_without_cuda, wrong_values
from . import Problem
from .case import Case

HARDLY_MOVES_BELOW = 1e-5
"""Below this learning rate, bfloat16's 8 bits lose most updates of weights of ordinary size."""
MOVABLE = 0.9
"""Share of an adapter's entries that a step must be able to change."""
HIDDEN = 4_096
"""Assumed width of a model of unknown sizes."""


def problems_of(case: Case) -> list[Problem]:
    """The problems that the pitfalls amount to."""
    found = [*_of_launch(case), *_of_weights(case), *_of_adapters(case), *_of_training(case)]
    return [replace(one, message=one_line(one.message, 900), fix=one_line(one.fix, 600)) for one in found]


def _of_launch(case: Case) -> Iterator[Problem]:
    launch = case.launch
    gpus = len(case.devices)
    if not case.on_cpu and 0 < gpus < launch.processes_per_machine:
        yield Problem(
            "error",
            "device",
            f"{launch.name} starts {launch.processes_per_machine} processes on each machine, which has {gpus} GPU(s).",
            "Launch fewer processes with --num_processes, or make more GPUs visible.",
        )
    machines = case.machine.machines
    if machines is not None and machines < launch.machines:
        what = f"{launch.name} waits for {launch.machines} machines, and there are {machines}."
        yield Problem("error", "nodes", what, f"Pass --num_machines {machines}.")
    # TRL loads with device_map="auto" there, and then the Trainer takes it for model parallelism.
    says_nothing = case.sizes is not None and not launch.settings_alone and "device_map" not in case.model_settings
    if case.engine == "one_process" and not case.on_cpu and says_nothing and gpus > 1:
        yield Problem(
            "warning",
            "device",
            f"One process sees {gpus} GPUs: TRL spreads the model over them (device_map auto), and only one works at a "
            "time.",
            "Set CUDA_VISIBLE_DEVICES=0, or launch a process for each GPU.",
        )
    if (state := getattr(case.args, "distributed_state", None)) is not None:  # the real one of this rank
        try:
            check_launch(state, environment={**os.environ, **launch.environment}, args=case.args)
        except EngineError as error:
            yield Problem("error", "engine", str(error))
    # Without mpirun the launcher starts one process for MULTI_CPU, for "NO" and for use_cpu.
    if launch.processes < launch.asked_processes:
        yield Problem(
            "error",
            "launch",
            f"{launch.name} asks for {launch.asked_processes} processes, and the launcher starts {launch.processes}, "
            "silently.",
            "For DDP write distributed_type: MULTI_GPU (on CPUs too, with use_cpu: true for the script and "
            "use_cpu: false in the file); else num_processes: 1.",
        )
    # A file says `machine_rank: 0` to every machine that reads it.
    if launch.machines > 1 and not launch.ranked and launch.rendezvous == "static":
        yield Problem(
            "warning",
            "nodes",
            f"Every machine that starts with {launch.name} is one and the same of {launch.machines}: no job forms.",
            "Give each launcher its own --machine_rank ($SLURM_NODEID under Slurm) and all of them --main_process_ip; "
            "or pass --rdzv_backend c10d.",
        )


def _of_weights(case: Case) -> Iterator[Problem]:
    if case.bits and not case.uses_adapters:
        what = f"{case.bits}-bit weights without adapters: quantised weights cannot be trained."
        yield Problem("error", "qlora", what, "Add use_peft: true, or peft_config in Python.")
    if (found := quantised_with_vllm(_for_ranges(case))) is not None:
        yield Problem("error", "qlora+vllm", *found)
    # Accelerate leaves what is no floating-point storage out of the sharding, with one warning.
    given = getattr(case.quantisation, "bnb_4bit_quant_storage", None)
    storage = "uint8 (the default)" if given is None else str(given).removeprefix("torch.")
    if case.bits == 4 and case.is_fsdp and storage != case.dtype:
        yield Problem(
            "error",
            "qlora+fsdp",
            f"bnb_4bit_quant_storage is {storage} and dtype {case.dtype}: under FSDP the 4-bit weights stay whole on "
            "every GPU, with only a warning.",
            f"Write bnb_4bit_quant_storage: {case.dtype}.",
        )
    in_half = case.model and case.engine in ("one_process", "ddp") and case.dtype in ("bfloat16", "auto")
    if in_half and not case.uses_adapters and case["learning_rate"] < HARDLY_MOVES_BELOW:
        yield Problem(
            "warning",
            "precision",
            f"Weights in {case.dtype} (auto is mostly bfloat16) hardly move at learning_rate "
            f"{case['learning_rate']:g} without master weights: 1.9 % of a projection changed in 20 steps at 1e-6, "
            "against 100 % in float32.",
            "Write dtype: float32 and bf16: true; or train with ZeRO or FSDP2.",
        )
    # TRL casts QLoRA's adapters to bfloat16, Accelerate leaves them so under FSDP2, and the recipes cast them back.
    in_bfloat16 = case.bits and case.uses_adapters and not case.is_zero and not case.keeps_adapters_in_float32
    if in_bfloat16 and (share := _movable(case)) < MOVABLE:
        yield Problem(
            "warning",
            "qlora",
            f"TRL casts QLoRA's adapters to bfloat16, where a step of learning_rate {case['learning_rate']:g} is lost "
            f"on most weights: it can change {share:.0%} of lora_A's entries.",
            "Cast them back to float32 before training, as the recipes do; or raise learning_rate (1e-4 is enough).",
        )
    longest = case["max_completion_length"] or 0
    if case.sizes is not None and 0 < case.sizes.context <= longest:
        yield Problem(
            "error",
            "length",
            f"max_completion_length {longest} leaves no room for a prompt: the model has {case.sizes.context} "
            "positions.",
            f"Keep it well under {case.sizes.context}.",
        )


def _movable(case: Case) -> float:
    """The share of lora_A's entries that one step of Adam, at most the learning rate, can change in bfloat16.

    They start uniform within 1 / sqrt(width of the layer's input); bfloat16 rounds in steps of 1/256 of the next power
    of two above a number, and half of that is lost.
    """
    reach = 512 * float(case["learning_rate"])
    width = HIDDEN if case.sizes is None else case.sizes.hidden
    return min(1.0, 2.0 ** math.floor(math.log2(reach)) * math.sqrt(width)) if reach > 0 else 0.0


def _of_adapters(case: Case) -> Iterator[Problem]:
    """What PEFT makes of the targets: it silently drops a missing one if another matches."""
    found = case.adapters
    if found is None or not (found.refusal or found.missing):
        return
    targets = getattr(case.peft_config, "target_modules", None) or []
    if found.refusal and isinstance(targets, str) and targets.isidentifier():  # TRL unwraps a list of one
        yield Problem(
            "error",
            "lora",
            f"lora_target_modules with {targets!r} alone becomes a text, which PEFT reads as a regular expression and "
            "finds nothing.",
            rf"Write lora_target_modules: '.*\.{targets}', or name two.",
        )
        return
    asked = found.missing or ([targets] if isinstance(targets, str) else targets)
    near = [one for name in asked for one in difflib.get_close_matches(re.split(r"\W+", name)[-1], found.names)]
    there = f"(there are {', '.join(dict.fromkeys(near or found.names))})"
    if found.refusal:
        what = f"PEFT refuses lora_target_modules for {case.model}: {found.refusal} {there}"
        yield Problem("error", "lora", what, "all-linear takes every linear layer.")
    else:
        missing = f"{', '.join(found.missing)}: no such module {there}"
        what = f"lora_target_modules that {case.model} lacks are silently dropped: {missing}."
        yield Problem(
            "warning", "lora", what, "Write its name as the model has it; all-linear takes every linear layer."
        )


def _for_ranges(case: Case) -> dict[str, Any]:
    """The settings that `ranges` asks of."""
    quantised = {"load_in_4bit": case.bits == 4, "load_in_8bit": case.bits == 8}
    vllm = ("use_vllm", "vllm_mode", "vllm_enable_sleep_mode")
    return {**quantised, **{name: case[name] for name in vllm}}


def _of_training(case: Case) -> Iterator[Problem]:
    if (case.on_cpu or not case.devices) and (found := vllm_without_cuda(_for_ranges(case))) is not None:
        yield Problem("error", "vllm", *found)
    # vLLM's log-probabilities are of the cut distribution, the trainer's of the whole one.
    usual = {"top_p": (None, 1, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0, 0.0)}
    cut = ", ".join(f"{name} {case[name]}" for name, values in usual.items() if case[name] not in values)
    if cut and case["use_vllm"] and case["vllm_importance_sampling_correction"]:
        yield Problem(
            "warning",
            "vllm",
            f"{cut} with vLLM's importance sampling correction biases the correction.",
            "Set top_p: 1.0 and top_k: 0, or vllm_importance_sampling_correction: false.",
        )
    wanted = int(case["generation_batch_size"] or 0) // int(case["num_generations"] or 1)
    if case.prompts is not None and case["num_generations"] and case.prompts < wanted:
        yield Problem(
            "error",
            "batch",
            f"{case.prompts} training prompt(s) fill no generation batch, which takes {wanted} different ones: nothing "
            "would be trained on.",
            "Give more prompts, or lower per_device_train_batch_size or the steps per generation.",
        )
    if wrong := wrong_values(vars(case.args)):
        fix = "Correct it: TRL accepts it, and later fails or trains on it."
        yield Problem("error", "settings", f"{'; '.join(wrong)}.", fix)
    known = contract.LOSS_TYPES if hasattr(case.args, "num_generations") else ()
    if known and case["loss_type"] not in (None, *known):
        what = f"loss_type {case['loss_type']!r} is none of {', '.join(sorted(known))}."
        yield Problem("error", "loss", what, "Choose one of them.")
