"""What memory depends on besides the model, and the types in which a run holds its numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from ...errors import ConfigurationError
from .model_shape import ModelShape, Targets, lora_parameters

Engine = Literal["one_process", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "fsdp2_hybrid"]
Precision = Literal["no", "bf16", "fp16"]
DType = Literal["float32", "bfloat16", "float16"]
Attention = Literal["sdpa", "flash_attention_2", "eager"]
Stage = Literal["loading", "generation", "scoring", "update", "step", "saving"]

STAGES: tuple[Stage, ...] = get_args(Stage)
"""In order. `update` is forward and backward passes, `step` the optimizer's; scoring is old and reference policy."""

BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class LoRA:
    """Adapters, with the defaults of TRL's `ModelConfig` except the targets. Rank 0 would be none: use None instead."""

    rank: int = 16
    targets: Targets = "all-linear"
    dropout: float = 0.05


@dataclass(frozen=True)
class MemorySetup:
    """A run as far as memory goes. Lengths are in tokens, rows are completions with their prompts.

    Attributes:
        processes: Of the whole job.
        processes_per_node: On one machine.
        engine: What splits the work.
        offload_optimizer: ZeRO: master weights, optimizer states and gradients in the machine's memory.
        offload_parameters: ZeRO-3: the weights too.
        dtype: In which the weights are loaded (`dtype` of TRL's ModelConfig).
        precision: `bf16` or `fp16` of the training arguments.
        quantisation: bitsandbytes: 4-bit, 8-bit or none.
        nested_quantisation: `use_bnb_nested_quant`.
        quant_storage: `bnb_4bit_quant_storage`; uint8 where it is not set.
        lora: Adapters; None trains all weights.
        optim: As in `TrainingArguments.optim`.
        per_device_train_batch_size: Rows of a micro-batch.
        prompt_length: Of the longest prompt.
        completion_length: `max_completion_length`.
        generation_rows: Rows that one process generates at once (`generation_batch_size` divided by processes).
        gradient_checkpointing: As in TrainingArguments (TRL's default is on), or FSDP's own.
        use_liger_kernel: Liger's layers; TRL leaves its fused loss off.
        reference_model: A second model is held: `beta` above 0 and no adapter.
        scores: A scoring pass happens: `beta` above 0, old log-probabilities, or vLLM with its correction.
        gather_for_generation: `ds3_gather_for_generation` (ZeRO-3).
        generation_inside_accumulation: New completions come before the optimizer step, so gradients wait meanwhile.
        vllm: "colocate" shares the device, "server" has its own.
        vllm_memory_share: `vllm_gpu_memory_utilization`.
        vllm_sleeps: `vllm_enable_sleep_mode`.
        vllm_tensor_parallel: Devices that share one copy of vLLM's weights.
        device_memory: Bytes of one device; None where unknown. Only vLLM's share depends on it.
        attention: Implementation of attention.
        on_gpu: Compute on a GPU; False leaves out the CUDA context and the reserve.
        full_logits: The whole logits are held, as before TRL 1.15 (since then TRL projects them in tiles).
        reduce_bucket_size: ZeRO's, in elements. DeepSpeed's default; `auto` makes it hidden size squared.
        full_state_dict: FSDP saves one whole file (`FULL_STATE_DICT`, accelerate's default), not shards.
        zero3_save_16bit_model: ZeRO-3 also saves whole 16-bit weights.
        cpu_ram_efficient_loading: FSDP: only one process of a job reads the weights.
        save_total_limit: Checkpoints kept; None keeps all, and one is counted.
        save_only_model: Checkpoints without optimizer states.
    """

    processes: int = 1
    processes_per_node: int = 1
    engine: Engine = "one_process"
    offload_optimizer: bool = False
    offload_parameters: bool = False
    dtype: DType = "float32"
    precision: Precision = "no"
    quantisation: Literal["none", "4bit", "8bit"] = "none"
    nested_quantisation: bool = False
    quant_storage: str = "uint8"
    lora: LoRA | None = None
    optim: str = "adamw_torch_fused"
    per_device_train_batch_size: int = 8
    prompt_length: int = 512
    completion_length: int = 512
    generation_rows: int = 8
    gradient_checkpointing: bool = True
    use_liger_kernel: bool = False
    reference_model: bool = False
    scores: bool = True
    gather_for_generation: bool = True
    generation_inside_accumulation: bool = False
    vllm: Literal["no", "colocate", "server"] = "no"
    vllm_memory_share: float = 0.3
    vllm_sleeps: bool = False
    vllm_tensor_parallel: int = 1
    device_memory: int | None = None
    attention: Attention = "sdpa"
    on_gpu: bool = True
    full_logits: bool = False
    reduce_bucket_size: int = 500_000_000
    full_state_dict: bool = True
    zero3_save_16bit_model: bool = True
    cpu_ram_efficient_loading: bool = True
    save_total_limit: int | None = None
    save_only_model: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigurationError: Names the setting, its value and what is allowed.
        """
        for name, allowed in (("engine", Engine), ("dtype", DType), ("precision", Precision), ("attention", Attention)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(allowed))}."
                )
        for name in ("processes", "processes_per_node", "per_device_train_batch_size", "vllm_tensor_parallel"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("prompt_length", "completion_length", "generation_rows", "reduce_bucket_size"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it cannot be negative.")
        if self.quantisation != "none" and self.lora is None:
            raise ConfigurationError("Quantised weights cannot be trained themselves: set lora.")


@dataclass(frozen=True)
class MemoryItem:
    """Bytes that a run holds, when, and the assumption with its formula.

    Items of one stage add up, except those of different moments in it: of these the larger moment counts (the head's
    buffers are free again when the layers run backward).
    """

    name: str
    bytes: int
    stages: tuple[Stage, ...]
    assumption: str
    moment: Literal["", "head", "layer"] = ""


@dataclass(frozen=True)
class Holding:
    """How a run holds its numbers: bytes of each kind of number, and how many processes share them."""

    setup: MemorySetup
    shape: ModelShape
    trainable: int = field(init=False)

    def __post_init__(self) -> None:
        lora = self.setup.lora
        count = self.shape.parameters if lora is None else lora_parameters(self.shape, lora.rank, lora.targets)
        object.__setattr__(self, "trainable", count)

    @property
    def deepspeed(self) -> bool:
        """Any stage of ZeRO."""
        return self.setup.engine.startswith("zero")

    @property
    def fsdp(self) -> bool:
        """Either version of FSDP."""
        return self.setup.engine.startswith("fsdp")

    @property
    def shards(self) -> int:
        """Processes over which FSDP or ZeRO splits; hybrid FSDP splits within a node and repeats over nodes."""
        return self.setup.processes_per_node if self.setup.engine == "fsdp2_hybrid" else self.setup.processes

    @property
    def weight_shards(self) -> int:
        """Processes over which the weights are split: ZeRO-3 and FSDP only."""
        return self.shards if self.fsdp or self.setup.engine == "zero3" else 1

    @property
    def loaded(self) -> int:
        """Bytes of one weight as it is loaded."""
        return BYTES[self.setup.dtype]

    @property
    def frozen(self) -> int:
        """Bytes of one weight that is not trained: DeepSpeed casts the whole model to its 16-bit type."""
        return 2 if self.deepspeed and self.setup.precision != "no" else self.loaded

    @property
    def trained(self) -> int:
        """Bytes of one trained number."""
        setup = self.setup
        if self.deepspeed and setup.precision != "no":
            return 2
        if self.fsdp and setup.precision != "no" and setup.quantisation != "4bit":
            return 4  # accelerate upcasts what is trained, unless there are 4-bit weights
        if setup.lora is None:
            return self.loaded
        if setup.quantisation != "none":
            return 2  # TRL casts the adapters of quantised models to bfloat16
        return (
            self.loaded if setup.engine == "zero3" else 4
        )  # PEFT's autocast_adapter_dtype; TRL turns it off for ZeRO-3

    @property
    def compute(self) -> int:
        """Bytes of a number in matrix products."""
        return 2 if self.setup.precision != "no" else self.loaded

    @property
    def residual(self) -> int:
        """Bytes of a number in the residual stream: the embedding's type, which autocast does not touch."""
        return self.compute if self.deepspeed or self.fsdp else self.frozen

    @property
    def autocasts(self) -> bool:
        """Torch's autocast is at work. DeepSpeed computes in its own type instead."""
        return self.setup.precision != "no" and not self.deepspeed

    @property
    def quantised_bytes(self) -> int:
        """All quantised matrices with their constants.

        4-bit: half a byte each, and for each block of 64 a float32, or nested a byte and a float32 for 256 blocks.
        8-bit: a byte each, and a float32 for each row.
        """
        entries = self.shape.quantisable_parameters
        if self.setup.quantisation == "8bit":
            return entries + 4 * sum(m.outputs for m in self.shape.quantisable)
        if self.setup.quantisation == "4bit":
            blocks = -(-entries // 64)
            constants = blocks + 4 * -(-blocks // 256) if self.setup.nested_quantisation else 4 * blocks
            return -(-entries // 2) + constants
        return 0

    def model_bytes(self, bytes_each: int, *, base_only: bool = False) -> int:
        """Bytes of the model's own weights, whole; without adapters, and quantised where it is.

        Args:
            bytes_each: Of a weight that is not quantised.
            base_only: For a second copy of the model that is loaded in the same way.
        """
        if self.setup.quantisation == "none" or (base_only and self.setup.lora is None):
            return self.shape.parameters * bytes_each
        rest = self.shape.parameters - self.shape.quantisable_parameters
        return self.quantised_bytes + rest * bytes_each
