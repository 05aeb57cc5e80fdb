"""Rules about the machine: versions, devices, libraries, places on disk, variables."""

from __future__ import annotations

import warnings
from pathlib import Path

from packaging.version import Version

from ...errors import UpstreamError
from .case import Case, Rule, error, note, warning
from .problem import Problem
from .settings_file import shown

_LEAST_SHARED_MEMORY = 1024**3


def trl_is_not_supported(case: Case) -> Problem | None:
    """The trainer's own version gate (`upstream.check_version`)."""
    from ...trainer import upstream

    package = case.environment.packages.get("trl")
    if package is None or package.version is None:
        return error("versions", "trl is not installed.", "pip install trl")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            upstream.check_version(package.version)
        except UpstreamError as refusal:
            fix = f"pip install 'trl>={upstream.OLDEST_TESTED},<2'"
            return error("versions", shown(refusal), fix)
    if not told:
        return None
    return warning("versions", shown(told[0].message), f"pip install 'trl=={upstream.NEWEST_TESTED}.*' to be sure.")


def versions_out_of_range(case: Case) -> Problem | None:
    """The ranges of this package's own metadata; a package that nobody asked for may be missing."""
    out = [
        f"{package.name} {package.version or 'is missing'}, wanted {package.wanted}"
        for package in case.environment.packages.values()
        if package.wanted and not package.fits and package.name != "vllm"
        if package.required or package.version is not None
    ]
    if not out:
        return None
    return error("versions", f"Not in the range that trl-grpo-ext asks for: {'; '.join(out)}.", "pip install -U them.")


def old_trl_needs_more(case: Case) -> Problem | None:
    """TRL 1.15 trains only where Triton finds a GPU."""
    version = case.environment.version("trl")
    if version is None or version.release[:2] != (1, 15) or not (case.on_cpu or not case.environment.devices):
        return None
    return error("versions", f"TRL {version} trains only where Triton finds a GPU.", "pip install 'trl==1.16.*'")


def no_gpu_here(case: Case) -> Problem | None:
    """transformers refuses bf16 without a GPU unless the run is on the CPU; a launch for GPUs finds none."""
    if case.environment.devices or case.on_cpu:
        return None
    why = f"torch is built for {case.environment.torch_build}"
    visible = case.environment.variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        why += f", CUDA_VISIBLE_DEVICES is {visible!r}"
    message = f"No GPU is visible here ({why}), and the run does not say use_cpu: true."
    fix = "To describe another machine give --gpu_memory GB; to run here write use_cpu: true."
    if case.run["bf16"]:
        return error("device", f"{message} With bf16: true it stops at once.", fix)
    return warning("device", message, fix)


def fewer_gpus_than_processes(case: Case) -> Problem | None:
    """The launcher starts one process for each GPU; the others find none of their own."""
    here, wanted = len(case.environment.devices), case.launch.processes_per_machine
    if not here or case.on_cpu or wanted <= here:
        return None
    message = f"{case.launch.name} starts {wanted} processes on each machine, which has {here} GPUs to see."
    return error("device", message, f"Launch with --num_processes {here * case.launch.machines}, or make more visible.")


def several_gpus_for_one_process(case: Case) -> Problem | None:
    """The Trainer would use nn.DataParallel, which TRL refuses."""
    here = len(case.environment.devices)
    if case.launch.distributed_type != "NO" or here < 2 or case.on_cpu or case.environment.elsewhere:
        return None
    message = f"One process sees {here} GPUs: the Trainer would use nn.DataParallel, which TRL refuses."
    return error("device", message, "Set CUDA_VISIBLE_DEVICES=0, or use a launch file with MULTI_GPU.")


def no_nccl(case: Case) -> Problem | None:
    """Processes on GPUs talk over NCCL, which not every build has."""
    if case.launch.processes == 1 or case.on_cpu or case.environment.elsewhere or not case.environment.devices:
        return None
    if "nccl" in case.environment.backends:
        return None
    return error("device", "This torch has no NCCL, which several GPUs need.", "Install torch's CUDA build for Linux.")


def bitsandbytes_does_not_load(case: Case) -> Problem | None:
    """Its Python part imports without its native library, and fails at the first layer."""
    if case.environment.bitsandbytes_error is None:
        return None
    message = f"bitsandbytes' native library does not load: {case.environment.bitsandbytes_error}"
    return error("bitsandbytes", message, "python -m bitsandbytes says more; install the wheel for this CUDA version.")


def eight_bit_optimizer_on_the_cpu(case: Case) -> Problem | None:
    """Paged and 8-bit optimizers of bitsandbytes are for accelerators."""
    name = str(getattr(case.run["optim"], "value", case.run["optim"]))
    if not case.on_cpu or not ("bnb" in name or name.startswith("paged") or name.endswith("8bit")):
        return None
    return error(
        "optimizer", f"optim {name} of bitsandbytes needs a GPU; the run is on the CPU.", "Write optim: adamw_torch."
    )


def deepspeed_is_missing(case: Case) -> Problem | None:
    """DeepSpeed is an extra, not a dependency."""
    if not case.engine.startswith("zero") or case.environment.version("deepspeed") is not None:
        return None
    problem = warning if case.environment.elsewhere else error
    message = f"{case.launch.name} asks for DeepSpeed, which is not installed here."
    return problem("deepspeed", message, "pip install 'trl-grpo-ext[deepspeed]'")


def cpu_adam_cannot_be_built(case: Case) -> Problem | None:
    """DeepSpeed compiles its CPU Adam at first use."""
    if not case.engine.startswith("zero") or case.launch.offload_optimizer == "none":
        return None
    facts = case.environment
    lacking = [*([] if facts.has_ninja else ["ninja"]), *([] if facts.compiler else ["a C++ compiler"])]
    if not lacking:
        return None
    problem = warning if facts.elsewhere else error
    message = "The optimizer is offloaded, and DeepSpeed compiles its CPU Adam at first use"
    return problem(
        "deepspeed",
        f"{message}: {' and '.join(lacking)} missing.",
        "pip install ninja, and install g++; the first build takes about 100 s.",
    )


def liger_is_missing(case: Case) -> Problem | None:
    """Liger is no dependency of this package."""
    if not case.run["use_liger_kernel"] or case.environment.version("liger-kernel") is not None:
        return None
    problem = warning if case.environment.elsewhere else error
    return problem(
        "liger", "use_liger_kernel: true, but liger-kernel is not installed here.", "pip install liger-kernel"
    )


def model_that_cannot_be_fetched(case: Case) -> Problem | None:
    """Offline, only what is in the cache loads."""
    facts = case.environment
    name = facts.model
    if name is None or facts.model_here:
        return None
    offline = [n for n in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if facts.variables.get(n, "0").upper() in _ON]
    if name.startswith((".", "/", "~")):
        problem = warning if facts.elsewhere else error
        return problem(
            "model", f"There is no model in {shown(name, 120)}.", "Name a folder with a model, or one of the hub."
        )
    if offline and not facts.elsewhere:
        message = f"{shown(name, 120)} is not in the cache ({facts.hub_cache}), and {offline[0]} is set."
        return error("model", message, f"Run `hf download {shown(name, 120)}` where there is a network, or unset it.")
    message = f"{shown(name, 120)} is not in the cache here ({facts.hub_cache}): it is fetched at the start."
    return note("model", message, f"To fetch it beforehand: hf download {shown(name, 120)}")


_ON = {"1", "ON", "YES", "TRUE"}


def nowhere_to_save(case: Case) -> Problem | None:
    """Found at the first checkpoint otherwise."""
    facts = case.environment
    if facts.output_problem is None:
        return None
    problem = warning if facts.elsewhere else error
    return problem(
        "output_dir", f"output_dir {shown(facts.output_dir, 120)}: {facts.output_problem}.", "Choose another."
    )


def output_over_the_model(case: Case) -> Problem | None:
    """The trained model would overwrite the one that it began with."""
    model, output = case.run["model_name_or_path"], case.environment.output_dir
    if not model or not output or not Path(str(model)).is_dir():
        return None
    if Path(str(model)).resolve() != Path(output).resolve():
        return None
    message = f"{shown(output, 120)} is both output_dir and the model to start from."
    return error("output_dir", message, "Choose another output_dir.")


def no_checkpoint_to_resume_from(case: Case) -> Problem | None:
    """A run that is to resume stops where there is nothing."""
    if case.environment.checkpoint_here is not False:
        return None
    asked = shown(case.run["resume_from_checkpoint"], 100)
    problem = warning if case.environment.elsewhere else error
    message = f"resume_from_checkpoint {asked}: there is no checkpoint."
    return problem("resume", message, "Leave it away, or name a folder checkpoint-N.")


def little_shared_memory(case: Case) -> Problem | None:
    """NCCL and data loaders talk through /dev/shm; containers give it 64 MB by default."""
    free = case.environment.shared_memory_free
    if free is None or free >= _LEAST_SHARED_MEMORY or case.launch.processes == 1 or case.environment.elsewhere:
        return None
    message = f"/dev/shm has {free / 1024**2:.0f} MiB free, through which {case.launch.processes} processes talk."
    return warning("device", message, "Start the container with --shm-size=8g or --ipc=host.")


def inside_another_launch(case: Case) -> Problem | None:
    """Variables of a launcher that is already running reach what is started here."""
    found = [name for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if name in case.environment.variables]
    if not found or case.launch.processes > 1:
        return None
    told = ", ".join(f"{name}={case.environment.variables[name]}" for name in found)
    message = f"{told} in the environment: one process started here takes itself for part of another job, and waits."
    return warning("environment", message, f"Run: unset {' '.join(found)}")


def plugins_are_restricted(case: Case) -> Problem | None:
    """Distributions that the variable does not name do not load."""
    value = case.environment.variables.get("TRL_GRPO_EXT_PLUGINS")
    if value is None:
        return None
    message = f"TRL_GRPO_EXT_PLUGINS={value!r}: plugins of other distributions do not load."
    return note("plugins", message, "Unset it, or add their distribution, where one is missing.")


def torch_without_the_gpus_build(case: Case) -> Problem | None:
    """A GPU machine with the CPU build of torch."""
    facts = case.environment
    if facts.torch_build != "cpu" or case.on_cpu or facts.elsewhere or not facts.nvidia_driver:
        return None
    return error("device", "There is an NVIDIA driver here, but torch is built for the CPU.", "Install torch for CUDA.")


def tested_versions(case: Case) -> Problem | None:
    """Dependencies were tried at one version each; much newer ones may differ."""
    newest = {"transformers": "5.23", "accelerate": "1.15", "peft": "0.21", "deepspeed": "0.19"}
    out = []
    for name, tested in newest.items():
        version = case.environment.version(name)
        if version is not None and version.release[:2] > Version(tested).release[:2]:
            out.append(f"{name} {version} (tried: {tested})")
    if not out:
        return None
    return note("versions", f"Newer than what trl-grpo-ext was tried with: {', '.join(out)}.", "See constraints.txt.")


RULES: tuple[Rule, ...] = (
    trl_is_not_supported,
    versions_out_of_range,
    old_trl_needs_more,
    no_gpu_here,
    fewer_gpus_than_processes,
    several_gpus_for_one_process,
    no_nccl,
    bitsandbytes_does_not_load,
    eight_bit_optimizer_on_the_cpu,
    deepspeed_is_missing,
    cpu_adam_cannot_be_built,
    liger_is_missing,
    model_that_cannot_be_fetched,
    nowhere_to_save,
    output_over_the_model,
    no_checkpoint_to_resume_from,
    little_shared_memory,
    inside_another_launch,
    plugins_are_restricted,
    torch_without_the_gpus_build,
    tested_versions,
)
