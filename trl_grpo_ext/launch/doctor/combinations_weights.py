"""Rules about weights: precision, quantisation, adapters, checkpointing, attention.

Facts are of TRL 1.16, PEFT 0.21, bitsandbytes 0.50, accelerate 1.15; shares of changed weights were measured on a model
of 88,000 parameters on the CPU.
"""

from __future__ import annotations

from .case import Case, Rule, error, note, warning
from .problem import Problem
from .settings_file import shown

HARDLY_MOVES_BELOW = 1e-5
"""Learning rate under which updates of weights of usual size are mostly lost in bfloat16's 8 bits."""
ADAPTERS_HARDLY_MOVE_BELOW = 5e-5


def quantised_without_adapter(case: Case) -> Problem | None:
    """Quantised weights have no gradient."""
    if not case.bits or case.run["use_peft"]:
        return None
    message = f"load_in_{case.bits}bit without use_peft: quantised weights cannot be trained themselves."
    return error("qlora", message, "Add use_peft: true.")


def quantised_without_compute_type(case: Case) -> Problem | None:
    """TRL passes `dtype` on as 4-bit's compute type, and "auto" is none: BitsAndBytesConfig raises."""
    if case.bits != 4 or case.dtype != "auto":
        return None
    message = "load_in_4bit with dtype auto: dtype is also the type that 4-bit layers compute in, and auto names none."
    return error("qlora", message, "Write dtype: bfloat16.")


def quantised_computes_in_float32(case: Case) -> Problem | None:
    """`ModelConfig.dtype` is float32 by default, and sets the compute type."""
    if case.bits != 4 or case.dtype != "float32" or case.on_cpu:
        return None
    message = (
        "4-bit layers compute in float32, because dtype is float32 (TRL's default): several times slower on a GPU."
    )
    return warning("qlora", message, "Write dtype: bfloat16.")


def storage_that_fsdp_cannot_divide(case: Case) -> Problem | None:
    """FSDP divides only floating-point storage: accelerate 1.15 leaves the rest out, with one warning."""
    if case.bits != 4 or not case.engine.startswith("fsdp"):
        return None
    storage = case.run["bnb_4bit_quant_storage"]
    if str(storage) == case.dtype:
        return None
    message = (
        f"bnb_4bit_quant_storage is {shown(storage or 'uint8 (the default)', 40)} and dtype {case.dtype}: under FSDP "
        "the 4-bit weights stay whole on every GPU, with only a warning."
    )
    return error("qlora+fsdp", message, f"Write bnb_4bit_quant_storage: {case.dtype}.")


def quantised_loading_by_one_process(case: Case) -> Problem | None:
    """With memory-saving loading only the first process has weights to quantise."""
    on = str(case.launch.fsdp.get("cpu_ram_efficient_loading", True)).lower() == "true"
    if not case.bits or not case.is_fsdp2 or not on:
        return None
    message = (
        f"fsdp_cpu_ram_efficient_loading is on in {case.launch.name} (the launcher's default), with 4-bit weights."
    )
    return warning("qlora+fsdp", message, "Write fsdp_cpu_ram_efficient_loading: false.")


def quantised_under_zero3(case: Case) -> Problem | None:
    """What TRL and DeepSpeed do by themselves with QLoRA under ZeRO-3."""
    if not case.bits or case.engine != "zero3":
        return None
    parts = []
    if case.bits == 4 and case.run["bnb_4bit_quant_storage"] is None:
        parts.append("bnb_4bit_quant_storage is not set, bfloat16 is the convention (uint8 trained alike when tried)")
    if case.checkpointing and case.checkpointing_kwargs.get("use_reentrant") is False:
        parts.append("TRL forces use_reentrant to true here, whatever gradient_checkpointing_kwargs say")
    if not parts:
        return None
    fix = "Write bnb_4bit_quant_storage: bfloat16, and leave use_reentrant out."
    return note("qlora+zero3", f"QLoRA under ZeRO-3: {'; '.join(parts)}.", fix)


def reentrant_checkpointing_under_ddp(case: Case) -> Problem | None:
    """DDP meets adapter weights twice in a reentrant backward: "mark a variable ready only once"."""
    if case.engine != "ddp" or not case.checkpointing or not case.run["use_peft"]:
        return None
    if case.checkpointing_kwargs.get("use_reentrant") is not True:
        return None
    message = "use_reentrant: true with adapters under DDP fails: Expected to mark a variable ready only once."
    return error("lora+ddp", message, "Write gradient_checkpointing_kwargs: {use_reentrant: false}.")


def low_precision_weights_hardly_move(case: Case) -> Problem | None:
    """Without float32 master weights, updates at usual learning rates are smaller than bfloat16's steps."""
    if case.run["use_peft"] or case.engine not in ("one_process", "ddp") or case.dtype not in ("bfloat16", "auto"):
        return None
    if case.learning_rate >= HARDLY_MOVES_BELOW:
        return None
    name = "bfloat16" if case.dtype == "bfloat16" else "the checkpoint's type (dtype auto), which is mostly bfloat16,"
    message = (
        f"Weights in {name} hardly move at learning_rate {case.learning_rate:g} without master weights: 1.9 % of a "
        "projection changed in 20 steps at 1e-6, against 100 % in float32."
    )
    return warning("precision", message, "Write dtype: float32 and bf16: true; or train with ZeRO or FSDP2.")


def adapters_of_quantised_models_hardly_move(case: Case) -> Problem | None:
    """TRL casts QLoRA's adapters to bfloat16, whose steps are larger than small updates."""
    if not case.bits or not case.run["use_peft"] or case.learning_rate >= ADAPTERS_HARDLY_MOVE_BELOW:
        return None
    if case.engine not in ("one_process", "ddp"):
        return None
    message = (
        f"TRL casts QLoRA's adapters to bfloat16; at learning_rate {case.learning_rate:g} updates may be lost (2 % of "
        "lora_A changed at 1e-5, against 100 % with plain LoRA's float32 adapters; a tiny model exaggerates this)."
    )
    problem = warning if case.learning_rate <= HARDLY_MOVES_BELOW else note
    return problem("qlora", message, "Raise the learning rate (5e-5 or more), or train plain LoRA.")


def half_precision_weights_with_scaler(case: Case) -> Problem | None:
    """The gradient scaler of fp16 refuses weights that are fp16 themselves."""
    if (
        not case.run["fp16"]
        or case.dtype != "float16"
        or case.run["use_peft"]
        or case.engine not in ("one_process", "ddp")
    ):
        return None
    message = "fp16: true with dtype float16 stops with: Attempting to unscale FP16 gradients."
    return error("precision", message, "Write dtype: float32.")


def one_target_read_as_a_pattern(case: Case) -> Problem | None:
    """TRL unwraps a list of one target, and PEFT reads a string as a regular expression of a whole name."""
    targets = case.run["lora_target_modules"]
    if isinstance(targets, list | tuple) and len(targets) == 1:
        targets = targets[0]
    if not case.run["use_peft"] or not isinstance(targets, str) or not targets.isidentifier():
        return None
    message = f"lora_target_modules with {targets!r} alone becomes a text, which PEFT reads as a regular expression"
    fix = rf"Write lora_target_modules: '.*\.{targets}', or name two."
    if case.run.script is not None and case.run.script.is_recipe:
        return note("lora", f"{message}; the recipe mends it, TRL's own scripts fail.", fix)
    return error("lora", f"{message} and finds nothing.", fix)


def lora_targets_that_the_model_lacks(case: Case) -> Problem | None:
    """PEFT raises where no target is found, and drops single ones without a word."""
    if not case.run["use_peft"] or case.shape is None or case.run.get("lora_target_parameters"):
        return None
    from .model_shape import missing_targets

    targets = case.run["lora_target_modules"]
    if isinstance(targets, list | tuple) and len(targets) == 1:
        targets = targets[0]
    if isinstance(targets, str) and targets.isidentifier():
        targets = [targets]  # the rule above speaks of the pattern
    missing = missing_targets(case.shape, targets)
    if not missing:
        return None
    told = [f"{shown(m.target, 60)} ({m.reason})" for m in missing]
    near = sorted({name for m in missing for name in m.near})
    count = 1 if targets is None or isinstance(targets, str) else len(set(targets))
    message = f"lora_target_modules that {shown(case.run['model_name_or_path'], 80)} lacks: {'; '.join(told)}."
    fix = f"Did you mean {', '.join(near)}? " if near else ""
    problem = error if len(missing) >= count else warning
    return problem("lora", message, f"{fix}all-linear takes every linear layer.")


def adapter_on_the_head(case: Case) -> Problem | None:
    """TRL computes log-probabilities from `lm_head.weight` directly, and refuses an adapter there."""
    targets = case.run["lora_target_modules"]
    names = targets if isinstance(targets, list | tuple) else [targets]
    if not case.run["use_peft"] or "lm_head" not in names:
        return None
    message = "lora_target_modules has lm_head: TRL refuses it, since that adapter would never be trained."
    return error("lora", message, "Take lm_head out.")


def flash_attention_cannot_run(case: Case) -> Problem | None:
    """Flash attention 2 is a package of its own, for GPUs from compute capability 8.0 on, in 16 bits."""
    asked = str(case.run["attn_implementation"] or "")
    if not asked.startswith("flash_attention"):
        return None
    subject, other = "attention", "Leave attn_implementation out (sdpa)."
    if case.on_cpu:
        return error(subject, f"attn_implementation {asked} on the CPU.", other)
    old = [d for d in case.environment.devices if d.capability is not None and d.capability < (8, 0)]
    if old:
        message = (
            f"attn_implementation {asked} needs compute capability 8.0; {old[0].name} has {_dotted(old[0].capability)}."
        )
        return error(subject, message, other)
    if asked == "flash_attention_2" and case.environment.version("flash-attn") is None:
        problem = warning if case.environment.elsewhere else error
        message = "attn_implementation flash_attention_2, but the package flash-attn is not installed here."
        return problem(subject, message, f"pip install flash-attn. {other}")
    if case.dtype == "float32" and not (case.run["bf16"] or case.run["fp16"]):
        return error(
            subject, f"attn_implementation {asked} computes in 16 bits; the run is in float32.", "Set bf16: true."
        )
    return None


def bfloat16_on_an_old_gpu(case: Case) -> Problem | None:
    """bfloat16 is from compute capability 8.0 on; transformers refuses it before."""
    old = [d for d in case.environment.devices if d.capability is not None and d.capability < (8, 0)]
    if not old or case.on_cpu or not (case.run["bf16"] or case.dtype == "bfloat16"):
        return None
    message = f"bfloat16 needs compute capability 8.0; {old[0].name} has {_dotted(old[0].capability)}."
    return error("precision", message, "Write bf16: false, fp16: true, dtype: float32; or use a newer GPU.")


def completions_longer_than_the_model(case: Case) -> Problem | None:
    """Prompt and completion have to fit into the model's positions."""
    if case.shape is None or not case.shape.context:
        return None
    length, context = int(case.run["max_completion_length"]), case.shape.context
    if length < context:
        return None
    message = f"max_completion_length {length:,} leaves no room for a prompt: the model has {context:,} positions."
    return error("length", message, f"Keep it well under {context:,}.")


def quantised_repacks_on_this_cpu(case: Case) -> Problem | None:
    """bitsandbytes packs 4-bit weights for inference on CPUs with AVX512-BF16, which cuts the gradient."""
    if case.bits != 4 or not case.environment.avx512bf16 or not (case.on_cpu or not case.environment.devices):
        return None
    if case.run.script is not None and case.run.script.is_recipe:
        return None  # it prevents that
    message = (
        "On this CPU (AVX512-BF16) bitsandbytes repacks 4-bit weights at the first generation, and what is below such "
        "a layer gets no gradient, with one warning."
    )
    return warning("qlora+cpu", message, "Set support_avx512bf16_for_cpu = False on the layers, as the recipes do.")


def _dotted(capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, capability or ()))


RULES: tuple[Rule, ...] = (
    quantised_without_adapter,
    quantised_without_compute_type,
    quantised_computes_in_float32,
    storage_that_fsdp_cannot_divide,
    quantised_loading_by_one_process,
    quantised_under_zero3,
    reentrant_checkpointing_under_ddp,
    low_precision_weights_hardly_move,
    adapters_of_quantised_models_hardly_move,
    half_precision_weights_with_scaler,
    one_target_read_as_a_pattern,
    lora_targets_that_the_model_lacks,
    adapter_on_the_head,
    flash_attention_cannot_run,
    bfloat16_on_an_old_gpu,
    completions_longer_than_the_model,
    quantised_repacks_on_this_cpu,
)
