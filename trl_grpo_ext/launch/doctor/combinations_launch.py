"""Rules about the launch file and what it does with the run: engines that silently become others, and double settings.

Facts are of accelerate 1.15, transformers 5.23 and DeepSpeed 0.19, each read in their sources or tried on the CPU.
"""

from __future__ import annotations

from .case import Case, Rule, error, note, warning
from .problem import Problem
from .settings_file import shown

_OBSOLETE_IN_FSDP2 = ("use_orig_params", "sync_module_states", "backward_prefetch", "sharding_strategy")
_BESIDE_A_JSON_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model"),
)
_USUAL_PDSH = ("pdsh", "None")


def multi_cpu_is_one_process(case: Case) -> Problem | None:
    """`MULTI_CPU` goes through mpirun; without it the launcher starts one process, and says nothing."""
    if case.launch.distributed_type != "MULTI_CPU":
        return None
    message = f"distributed_type MULTI_CPU in {case.launch.name} starts one process, silently, unless mpirun is there."
    return error("launch", message, "Write MULTI_GPU, and give the script use_cpu: true: that is DDP on the CPU.")


def use_cpu_in_the_launch_file(case: Case) -> Problem | None:
    """`use_cpu` of the launch file starts processes that never meet, or DDP in place of DeepSpeed."""
    if not case.launch.use_cpu or case.launch.processes == 1:
        return None
    message = (
        f"use_cpu: true in {case.launch.name} makes {case.launch.processes} independent runs of one process each, or "
        "DDP in place of DeepSpeed."
    )
    return error("launch", message, "Write use_cpu: false there, and use_cpu: true in the run's settings.")


def one_process_file_with_several(case: Case) -> Problem | None:
    """`NO` starts one process, whatever `num_processes` says."""
    if case.launch.distributed_type != "NO" or case.launch.processes == 1:
        return None
    message = f'distributed_type "NO" in {case.launch.name} starts one process, not {case.launch.processes}.'
    return error("launch", message, "Write MULTI_GPU, or num_processes: 1.")


def fsdp_on_the_cpu(case: Case) -> Problem | None:
    """On the CPU accelerate takes an FSDP launch for DDP, silently."""
    if not case.launch.engine.startswith("fsdp") or not case.on_cpu:
        return None
    message = f"{case.launch.name} asks for FSDP, but the run is on the CPU, where accelerate makes DDP of it silently."
    return error("fsdp+cpu", message, "Run on GPUs, or use a launch file with MULTI_GPU or DEEPSPEED.")


def deepspeed_on_the_cpu(case: Case) -> Problem | None:
    """DeepSpeed chooses its accelerator itself; on a machine without GPU it has to be told."""
    if not case.launch.engine.startswith("zero") or not case.on_cpu:
        return None
    if case.environment.variables.get("DS_ACCELERATOR") == "cpu":
        return None
    message = f"{case.launch.name} asks for DeepSpeed on the CPU, and DS_ACCELERATOR is not set to cpu."
    return warning("deepspeed+cpu", message, "Set DS_ACCELERATOR=cpu in the shell.")


def other_engine_in_the_environment(case: Case) -> Problem | None:
    """`ACCELERATE_USE_*` in the shell reach the script past the launch file, and change the engine silently."""
    variables, engine = case.environment.variables, case.launch.engine
    on = {name for name, value in variables.items() if value.lower() in ("1", "true", "yes", "y", "on", "t")}
    becomes = None
    if "ACCELERATE_USE_CPU" in on:
        becomes = "ACCELERATE_USE_CPU", "single runs on the CPU, or DDP in place of DeepSpeed and FSDP,"
    elif "ACCELERATE_USE_DEEPSPEED" in on and not engine.startswith("zero"):
        becomes = "ACCELERATE_USE_DEEPSPEED", "a DeepSpeed run"
    elif "ACCELERATE_USE_FSDP" in on and not engine.startswith("fsdp"):
        becomes = "ACCELERATE_USE_FSDP", "an FSDP run"
    if becomes is None:
        return None
    message = f"{becomes[0]} is set in the environment, which makes {becomes[1]} of {case.launch.name}, silently."
    return error("environment", message, f"Run: unset {becomes[0]}")


def not_the_engine_of_the_settings(case: Case) -> Problem | None:
    """A run's settings may say which engine their sizes were made for."""
    asked, engine = case.run.engine, case.launch.engine
    if asked is None or asked == engine or engine.startswith(f"{asked}_"):
        return None
    message = f"The settings were made for engine {shown(asked, 40)}, but {case.launch.name} starts {engine}."
    return error("engine", message, f"Choose a launch file for {shown(asked, 40)}, or change `engine`.")


def not_the_processes_of_the_settings(case: Case) -> Problem | None:
    """A run's settings may say how many processes their batch sizes were made for."""
    asked = case.run.processes
    if asked is None or str(asked) == str(case.launch.processes):
        return None
    message = (
        f"The settings were made for {shown(asked, 40)} processes, but {case.launch.name} starts "
        f"{case.launch.processes}."
    )
    fix = f"Launch with --num_processes {shown(asked, 40)}, or change `processes` and the batch sizes."
    return error("engine", message, fix)


def processes_do_not_divide_into_machines(case: Case) -> Problem | None:
    """The launcher divides `num_processes`, which counts those of all machines, and drops the rest."""
    if case.launch.processes % case.launch.machines == 0:
        return None
    message = f"num_processes {case.launch.processes} is no multiple of num_machines {case.launch.machines}."
    return error("nodes", message, "num_processes counts the processes of all machines together.")


def machines_that_never_meet(case: Case) -> Problem | None:
    """A file says `machine_rank: 0` to every machine that reads it: with a static rendezvous no job forms."""
    launch = case.launch
    if launch.machines == 1 or launch.machine_rank is not None or launch.rdzv_backend != "static":
        return None
    message = f"Every machine that starts with {launch.name} is one and the same of {launch.machines}: no job forms."
    if launch.main_process_ip is None:
        message += " Nor does it say where they meet."
    fix = "Give each launcher its own --machine_rank ($SLURM_NODEID under Slurm) and all of them --main_process_ip."
    return warning("nodes", message, f"{fix} The other way is --rdzv_backend c10d.")


def rendezvous_that_is_ignored(case: Case) -> Problem | None:
    """accelerate 1.15 has defaults for these options, which beat the file's."""
    ignored = {"rdzv_backend": "static", "same_network": False}
    found = [key for key, value in ignored.items() if case.launch.raw.get(key, value) != value]
    if not found or case.launch.machines == 1:
        return None
    message = f"{', '.join(found)} in {case.launch.name}: accelerate ignores it in a file."
    return warning(
        "nodes", message, f"Give {' and '.join(f'--{key}' for key in found)} on the launcher's command line."
    )


def deepspeed_starts_through_ssh(case: Case) -> Problem | None:
    """DeepSpeed's default multi-node launcher is pdsh, started on one machine with a host file."""
    if case.launch.machines == 1 or not case.launch.engine.startswith("zero"):
        return None
    section = case.launch.raw.get("deepspeed_config") or {}
    launcher = str(section.get("deepspeed_multinode_launcher"))
    if launcher == "standard":
        return None
    name = "pdsh" if launcher in _USUAL_PDSH else shown(launcher, 40)
    message = (
        f"{case.launch.name} leaves several machines to DeepSpeed's launcher {name}: one machine, a host file, ssh."
    )
    return warning(
        "nodes", message, "Write deepspeed_multinode_launcher: standard, and start a launcher on each machine."
    )


def keys_of_fsdp1_in_fsdp2(case: Case) -> Problem | None:
    """FSDP2 has no such settings; accelerate drops them."""
    found = [key for key in _OBSOLETE_IN_FSDP2 if key in case.launch.fsdp] if case.is_fsdp2 else []
    if not found:
        return None
    message = f"{', '.join(f'fsdp_{key}' for key in found)} in {case.launch.name}: of FSDP1, ignored by FSDP2."
    return warning("fsdp2", message, "Take it out; fsdp_reshard_after_forward is FSDP2's sharding_strategy.")


def forward_prefetch_in_fsdp2(case: Case) -> Problem | None:
    """FSDP2 has no forward prefetch: accelerate raises where the plugin gets it, and ignores it in a launch file."""
    config = case.run.get("fsdp_config")
    in_run = isinstance(config, dict) and {"forward_prefetch", "fsdp_forward_prefetch"} & config.keys()
    if in_run and str(config.get("version", 2)) == "2":
        fix = "Take forward_prefetch out of fsdp_config."
        return error("fsdp2", "forward_prefetch in the run's fsdp_config raises: FSDP2 has none.", fix)
    if not case.is_fsdp2 or str(case.launch.fsdp.get("forward_prefetch", False)).lower() != "true":
        return None
    message = f"fsdp_forward_prefetch: true in {case.launch.name} does nothing: FSDP2 has none."
    return warning("fsdp2", message, "Take it out.")


def reshard_of_the_other_fsdp(case: Case) -> Problem | None:
    """FSDP1 takes FULL_SHARD and its like, FSDP2 true or false; each raises at the other's."""
    value = case.launch.fsdp.get("reshard_after_forward")
    if value is None:
        return None
    truth = str(value).lower() in ("true", "false", "1", "0", "yes", "no")
    if case.is_fsdp2 and not truth:
        message = f"fsdp_reshard_after_forward is {shown(repr(value), 40)}, which FSDP2 refuses."
        return error("fsdp2", message, "Write true (ZeRO-3's way) or false (ZeRO-2's).")
    if case.engine == "fsdp1" and isinstance(value, bool):
        return error("fsdp1", f"fsdp_reshard_after_forward is {value}, which FSDP1 refuses.", "Write FULL_SHARD.")
    return None


def fsdp1_was_not_tried(case: Case) -> Problem | None:
    """FSDP1 is what a file without `fsdp_version` gets."""
    if case.engine != "fsdp1":
        return None
    message = f"{case.launch.name} asks for FSDP1 (fsdp_version 1, the default), which trl-grpo-ext was not tried with."
    return warning("fsdp1", message, "Write fsdp_version: 2.")


def fsdp_without_wrapping(case: Case) -> Problem | None:
    """Without a wrapping policy the whole model is one unit, gathered at once."""
    policy = str(case.launch.fsdp.get("auto_wrap_policy", "NO_WRAP")).upper()
    if not case.launch.engine.startswith("fsdp") or policy != "NO_WRAP":
        return None
    message = f"{case.launch.name} has no fsdp_auto_wrap_policy: the whole model is gathered at every forward pass."
    return warning("fsdp", message, "Write fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP.")


def fsdp_loading_without_sync(case: Case) -> Problem | None:
    """The launcher refuses memory-saving loading when modules are not synchronised, in FSDP2 too."""
    fsdp = case.launch.fsdp
    saving = str(fsdp.get("cpu_ram_efficient_loading", True)).lower() == "true"
    if not saving or str(fsdp.get("sync_module_states", True)).lower() != "false":
        return None
    message = f"fsdp_sync_module_states: false in {case.launch.name}, but fsdp_cpu_ram_efficient_loading is on."
    return error("fsdp", message, "Take fsdp_sync_module_states out; accelerate's launcher refuses the two together.")


def hybrid_shards_do_not_fit(case: Case) -> Problem | None:
    """Replicas times shards is the number of processes."""
    given = case.launch.raw.get("parallelism_config") or {}
    sizes = [given.get(f"parallelism_config_{name}_size", 1) for name in ("dp_replicate", "dp_shard")]
    if not given or not all(isinstance(size, int) for size in sizes):
        return None
    if not case.is_fsdp2:
        message = f"parallelism_config in {case.launch.name} needs FSDP2; this is {case.engine}."
        return error("fsdp2", message, "Write distributed_type: FSDP and fsdp_version: 2, or take it out.")
    if sizes[0] * sizes[1] == case.launch.processes:
        return None
    message = (
        f"{sizes[0]} replicas of {sizes[1]} shards are {sizes[0] * sizes[1]} processes, not {case.launch.processes}."
    )
    return error("fsdp2", message, "Let dp_replicate_size times dp_shard_size be num_processes.")


def checkpointing_twice(case: Case) -> Problem | None:
    """transformers refuses FSDP's own activation checkpointing together with the trainer's, which is on by default."""
    on = str(case.launch.fsdp.get("activation_checkpointing", False)).lower() == "true"
    if not on or not case.checkpointing:
        return None
    message = f"Activation checkpointing is on in {case.launch.name} and in the run (gradient_checkpointing: true)."
    return error(
        "fsdp", message, "Set gradient_checkpointing: false; the Trainer refuses both (TRL's default is true)."
    )


def keys_beside_deepspeeds_file(case: Case) -> Problem | None:
    """With a JSON file accelerate refuses the launch file's own keys, `mixed_precision: "no"` included."""
    section = case.launch.raw.get("deepspeed_config") or {}
    if case.launch.deepspeed_config_file is None:
        return None
    found = [key for key in _BESIDE_A_JSON_FILE if key in section]
    found += ["mixed_precision"] if case.launch.raw.get("mixed_precision") is not None else []
    if not found:
        return None
    message = f"{case.launch.name} names a deepspeed_config_file and has {', '.join(found)} too: accelerate raises."
    return error("deepspeed", message, 'Take it out; the JSON file has it, as "auto" where the script decides.')


def accumulation_in_two_places(case: Case) -> Problem | None:
    """DeepSpeed raises where the launch file and the script differ; equal today is different tomorrow."""
    here, there = case.run["gradient_accumulation_steps"], case.launch.accumulation
    if there is None:
        return None
    message = f"gradient_accumulation_steps is {there} in {case.launch.name} and {here} in the run."
    fix = 'Take it out of the launch file, or write "auto" there.'
    return error("accumulation", message, fix) if there != here else note("accumulation", message, fix)


def clipping_in_two_places(case: Case) -> Problem | None:
    """Under DeepSpeed the engine clips, at the launch file's value."""
    here, there = case.run["max_grad_norm"], case.launch.clipping
    if there is None or float(here) == there:
        return None
    message = f"Gradients are clipped at {there} in {case.launch.name} and at max_grad_norm {here} in the run."
    return warning("clipping", message, 'Take gradient_clipping out of the launch file, or write "auto" there.')


def precision_in_two_places(case: Case) -> Problem | None:
    """The run's bf16 or fp16 beats the launcher's `mixed_precision`; without either flag the launcher's holds."""
    there = case.launch.mixed_precision
    here = "fp16" if case.run["fp16"] else "bf16" if case.run["bf16"] else "no"
    if there in ("no", here):
        return None
    holds = f"{here} holds in the trainer" if here != "no" else f"it runs in {there}"
    message = f"mixed_precision is {there} in {case.launch.name}, and the run's settings say {here}: {holds}."
    return warning("precision", message, 'Write mixed_precision: "no" in the launch file; the run decides.')


def zero3_saves_no_weights(case: Case) -> Problem | None:
    """Without gathering, a ZeRO-3 run saves shards that only DeepSpeed's own script turns into a model."""
    zero = case.launch.deepspeed.get("zero_optimization") or {}
    if case.engine != "zero3" or str(zero.get("stage3_gather_16bit_weights_on_model_save")).lower() == "true":
        return None
    message = f"{case.launch.name} does not gather ZeRO-3's weights when saving: the saved model has shards alone."
    return warning("zero3", message, "Write zero3_save_16bit_model: true.")


def zero3_loads_everywhere(case: Case) -> Problem | None:
    """Without zero.Init each process loads the whole model first."""
    section = case.launch.raw.get("deepspeed_config") or {}
    if case.engine != "zero3" or str(section.get("zero3_init_flag", True)).lower() != "false":
        return None
    message = f"zero3_init_flag is false in {case.launch.name}: every process loads the whole model before it is cut."
    return warning("zero3", message, "Write zero3_init_flag: true.")


def parameter_offload_without_stage_3(case: Case) -> Problem | None:
    """Only ZeRO-3 moves weights to the CPU."""
    if case.engine not in ("zero1", "zero2") or case.launch.offload_parameters == "none":
        return None
    device = case.launch.offload_parameters
    message = f"offload_param_device {device} in {case.launch.name} needs ZeRO-3; this is {case.engine}."
    return warning("deepspeed", message, "Write zero_stage: 3, or offload_param_device: none.")


def deepspeed_in_the_run_too(case: Case) -> Problem | None:
    """TRL's `deepspeed` setting and a launch file of DeepSpeed are two configurations of one engine."""
    if case.run.get("deepspeed") is None:
        return None
    message = f"The run's own `deepspeed` setting decides the engine; {case.launch.name} says {case.engine}."
    return warning("deepspeed", message, "Keep one of them: leave `deepspeed` out and launch with a DEEPSPEED file.")


RULES: tuple[Rule, ...] = (
    multi_cpu_is_one_process,
    use_cpu_in_the_launch_file,
    one_process_file_with_several,
    fsdp_on_the_cpu,
    deepspeed_on_the_cpu,
    other_engine_in_the_environment,
    not_the_engine_of_the_settings,
    not_the_processes_of_the_settings,
    processes_do_not_divide_into_machines,
    machines_that_never_meet,
    rendezvous_that_is_ignored,
    deepspeed_starts_through_ssh,
    keys_of_fsdp1_in_fsdp2,
    forward_prefetch_in_fsdp2,
    reshard_of_the_other_fsdp,
    fsdp1_was_not_tried,
    fsdp_without_wrapping,
    fsdp_loading_without_sync,
    hybrid_shards_do_not_fit,
    checkpointing_twice,
    keys_beside_deepspeeds_file,
    accumulation_in_two_places,
    clipping_in_two_places,
    precision_in_two_places,
    zero3_saves_no_weights,
    zero3_loads_everywhere,
    parameter_offload_without_stage_3,
    deepspeed_in_the_run_too,
)
