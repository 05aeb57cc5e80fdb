"""The pitfalls that the doctor knows: what changes the engine silently, crashes later, or trains nothing.

What the launcher, TRL's parser or the trainer refuses by itself at its start is none: they have said it by then. Shares
of changed weights were measured on a model of 88,000 parameters.
"""

import os
from collections.abc import Iterator

from ...errors import EngineError
from ...trainer.upstream import contract
from ..engine import check_launch
from ..ranges import quantised_with_vllm, vllm_without_cuda, wrong_values
from . import Problem
from .case import Case

_HARDLY_MOVES_BELOW = 1e-5  # below this rate, bfloat16's 8 bits lose most updates of ordinary weights
_ADAPTERS_MOVE_FROM = 1e-4  # from this rate on, a step of Adam changes 9 of 10 entries of a bfloat16 `lora_A`


def problems_of(case: Case) -> list[Problem]:
    return [*_of_launch(case), *_of_weights(case), *_of_adapters(case), *_of_training(case)]


def _of_launch(case: Case) -> Iterator[Problem]:
    launch = case.launch
    gpus = len(case.devices)
    here = launch.processes_per_machine
    if not case["use_cpu"] and 0 < gpus < here:
        what = f"{launch.name} starts {here} processes on each machine, which has {gpus} GPU(s)."
        yield Problem("error", "device", what, "Pass --num_processes.")
    if (machines := case.machine.machines) is not None and machines < launch.machines:
        what = f"{launch.name} waits for {launch.machines} machines, and there are {machines}."
        yield Problem("error", "nodes", what, f"Pass --num_machines {machines}.")
    # TRL loads with device_map="auto" there, and then the Trainer takes it for model parallelism.
    says_nothing = case.sizes is not None and not launch.settings_alone and "device_map" not in case.model_settings
    if case.engine == "one_process" and not case["use_cpu"] and says_nothing and gpus > 1:
        what = f"TRL spreads the model of one process over its {gpus} GPUs, of which only one works at a time."
        yield Problem("warning", "device", what, "Set CUDA_VISIBLE_DEVICES=0, or launch a process for each GPU.")
    if (state := getattr(case.args, "distributed_state", None)) is not None:  # the real one of this rank
        try:
            check_launch(state, environment={**os.environ, **launch.environment}, args=case.args)
        except EngineError as error:
            yield Problem("error", "engine", str(error))
    # Without mpirun the launcher starts one process for MULTI_CPU, for "NO" and for use_cpu.
    if launch.processes < launch.asked_processes:
        what = f"{launch.name} asks for {launch.asked_processes} processes, and the launcher starts {launch.processes}."
        fix = "Write distributed_type: MULTI_GPU and use_cpu: false (the script's own use_cpu chooses the CPU)."
        yield Problem("error", "launch", what, fix)
    # A file says `machine_rank: 0` to every machine that reads it.
    if launch.machines > 1 and not launch.ranked and launch.rendezvous == "static":
        what = f"Every machine that starts with {launch.name} is one and the same of {launch.machines}: no job forms."
        fix = "Give each launcher its own --machine_rank and all of them --main_process_ip, or --rdzv_backend c10d."
        yield Problem("warning", "nodes", what, fix)


def _of_weights(case: Case) -> Iterator[Problem]:
    if found := quantised_with_vllm(case["use_vllm"], case.bits > 0):
        yield Problem("error", "qlora+vllm", *found)
    # Accelerate leaves what is no floating-point storage out of the sharding, with one warning.
    given = getattr(case.quantisation, "bnb_4bit_quant_storage", None)
    storage = "uint8 (the default)" if given is None else str(given).removeprefix("torch.")
    if case.bits == 4 and case.engine.startswith("fsdp") and storage != case.dtype:
        what = f"bnb_4bit_quant_storage is {storage} and dtype {case.dtype}: FSDP keeps the 4-bit weights whole."
        yield Problem("error", "qlora+fsdp", what, f"Write bnb_4bit_quant_storage: {case.dtype}.")
    rate = case["learning_rate"]
    in_half = case.model and case.engine in ("one_process", "ddp") and case.dtype in ("bfloat16", "auto")
    if in_half and not case.uses_adapters and rate < _HARDLY_MOVES_BELOW:
        changed = "1.9 % of a projection changed in 20 steps at 1e-6, against 100 % in float32"
        what = f"Weights in {case.dtype} hardly move at learning_rate {rate:g} without master weights: {changed}."
        yield Problem("warning", "precision", what, "Write dtype: float32 and bf16: true; or use ZeRO or FSDP2.")
    # TRL casts QLoRA's adapters to bfloat16, Accelerate leaves them so under FSDP2, and the recipes cast them back.
    in_bfloat16 = case.bits and not case.engine.startswith("zero") and not case.keeps_adapters_in_float32
    if in_bfloat16 and case.uses_adapters and rate < _ADAPTERS_MOVE_FROM:
        what = f"TRL casts QLoRA's adapters to bfloat16, where many steps of learning_rate {rate:g} are lost."
        yield Problem("warning", "qlora", what, "Cast them back to float32, as the recipes do, or use 1e-4 or more.")
    longest = case["max_completion_length"] or 0
    if case.sizes is not None and 0 < case.sizes.context <= longest:
        what = f"max_completion_length {longest} leaves no room for a prompt in {case.sizes.context} positions."
        yield Problem("error", "length", what, f"Keep it well under {case.sizes.context}.")


def _of_adapters(case: Case) -> Iterator[Problem]:
    found = case.adapters
    fix = "Write the name as the model has it; all-linear takes every linear layer."
    if found is not None and found.refusal:
        # TRL makes a text of a list of one, which PEFT reads as a regular expression for the whole name.
        what = f"PEFT refuses lora_target_modules for {case.model}: {found.refusal}"
        yield Problem("error", "lora", what, rf"{fix} One name alone is a regular expression: '.*\.q_proj'.")
    elif found is not None and found.missing:
        what = f"PEFT silently drops lora_target_modules that {case.model} lacks: {', '.join(found.missing)}."
        yield Problem("warning", "lora", what, fix)


def _of_training(case: Case) -> Iterator[Problem]:
    if (case["use_cpu"] or not case.devices) and (found := vllm_without_cuda(vars(case.args))):
        yield Problem("error", "vllm", *found)
    # vLLM's log-probabilities are of the cut distribution, the trainer's of the whole one.
    usual = {"top_p": (None, 1, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0, 0.0)}
    cut = ", ".join(f"{name} {case[name]}" for name, values in usual.items() if case[name] not in values)
    if cut and case["use_vllm"] and case["vllm_importance_sampling_correction"]:
        fix = "Set top_p: 1.0 and top_k: 0, or vllm_importance_sampling_correction: false."
        yield Problem("warning", "vllm", f"{cut} biases vLLM's importance sampling correction.", fix)
    wanted = int(case["generation_batch_size"] or 0) // int(case["num_generations"] or 1)
    if case.prompts is not None and case["num_generations"] and case.prompts < wanted:
        what = f"{case.prompts} training prompt(s) fill no generation batch, which takes {wanted}: nothing is trained."
        yield Problem("error", "batch", what, "Give more prompts, or lower per_device_train_batch_size.")
    if wrong := wrong_values(vars(case.args)):
        yield Problem("error", "settings", f"{'; '.join(wrong)}.", "TRL accepts it, and later fails or trains on it.")
    known = contract.LOSS_TYPES if hasattr(case.args, "num_generations") else ()
    if known and case["loss_type"] not in (None, *known):
        yield Problem("error", "loss", f"loss_type {case['loss_type']!r} is none of {', '.join(sorted(known))}.")
