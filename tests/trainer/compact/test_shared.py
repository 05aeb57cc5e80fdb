"""`share_prompts`: each prompt once gives the log-probabilities and the gradient of rows by themselves.

With a float64 forward to 1e-9, whatever the price says: prices here are made up, so that prompts are shared or not.
Trainings are in `test_trainings` and `test_parity`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch.nn.attention.flex_attention import flex_attention
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support import relative_gap
from tests.trainer.compact.runs import EXACT
from tests.trainer.process_worker import Float64Trainer, norms_in_float64
from trl_grpo_ext.errors import UpstreamError
from trl_grpo_ext.trainer.compact.plan import PLACEHOLDER_TOKENS, Shared, plan_block, token_limit
from trl_grpo_ext.trainer.compact.shared import (
    Price,
    SharedLayout,
    SharedPrompts,
    fill_rows,
    pair_memory_of,
    price_of,
    reason_against,
    shared_prompts,
    shared_rows,
    sizes_of,
    width_of,
    window_of,
)
from trl_grpo_ext.trainer.facts import LossSettings

FREE, DEAR = Price(), Price(area=10.0, causal_area=10.0)
"""A price of tokens alone, by which prompts are shared; and one of attention, by which they are not."""

LOSS = LossSettings("dapo", 0.0, "token", False, False, False, 1.0)
ENDS = {"vocab_size": 42, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
SIZES: dict[str, Any] = {
    **ENDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def model_of(config: Any, attention: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)
    if dtype == torch.float64:
        norms_in_float64(model)
    return model.train()


def sharing(attention: str = "sdpa", window: int | None = None, budget: int | None = None) -> SharedPrompts:
    made = SharedPrompts(attention, window, list, budget)
    made.price = FREE
    return made


def score(*arguments: Any, **keywords: Any) -> Any:
    return Float64Trainer._get_per_token_logps_and_entropies(None, *arguments, **keywords)  # type: ignore[arg-type]


ROWS = [(5, 9, 0), (5, 3, 0), (5, 0, 0), (7, 4, 1), (7, 1, 1), (1, 6, 2), (1, 2, 2), (3, 5, 3)]
"""Tokens of prompts and completions, and whose prompt it is."""


def batch_of(rows: list[tuple[int, int, int]], prompt: int = 8, width: int = 10) -> dict[str, Any]:
    ids = torch.randint(3, 42, (len(rows), prompt + width), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros_like(ids)
    for row, (p, c, group) in enumerate(rows):
        ids[row, :prompt] = torch.arange(prompt) + 3 + group
        mask[row, prompt - p : prompt + c] = 1
    return {"input_ids": ids, "attention_mask": mask, "logits_to_keep": width}


# ---------------------------------------------------------------------------------------------------- the layout


def test_a_layout_by_hand() -> None:
    ids = torch.tensor([[10, 11, 12, 20, 21], [10, 11, 12, 30, 0]])
    layout = SharedLayout.of(ids, 2, np.array([[3, 2], [3, 1]]), [[0, 1]])
    assert layout.ids_R_L.tolist() == [[10, 11, 12, 20, 21, 12, 30]]
    assert layout.positions_R_L.tolist() == [[0, 1, 2, 3, 4, 2, 3]]
    assert layout.scored_R_L.tolist() == [[0, 0, 0, 1, 1, 0, 1]]
    assert layout.allowed()[0].long().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1, 1],
    ]
    assert layout.back(torch.arange(6.0).unsqueeze(0), 2, 2).tolist() == [[2.0, 3.0], [5.0, 0.0]]


CONFIGS: dict[str, tuple[Any, str, torch.dtype]] = {
    "llama": (LlamaConfig(**SIZES), "sdpa", torch.float64),
    "qwen2": (Qwen2Config(**SIZES), "sdpa", torch.float64),
    "qwen3": (Qwen3Config(**SIZES), "sdpa", torch.float64),
    "mistral": (MistralConfig(**SIZES, sliding_window=None), "sdpa", torch.float64),
    "a window as long as a row": (MistralConfig(**SIZES, sliding_window=18), "sdpa", torch.float64),
    "llama, eager": (LlamaConfig(**SIZES), "eager", torch.float32),
    "gemma2, soft-capped": (Gemma2Config(**SIZES, sliding_window=18), "eager", torch.float32),
    "experts": (Qwen3MoeConfig(**SIZES, **EXPERTS), "sdpa", torch.float32),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_entropies_and_gradient_are_those_of_rows_by_themselves(name: str) -> None:
    config, attention, dtype = CONFIGS[name]
    model, batch = model_of(config, attention, dtype), batch_of(ROWS)
    assert reason_against(model) is None
    share = sharing(attention, window_of(config))
    layout = share.layout(*batch.values())
    assert layout is not None
    # The first group in two parts: rows of 4 + 10, 4 + 4, 6 + 5 + 2, 0 + 7 + 3 and 2 + 6. Whole, it would be 4 * 18.
    assert layout.ids_R_L.shape == (5, 14)
    tolerance = EXACT["float64" if dtype == torch.float64 else "float32"]
    assert_same(model, model, batch, share, layout, tolerance)


def assert_same(
    alone: Any, model: Any, batch: dict[str, Any], share: SharedPrompts, layout: SharedLayout, tolerance: float
) -> None:
    """Log-probabilities, entropies and gradient of rows by themselves in a model, and of shared ones in another."""
    dtype = next(model.parameters()).dtype
    slope = torch.randn(len(ROWS), 10, generator=torch.Generator().manual_seed(2), dtype=dtype)
    found = []
    for which, scored in (
        (alone, score(alone, *batch.values())),
        (model, share.logps(score, {"model": model, **batch}, layout)),
    ):
        which.zero_grad()
        live = batch["attention_mask"][:, -10:]
        ((scored[0] + 0.3 * scored[1]) * slope * live).sum().backward()
        gradient = {n: p.grad.clone() for n, p in which.named_parameters() if p.grad is not None}
        found.append((gradient, (scored[0] * live).detach(), (scored[1] * live).detach()))
    assert relative_gap(found[1][0], found[0][0]) < tolerance
    assert (found[1][1] - found[0][1]).abs().max() < 10 * tolerance
    assert (found[1][2] - found[0][2]).abs().max() < 10 * tolerance


@pytest.mark.slow
def test_flex_attention_takes_the_mask_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch has no backward of it on the CPU but the one that is not compiled, and refuses that too: not here.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(
        "transformers.integrations.flex_attention.compile_friendly_flex_attention",
        lambda query, key, value, training, **keywords: flex_attention(query, key, value, **keywords),
    )
    config = LlamaConfig(**{**SIZES, "head_dim": 16, "num_hidden_layers": 1})
    alone, model = (model_of(config, attention, torch.float64) for attention in ("sdpa", "flex_attention"))
    assert reason_against(model) is None
    batch, share = batch_of(ROWS), sharing("flex_attention")
    layout = share.layout(*batch.values())
    assert layout is not None
    with torch.compiler.set_stance("force_eager"):  # or else one compiles for a minute
        assert_same(alone, model, batch, share, layout, EXACT["float64"])


def test_a_mask_that_lets_completions_see_each_other_would_be_noticed() -> None:
    model, batch = model_of(*CONFIGS["llama"]), batch_of(ROWS)
    layout = sharing().layout(*batch.values())
    assert layout is not None
    object.__setattr__(layout, "segments_R_L", torch.zeros_like(layout.segments_R_L))
    with torch.no_grad():
        wrong = sharing().logps(score, {"model": model, **batch}, layout)[0]
        right = score(model, *batch.values())[0] * batch["attention_mask"][:, -10:]
    assert (wrong - right).abs().max() > 1e-3


# ------------------------------------------------------------------------------------------------ what is chosen


def test_a_group_is_shared_whole_in_parts_or_not_by_price() -> None:
    # A whole group: 99 + 8 * 61 = 587 tokens. By pairs: 4 * (99 + 2 * 61) = 884. By themselves: 8 * 160 = 1,280.
    lengths, groups = np.array([[100, 60]] * 8), np.zeros(8, dtype=np.int64)

    def chosen(price: Price, groups: Any = groups, max_tokens: int | None = None) -> list[int]:
        return [len(rows) for rows in shared_rows(lengths, groups, price, max_tokens) or []]

    assert chosen(FREE) == [8]
    assert chosen(Price(area=0.02, causal_area=0.02)) == [2, 2, 2, 2]
    assert chosen(DEAR) == []
    assert chosen(FREE, np.arange(8)) == []  # nobody has a prompt in common
    assert chosen(Price(area=0.02, causal_area=0.02), max_tokens=600) == [8]
    assert chosen(DEAR, max_tokens=200) == [8]  # nothing is within the limit; this is nearest
    # 1,280 separate tokens may take as much memory as 587 with a mask of 587 * 587, or 2 * 343 with two of 343 * 343.
    assert [chosen(Price(pair_memory=m)) for m in (0.002, 0.00202, 0.01)] == [[8], [4, 4], []]


rows_in_groups = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=12)


@given(
    rows=rows_in_groups,
    prompt=st.integers(1, 30),
    area=st.sampled_from([0.0, 0.01, 0.3]),
    memory=st.sampled_from([0.0, 0.003, 0.03]),
)
def test_every_completion_is_in_one_row_and_no_layout_is_dearer_or_needs_more_memory(
    rows: list[tuple[int, int]], prompt: int, area: float, memory: float
) -> None:
    lengths = np.array([[prompt + group, completion] for group, completion in rows])
    groups, price = np.array([group for group, _ in rows]), Price(3.0, area, area / 2, memory)
    for size in sizes_of(lengths, groups):
        filled = fill_rows(lengths, groups, size)
        assert sorted(row for some in filled for row in some) == list(np.flatnonzero(lengths[:, 1]))
        assert all(len({groups[row] for row in some}) == 1 for some in filled)
    chosen = shared_rows(lengths, groups, price)
    if chosen is not None:
        width = int(np.maximum(lengths, 1).max(axis=0).sum())
        longest = width_of(lengths, chosen)
        assert len(chosen) * longest * (1 + memory * longest) <= len(rows) * width
        assert price.masked(len(chosen), width_of(lengths, chosen)) < price.masked(len(rows), width)


def cost_of(plans: Any, lengths: Any, groups: Any, price: Price, limit: int, *, share: bool) -> float:
    """What the parts of one rank's plan cost, from the words of `Price`."""
    total = 0.0
    for part in (part for step in plans[0].steps for part in step):
        rows = [row for row in part if row >= 0]
        filled = shared_rows(lengths[rows], groups[rows], price, limit) if share and len(rows) > 1 else None
        if filled is not None:
            total += price.masked(len(filled), width_of(lengths[rows], filled))
        elif rows:
            total += price.masked(len(rows), int(np.maximum(lengths[rows], 1).max(axis=0).sum()))
        else:
            total += len(part) * PLACEHOLDER_TOKENS
    return total


@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), min_size=4, max_size=12),
    prompt=st.integers(1, 60),
    area=st.sampled_from([0.0, 0.01, 0.1]),
    memory=st.sampled_from([0.0, 0.003]),
    micro_steps=st.integers(1, 4),
    budget=st.none() | st.integers(50, 400),
)
def test_no_plan_is_dearer_than_without_sharing(
    rows: list[tuple[int, int]], prompt: int, area: float, memory: float, micro_steps: int, budget: int | None
) -> None:
    lengths = np.array([[prompt + group, completion] for group, completion in rows])
    groups = np.array([group for group, _ in rows])
    runs, price = np.ones(len(lengths), dtype=bool), Price(2.0, area, area, memory)
    limit = token_limit([(lengths, runs)], micro_steps, budget)
    alone = plan_block([(lengths, runs)], micro_steps, max_tokens=budget)
    plans = plan_block([(lengths, runs)], micro_steps, max_tokens=budget, shared=Shared([groups], price, limit))
    costs = [
        cost_of(found, lengths, groups, price, limit, share=share) for found, share in ((plans, True), (alone, False))
    ]
    assert costs[0] <= costs[1] / 0.95 + 1e-3
    assert sorted(row for step in plans[0].steps for part in step for row in part if row >= 0) == [*range(len(lengths))]
    assert plans[0].distinct == lengths[:, 1].sum() + sum(prompt + group for group in set(groups.tolist()))


def test_the_price_is_found_again_from_its_own_seconds() -> None:
    price, second = Price(50.0, 0.002, 0.001), 1e-6
    masked, causal = [(1, 500), (4, 300), (1, 1100)], [(4, 300), (1, 1200)]
    seconds = [second * price.masked(*shape) for shape in masked], [second * price.causal(*shape) for shape in causal]
    found = price_of(masked, seconds[0], causal, seconds[1])
    assert [found.overhead, found.area, found.causal_area] == pytest.approx([50.0, 0.002, 0.001], rel=1e-6)


# ---------------------------------------------------------------------------------------------- what is refused


def dropping(model: Any) -> Any:
    model.model.layers[0].self_attn.attention_dropout = 0.1
    return model


def adapted(config: Any) -> Callable[[Any], Any]:
    return lambda model: get_peft_model(model, config)


LORA = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
DROPPING_LORA = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
PREFIX = PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        (LlamaConfig(**SIZES), adapted(LORA), None),
        (LlamaConfig(**SIZES), dropping, "layers.0.self_attn has attention_dropout 0.1"),
        (LlamaConfig(**SIZES), adapted(DROPPING_LORA), "q_proj.lora_dropout.default has p 0.1"),
        (MixtralConfig(**SIZES, num_local_experts=2, router_jitter_noise=0.1), None, "has jitter_noise 0.1"),
        (
            FalconConfig(vocab_size=42, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, alibi=True),
            None,
            "(alibi)",
        ),
        (LlamaConfig(**SIZES), adapted(PREFIX), "PREFIX_TUNING prepends tokens of its own"),
        (MambaConfig(vocab_size=42, hidden_size=16, num_hidden_layers=1), None, "takes no position_ids"),
    ],
)
def test_models_in_which_prompts_cannot_be_shared(config: Any, change: Any, reason: str | None) -> None:
    model = AutoModelForCausalLM.from_config(config)
    found = reason_against(model if change is None else change(model))
    assert found is None if reason is None else reason in str(found)
    if reason is None:
        model.config._attn_implementation_internal = "flash_attention_2"
        assert "takes no mask of four dimensions" in str(reason_against(model))


def test_memory_of_the_mask_by_hand() -> None:
    # A place in the mask and its copy in float32: 5 bytes. A token's hidden state at two layers: 2 * 32 * 4.
    assert pair_memory_of(model_of(LlamaConfig(**SIZES), "sdpa", torch.float32)) == 5 / 256
    # Eager attention keeps scores of 4 heads at 2 layers, with their softmax in float32.
    assert pair_memory_of(model_of(LlamaConfig(**SIZES), "eager", torch.float32)) == (5 + 2 * 4 * 8) / 256
    # 30 layers count as eight, which is what one holds while it runs.
    deep = {**SIZES, "num_hidden_layers": 30}
    assert pair_memory_of(model_of(LlamaConfig(**deep), "sdpa", torch.bfloat16)) == 3 / (8 * 32 * 2)


def test_made_up_rows_are_as_long_as_the_runs_own_if_they_fit_into_memory() -> None:
    # One row of 8,000 tokens has a mask of as much memory as 640 tokens if a pair needs 1e-5 of one.
    for pair_memory, expected in ((0.0, 2000), (1e-5, 1873), (1.0, 64)):
        widths: list[int] = []

        def measured(model: Any, ids: torch.Tensor, *_: Any, widths: list[int] = widths, **__: Any) -> Any:
            widths.append(ids.size(1))
            raise StopIteration

        made = SharedPrompts("sdpa", None, list, None, pair_memory)
        with pytest.raises(StopIteration):
            made.measure(measured, model_of(*CONFIGS["llama"]), 2000, 8100)
        assert widths[0] <= expected
        assert 4 * widths[0] * (1 + pair_memory * 4 * widths[0]) <= 8100 or widths[0] == 64
        assert widths[0] > 0.7 * expected


def test_reasons_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    absolute = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=42, n_embd=16, n_layer=1, n_head=2))
    model, quantile = model_of(*CONFIGS["llama"]), replace(LOSS, top_entropy_quantile=0.5)
    inside = batch_of(ROWS)
    inside["attention_mask"][0, 9] = 0
    with caplog.at_level(logging.WARNING, logger="trl_grpo_ext.trainer.compact.shared"):
        assert shared_prompts(absolute, LOSS, False, False, 1, lambda tensor: tensor, None) is None
        assert shared_prompts(model, quantile, True, False, 1, lambda tensor: tensor, None) is None
        assert shared_prompts(model, LOSS, True, False, 1, lambda tensor: tensor, None) is not None
        made = sharing(window=13)
        for _ in range(2):
            assert made.layout(*batch_of(ROWS).values()) is None
            assert made.layout(*inside.values()) is None
    said = [said for record in caplog.records if (said := record.getMessage()).startswith("share_prompts")]
    assert len(said) == 4
    assert "positions are absolute" in said[0]
    assert "top_entropy_quantile" in said[1]
    assert "a row of 14 tokens is longer than the sliding window of 13" in said[2]
    assert "a row has padding inside" in said[3]


def test_a_model_whose_numbers_change_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    # It ignores the positions that it is given: no signature says so.
    model = model_of(LlamaConfig(**{**SIZES, "max_position_embeddings": 512}), "sdpa", torch.float64)
    honest, made = (SharedPrompts("sdpa", None, list, None) for _ in range(2))
    honest.measure(score, model, 64, 256)
    assert honest.price is not None
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: forward(
        x, torch.arange(x.size(1)).unsqueeze(0) if len(position_ids) == 1 else position_ids
    )
    with caplog.at_level(logging.WARNING, logger="trl_grpo_ext.trainer.compact.shared"):
        made.measure(score, model, 64, 256)
    assert made.price is None
    assert "on made-up rows the log-probabilities differ" in caplog.text


def test_a_pass_that_does_not_run_the_model_is_noticed() -> None:
    model, batch = model_of(*CONFIGS["llama"]), batch_of(ROWS)
    layout = sharing().layout(*batch.values())
    assert layout is not None
    with pytest.raises(UpstreamError, match="LlamaModel ran 0 times in one pass"):
        sharing().logps(lambda *_, **__: (torch.zeros(1), None, None), {"model": model, **batch}, layout)


def test_ranks_whose_rows_differ_in_length_try_out_the_same_rows() -> None:
    model = model_of(LlamaConfig(**{**SIZES, "max_position_embeddings": 512}), "sdpa", torch.float32)
    shapes: list[list[Any]] = [[], []]
    for seen, width in zip(shapes, (70, 120), strict=True):

        def recorded(model: Any, ids: torch.Tensor, *arguments: Any, seen: list[Any] = seen, **keywords: Any) -> Any:
            seen.append(ids.shape)
            return score(model, ids, *arguments, **keywords)

        def agreed(numbers: Sequence[float]) -> list[float]:  # of widths the mean of both, and a millisecond a pass
            return {2: [95.0, 380.0], 5: [1e-3] * 5}.get(len(numbers), [*numbers])

        made = SharedPrompts("sdpa", None, agreed, None)
        made.measure(recorded, model, width, 4 * width)
        assert made.price is not None
    assert {*shapes[0]} == {*shapes[1]}
    assert torch.Size([4, 95]) in shapes[0]
