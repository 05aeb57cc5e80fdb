"""Estimates against what real training steps of tiny models hold, save and write, and against sums by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TrainerCallback
from transformers import TrainingArguments as Arguments
from transformers.trainer import Trainer

from tests.support import prompts, save_tiny_model
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.launch.doctor.known_models import known_config
from trl_grpo_ext.launch.doctor.memory import STAGES, LoRA, MemoryEstimate, MemorySetup, estimate
from trl_grpo_ext.launch.doctor.memory_setup import Holding
from trl_grpo_ext.launch.doctor.memory_states import OPTIMIZERS, optimizer_bytes, optimizer_states
from trl_grpo_ext.launch.doctor.model_shape import shape_of

ROWS = 8
COMPLETION = 24
WIDE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
"""Wide enough for the terms of a layer to outweigh the masks and single numbers that no formula counts."""


def tiny_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(
        **{**WIDE, "num_key_value_heads": 2, "vocab_size": 43, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        | {"max_position_embeddings": 128, "tie_word_embeddings": False, **changes}
    )


SHAPE = shape_of(tiny_config())


def item(result: MemoryEstimate, name: str) -> int:
    found = [i.bytes for i in (*result.device_items, *result.host_items, *result.disk_items) if i.name == name]
    assert len(set(found)) <= 1, f"{name} is there with {found}"
    return found[0] if found else 0


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Bytes by storage: shared ones count once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


class Watching(GRPOExtTrainer):
    """A real trainer that counts what autograd saves in its forward pass, and what is there when it steps."""

    seen: dict[str, Any]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        kept: list[torch.Tensor] = []
        fixed = storages([*model.parameters(), *model.buffers(), *(v for v in inputs.values() if torch.is_tensor(v))])

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.seen["saved"] = sum(size for place, size in storages(kept).items() if place not in fixed)
        self.seen["prompt_length"] = inputs["prompt_ids"].shape[1]
        self.seen["completion_length"] = inputs["completion_ids"].shape[1]
        return loss


class AtTheStep(TrainerCallback):
    def __init__(self, seen: dict[str, Any]) -> None:
        self.seen = seen

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        self.seen["trained"] = sum(p.numel() for p in trained)
        self.seen["gradients"] = sum(storages([p.grad for p in trained if p.grad is not None]).values())


def weights_of(model: Any) -> tuple[int, int]:
    """Bytes of the base's weights, with the constants of 4-bit ones, and of the adapters."""
    base, adapters = [], []
    for name, parameter in model.named_parameters():
        (adapters if "lora_" in name else base).append(parameter.data)
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            base.append(state.absmax)
            if state.nested:
                base.append(state.state2.absmax)
    return sum(storages(base).values()), sum(storages(adapters).values())


CASES: dict[str, MemorySetup] = {
    "float32": MemorySetup(),
    "bfloat16": MemorySetup(dtype="bfloat16"),
    "autocast": MemorySetup(precision="bf16"),
    "lora": MemorySetup(lora=LoRA(rank=4, dropout=0.0)),
    "lora_bf16_dropout": MemorySetup(dtype="bfloat16", precision="bf16", lora=LoRA(rank=4, dropout=0.05)),
    "lora_two_targets": MemorySetup(lora=LoRA(rank=4, targets=("q_proj", "down_proj"), dropout=0.0)),
    "qlora_nested": MemorySetup(
        dtype="bfloat16",
        precision="bf16",
        quantisation="4bit",
        nested_quantisation=True,
        lora=LoRA(rank=4, dropout=0.0),
    ),
    "qlora": MemorySetup(dtype="bfloat16", precision="bf16", quantisation="4bit", lora=LoRA(rank=4, dropout=0.0)),
    "eager": MemorySetup(attention="eager"),
    "eager_bf16": MemorySetup(attention="eager", dtype="bfloat16"),
}


def train(
    folder: Path,
    setup: MemorySetup,
    checkpointing: bool,
    trainer_class: type[Watching] = Watching,
    accumulation: int = 1,
    **sizes: int,
) -> tuple[dict[str, Any], Watching]:
    save_tiny_model(folder / "model")
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config(eos_token_id=1, **sizes)).save_pretrained(folder / "model")
    quantisation = None
    if setup.quantisation == "4bit":
        quantisation = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=setup.nested_quantisation,
        )
    adapter = None
    if (lora := setup.lora) is not None:
        targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets or ())
        adapter = peft.LoraConfig(r=lora.rank, target_modules=targets, lora_dropout=lora.dropout, task_type="CAUSAL_LM")
    seen: dict[str, Any] = {}
    trainer = trainer_class(
        model=str(folder / "model"),
        args=GRPOExtConfig(
            output_dir=str(folder / "out"),
            use_cpu=True,
            bf16=setup.precision == "bf16",
            model_init_kwargs={"dtype": setup.dtype, "attn_implementation": setup.attention},
            gradient_checkpointing=checkpointing,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=accumulation,
            num_generations=4,
            max_completion_length=COMPLETION,
            max_steps=1,
            save_steps=1,
            learning_rate=1e-3,
            optim=setup.optim,
            report_to="none",
            disable_tqdm=True,
        ),
        reward_funcs=[lambda completions, **_: [float(i) for i in range(len(completions))]],
        train_dataset=prompts(),
        quantization_config=quantisation,
        peft_config=adapter,
        callbacks=[AtTheStep(seen)],
    )
    trainer.seen = seen
    for module in trainer.model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # else bitsandbytes packs 4-bit weights for inference alone
    trainer.train()
    return seen, trainer


def as_run(setup: MemorySetup, seen: dict[str, Any], checkpointing: bool) -> MemorySetup:
    """The setup with the lengths that the run had."""
    return replace(
        setup,
        on_gpu=False,
        scores=False,
        per_device_train_batch_size=ROWS,
        generation_rows=ROWS,
        prompt_length=seen["prompt_length"],
        completion_length=seen["completion_length"],
        gradient_checkpointing=checkpointing,
    )


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [(name, False) for name in CASES] + [("float32", True), ("autocast", True), ("qlora", True)],
)
@pytest.mark.filterwarnings("ignore")
def test_a_real_step_holds_saves_and_writes_what_was_estimated(name: str, checkpointing: bool, tmp_path: Path) -> None:
    setup = CASES[name]
    seen, trainer = train(tmp_path, setup, checkpointing)
    result = estimate(SHAPE, as_run(setup, seen, checkpointing))
    assert result.trainable == seen["trained"]
    base, adapters = weights_of(trainer.model)
    assert item(result, "weights") == pytest.approx(base, rel=0.005)
    assert item(result, "LoRA adapters") == adapters
    assert item(result, "gradients") == seen["gradients"]
    states = [value for state in trainer.optimizer.state.values() for value in state.values() if value.dim() > 0]
    on_device, on_disk = optimizer_items(result)
    assert on_device == on_disk == sum(storages(states).values())
    assert item(result, "KV cache") == pytest.approx(cache_of(trainer, seen), rel=0.001)
    # What the forward pass saves: the layers, the copies that autocast made, the head's input for every position.
    assert ("16-bit copies" in {i.name for i in result.device_items}) == name.startswith(("autocast", "lora_bf16"))
    tokens = ROWS * (seen["prompt_length"] + seen["completion_length"])
    expected = item(result, "activations") + tokens * SHAPE.hidden * (2 if setup.dtype == "bfloat16" else 4)
    expected += 0 if checkpointing else item(result, "16-bit copies")
    assert seen["saved"] == pytest.approx(expected, rel=0.08)

    files = {file.name: file.stat().st_size for file in (tmp_path / "out" / "checkpoint-1").iterdir()}
    written = files.get("model.safetensors", files.get("adapter_model.safetensors", 0))
    # Beyond the numbers a file holds their names, as many for a large model as for a small one.
    assert 0 <= written - item(result, "model") - item(result, "adapter") < 8_000
    assert 0 <= files["optimizer.pt"] - on_disk < 40_000


class Caching(Watching):
    """Records the type of the cache while it generates in training."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        def look(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            layer = output.past_key_values.layers[0]
            self.seen.setdefault("cache types", set()).update({layer.keys.dtype, layer.values.dtype})

        hook = self.model.model.register_forward_hook(look, with_kwargs=True)
        completions = super()._generate_single_turn(*args, **kwargs)
        hook.remove()
        return completions


def test_generation_in_training_runs_in_the_type_of_the_weights(tmp_path: Path) -> None:
    seen, _ = train(tmp_path, CASES["autocast"], False, Caching)
    assert seen["cache types"] == {torch.float32}


def cache_of(trainer: Watching, seen: dict[str, Any]) -> float:
    """Bytes of a real generation's cache; it never holds the last token, which is added here."""
    ids = torch.full((ROWS, seen["prompt_length"]), 5)
    new = seen["completion_length"]
    trainer.model.eval()
    done = trainer.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        return_dict_in_generate=True,
    )
    layers = done.past_key_values.layers
    assert layers[0].keys.shape[2] == ids.shape[1] + new - 1
    held = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
    return held * (ids.shape[1] + new) / (ids.shape[1] + new - 1)


def optimizer_items(result: MemoryEstimate) -> tuple[int, int]:
    device = [i.bytes for i in result.device_items if i.name == "optimizer states"]
    disk = [i.bytes for i in result.disk_items if i.name == "optimizer states"]
    return sum(device), sum(disk)


class Profiling(Watching):
    """Counts allocations of the forward and backward pass alone, without generation."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return GRPOExtTrainer.compute_loss(self, model, inputs, *args, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        ready = self._prepare_inputs(inputs)
        self.seen["prompt_length"] = ready["prompt_ids"].shape[1]
        self.seen["completion_length"] = ready["completion_ids"].shape[1]
        self._prepare_inputs = lambda _: ready  # type: ignore[method-assign]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss = super().training_step(model, inputs, *args)
        del self._prepare_inputs
        events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            most = max(most, held)
        self.seen["peak"] = most
        return loss


BROAD = {"intermediate_size": 8192, "num_hidden_layers": 2}
"""So that the layers take more than the tile of logits, which is 32,768 wide whatever the vocabulary."""


@pytest.mark.parametrize(
    ("name", "checkpointing", "sizes"),
    [
        ("bfloat16", False, {}),
        ("qlora", True, {}),
        ("float32", False, BROAD),
        ("float32", True, BROAD),
        ("autocast", True, BROAD),
        ("lora_bf16_dropout", False, BROAD),
        ("lora_bf16_dropout", True, BROAD),
    ],
    ids=lambda value: ("layers" if value else "head") if isinstance(value, dict) else str(value),
)
@pytest.mark.filterwarnings("ignore")
def test_the_peak_of_a_real_update_is_what_was_estimated(
    name: str, checkpointing: bool, sizes: dict[str, int], tmp_path: Path
) -> None:
    # Two micro-batches: in the second, which is the one that counts, the gradients of the first are there.
    seen, _ = train(tmp_path, CASES[name], checkpointing, Profiling, accumulation=2, **sizes)
    shape = shape_of(tiny_config(**sizes))
    result = estimate(shape, as_run(CASES[name], seen, checkpointing))
    before = sum(item(result, held) for held in ("weights", "LoRA adapters", "gradients"))
    before += optimizer_items(result)[0]
    ratio = (result.device_bytes["update"] - before) / seen["peak"]
    assert 0.95 < ratio < 1.25


ON_THE_CPU = [
    *("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "rmsprop", "adagrad", "adamw_bnb_8bit", "lion_8bit"),
    *("lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit", "ademamix", "ademamix_8bit", "rmsprop_bnb"),
]


@pytest.mark.parametrize("name", ON_THE_CPU)
@pytest.mark.filterwarnings("ignore")
def test_a_real_optimizer_keeps_what_was_estimated(name: str, tmp_path: Path) -> None:
    # Every matrix has over 4,096 entries: below that bitsandbytes keeps 32 bits.
    config = tiny_config(hidden_size=128, vocab_size=256)
    model = LlamaForCausalLM(config)
    args = Arguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, optim=name, report_to="none")
    optimizer = Trainer(model=model, args=args).create_optimizer()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    # Not the tables of 256 values that all 8-bit states share.
    kept = [value for state in optimizer.state.values() for key, value in state.items() if not key.startswith("qmap")]
    held = sum(storages([value for value in kept if torch.is_tensor(value) and value.dim() > 0]).values())
    estimated = optimizer_bytes(Holding(MemorySetup(optim=name), shape_of(config)))
    assert estimated == pytest.approx(held, rel=0.01)
    assert (held == 0) == (name == "sgd")


def test_every_optimizer_name_of_the_table_is_one_of_transformers() -> None:
    from transformers.training_args import OptimizerNames

    assert set(OPTIMIZERS) <= {member.value for member in OptimizerNames}
    assert not optimizer_states("galore_adamw").known
    result = estimate(SHAPE, MemorySetup(optim="galore_adamw"))
    assert "not in the table" in next(i.assumption for i in result.device_items if i.name == "optimizer states")


# ---------------------------------------------------------------------------------------------- by hand

SEVEN = shape_of(known_config("Qwen/Qwen2.5-7B-Instruct"))
P = 7_615_616_512


def test_seven_billion_weights_with_zero_3_on_eight_devices() -> None:
    setup = MemorySetup(processes=8, processes_per_node=8, engine="zero3", dtype="bfloat16", precision="bf16")
    result = estimate(SEVEN, setup)
    assert item(result, "weights") == 2 * P // 8
    assert item(result, "master weights") == 4 * P // 8
    assert item(result, "gradients") == 2 * P // 8
    assert item(result, "gradients in float32") == 4 * P // 8
    assert optimizer_items(result)[0] == 8 * P // 8
    assert item(result, "gradient buckets") == 2 * 500_000_000
    gathered = {i.stages: i.bytes for i in result.device_items if i.name == "gathered weights"}
    assert gathered == {("generation",): 2 * P, ("scoring", "update"): 2 * 10**9}
    assert item(result, "model") == 2 * P
    assert optimizer_items(result)[1] == (4 + 8) * P
    assert result.checkpoint_bytes == 14 * P
    assert item(result, "weights being loaded") == 8 * 2 * P
    assert item(result, "weights being saved") == 2 * P


def test_offloading_moves_the_optimizer_to_the_machine() -> None:
    setup = MemorySetup(processes=8, processes_per_node=4, engine="zero3", dtype="bfloat16", precision="bf16")
    here = estimate(SEVEN, setup)
    there = estimate(SEVEN, replace(setup, offload_optimizer=True, offload_parameters=True))
    gone = ("weights", "master weights", "gradients", "gradients in float32")
    assert all(item(here, name) and not item(there, name) for name in gone)
    assert optimizer_items(there)[0] == 0
    assert item(there, "offloaded optimizer") == (8 + 8) * P // 2  # half of the processes are on this machine
    assert item(there, "offloaded weights") == 2 * P // 2
    assert there.peak_bytes < here.peak_bytes
    assert there.checkpoint_bytes == here.checkpoint_bytes


@pytest.mark.parametrize(
    ("engine", "weights", "gradients", "states"),
    [
        ("one_process", 4 * P, 4 * P, 8 * P),
        ("ddp", 4 * P, 4 * P, 8 * P),
        ("zero1", 2 * P, 2 * P, 8 * P // 4),
        ("zero2", 2 * P, 2 * P // 4, 8 * P // 4),
        ("fsdp2", 4 * P // 4, 4 * P // 4, 8 * P // 4),
        ("fsdp2_hybrid", 4 * P // 2, 4 * P // 2, 8 * P // 2),
    ],
)
def test_what_each_engine_splits(engine: Any, weights: int, gradients: int, states: int) -> None:
    result = estimate(SEVEN, MemorySetup(processes=4, processes_per_node=2, engine=engine, precision="bf16"))
    assert (item(result, "weights"), item(result, "gradients")) == (weights, gradients)
    assert optimizer_items(result)[0] == states
    if engine == "ddp":
        assert item(result, "gradient buckets") == 4 * P


def test_four_bit_weights_by_hand() -> None:
    lora = LoRA(rank=16, targets=("q_proj",))
    setup = MemorySetup(quantisation="4bit", dtype="bfloat16", precision="bf16", lora=lora)
    linear = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    rest = 2 * (P - linear)
    assert item(estimate(SEVEN, setup), "weights") == linear // 2 + linear // 64 * 4 + rest
    nested = estimate(SEVEN, replace(setup, nested_quantisation=True))
    assert item(nested, "weights") == pytest.approx(linear / 2 + linear / 64 * (1 + 4 / 256) + rest, abs=8)
    assert item(nested, "LoRA adapters") == 2 * 28 * 16 * (3584 + 3584)
    eight = item(estimate(SEVEN, replace(setup, quantisation="8bit")), "weights")
    assert eight == linear + 4 * 28 * (2 * 3584 + 2 * 512 + 2 * 18944 + 3584) + rest


def test_four_bit_weights_of_an_integer_type_stay_whole_under_fsdp() -> None:
    setup = MemorySetup(
        processes=4,
        processes_per_node=4,
        engine="fsdp2",
        quantisation="4bit",
        dtype="bfloat16",
        precision="bf16",
        lora=LoRA(),
    )
    whole, split = estimate(SEVEN, setup), estimate(SEVEN, replace(setup, quant_storage="bfloat16"))
    quantised = Holding(setup, SEVEN).quantised_bytes
    assert item(whole, "weights") - item(split, "weights") == pytest.approx(quantised * 3 / 4, abs=4)


def test_a_reference_model_is_a_second_one() -> None:
    result = estimate(SEVEN, MemorySetup(dtype="bfloat16", reference_model=True))
    assert item(result, "reference model") == 2 * P
    assert item(estimate(SEVEN, MemorySetup(dtype="bfloat16")), "reference model") == 0


def test_logits_are_held_whole_only_before_trl_1_15() -> None:
    setup = MemorySetup(per_device_train_batch_size=16, completion_length=1024, precision="bf16")
    tiles, whole = estimate(SEVEN, setup), estimate(SEVEN, replace(setup, full_logits=True))
    assert item(whole, "logits") == 16 * 1024 * 152_064 * (2 + 4 + 4)
    assert item(tiles, "logits (tiles)") == 4096 * 32_768 * 2 + 32_768 * 3584 * 2
    assert item(tiles, "head's gradient in float32") == 152_064 * 3584 * 8


def test_vllm_takes_its_share_and_gives_it_back_asleep() -> None:
    setup = MemorySetup(vllm="colocate", vllm_memory_share=0.25, device_memory=80 * 10**9, dtype="bfloat16")
    awake, asleep = estimate(SEVEN, setup), estimate(SEVEN, replace(setup, vllm_sleeps=True))
    assert item(awake, "vLLM") == item(asleep, "vLLM") == 20 * 10**9
    assert awake.device_bytes["update"] - asleep.device_bytes["update"] == 20 * 10**9
    assert awake.device_bytes["generation"] == asleep.device_bytes["generation"]
    assert item(awake, "KV cache") == 0
    unknown = estimate(SEVEN, replace(setup, device_memory=None))
    assert item(unknown, "vLLM") > 2 * P
    server = estimate(SEVEN, replace(setup, vllm="server"))
    assert item(server, "vLLM") == item(server, "KV cache") == 0


def test_stages_add_up_and_of_two_moments_the_larger_counts() -> None:
    result = estimate(SEVEN, MemorySetup(dtype="bfloat16", processes=2, processes_per_node=2, engine="ddp"))
    for stage in STAGES:
        moments: dict[str, int] = {}
        for one in result.of_stage(stage):
            moments[one.moment] = moments.get(one.moment, 0) + one.bytes
        common = moments.pop("", 0)
        assert result.device_bytes[stage] == common + max(moments.values(), default=0)
    assert result.peak_bytes == max(result.device_bytes.values()) == result.device_bytes[result.peak_stage]
    reserve = next(i.bytes for i in result.of_stage("loading") if i.name == "reserve")
    assert reserve == pytest.approx(0.1 * item(result, "weights"), rel=1e-6)


SETUPS = st.builds(
    MemorySetup,
    processes=st.sampled_from([1, 2, 8]),
    processes_per_node=st.sampled_from([1, 2]),
    engine=st.sampled_from(["one_process", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "fsdp2_hybrid"]),
    offload_optimizer=st.booleans(),
    offload_parameters=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    precision=st.sampled_from(["no", "bf16", "fp16"]),
    quantisation=st.sampled_from(["none", "4bit", "8bit"]),
    lora=st.builds(LoRA, rank=st.integers(1, 8), targets=st.sampled_from(["all-linear", ("q_proj",), "no such", None])),
    optim=st.sampled_from([*sorted(OPTIMIZERS), "adafactor", "unheard_of"]),
    per_device_train_batch_size=st.integers(1, 9),
    prompt_length=st.integers(0, 50),
    completion_length=st.integers(0, 50),
    generation_rows=st.integers(0, 20),
    gradient_checkpointing=st.booleans(),
    use_liger_kernel=st.booleans(),
    reference_model=st.booleans(),
    scores=st.booleans(),
    vllm=st.sampled_from(["no", "colocate", "server"]),
    attention=st.sampled_from(["sdpa", "eager", "flash_attention_2"]),
    on_gpu=st.booleans(),
    full_logits=st.booleans(),
    save_only_model=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(setup=SETUPS, full=st.booleans())
def test_every_setup_has_an_estimate_whose_items_say_what_they_rest_on(setup: MemorySetup, full: bool) -> None:
    if full and setup.quantisation == "none":
        setup = replace(setup, lora=None)
    result = estimate(SHAPE, setup)
    for one in (*result.device_items, *result.host_items, *result.disk_items):
        assert one.bytes > 0
        assert isinstance(one.bytes, int)
        assert one.stages
        assert one.assumption.endswith(".")
        assert len(one.assumption) > 20
    assert result.checkpoint_bytes <= result.disk_bytes
    longer = estimate(SHAPE, replace(setup, completion_length=setup.completion_length + 10))
    assert longer.peak_bytes >= result.peak_bytes
    more = estimate(SHAPE, replace(setup, per_device_train_batch_size=setup.per_device_train_batch_size + 1))
    assert more.device_bytes["update"] >= result.device_bytes["update"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": "zero4"}, "engine is 'zero4'"),
        ({"dtype": "auto"}, "dtype is 'auto'"),
        ({"precision": "fp8"}, "precision"),
        ({"processes": 0}, "processes is 0"),
        ({"prompt_length": -1}, "prompt_length is -1"),
        ({"quantisation": "4bit"}, "set lora"),
    ],
)
def test_a_setup_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        MemorySetup(**changes)


def test_the_modules_load_without_torch() -> None:
    code = (
        "import sys; from trl_grpo_ext.launch.doctor import batch, known_models, memory, model_shape, problem; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
