"""Packed rows, with each prompt once or not, give the log-probabilities and the gradient of rows by themselves."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support import SIZES as TINY
from tests.support import relative_gap
from tests.trainer.process_worker import Float64Trainer, norms_in_float64
from trl_grpo_ext.errors import UpstreamError
from trl_grpo_ext.trainer.compact import packed as packed_rows
from trl_grpo_ext.trainer.compact.packed import PackedRows, Packing, reason_against_sharing, window_of
from trl_grpo_ext.trainer.compact.plan import part_tokens, plan_block
from trl_grpo_ext.trainer.compact.trials import Exact, Rows, Trials

EXACT = {torch.float64: 1e-9, torch.float32: 1e-5}
SIZES: dict[str, Any] = {**TINY, "vocab_size": 42}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def model_of(config: Any, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    if dtype == torch.float64:
        norms_in_float64(model)
    return model.train()


def score(*arguments: Any, **keywords: Any) -> Any:
    return Float64Trainer._get_per_token_logps_and_entropies(None, *arguments, **keywords)  # type: ignore[arg-type]


ROWS = [(5, 9, 0), (5, 3, 0), (5, 0, 0), (7, 4, 1), (7, 1, 1), (1, 6, 2), (1, 2, 2), (3, 5, 3)]
"""Tokens of prompts and completions, and whose prompt it is."""


def batch_of(rows: list[tuple[int, int, int]] = ROWS, prompt: int = 8, width: int = 10) -> dict[str, Any]:
    ids = torch.randint(3, 42, (len(rows), prompt + width), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros_like(ids)
    for row, (p, c, group) in enumerate(rows):
        ids[row, :prompt] = torch.arange(prompt) + 3 + group
        mask[row, prompt - p : prompt + c] = 1
    return {"input_ids": ids, "attention_mask": mask, "logits_to_keep": width}


def exact_in(model: Any, packing: Packing) -> Exact:
    """What a trial on these rows finds."""
    batch = batch_of()
    found = packing.measured(*batch.values())
    assert found is not None
    cpu = torch.device("cpu")
    facts: Any = SimpleNamespace(ranks=1, device=cpu, gather=lambda table: table, rows_per_pass=3, pad_id=0)
    trials = Trials(packing, lambda: (score, model), facts)
    return trials.of(Rows(*batch.values(), *found), [(1, batch["input_ids"].size(1))], fits=True)


def test_packed_rows_by_hand() -> None:
    ids = torch.tensor([[0, 10, 11, 20, 21, 22], [0, 10, 11, 30, 0, 0], [12, 13, 14, 40, 41, 0]])
    packed = PackedRows.of(ids, 3, np.array([[2, 3], [2, 1], [3, 2]]), np.array([7, 7, 2]))
    assert packed is not None
    # The prompt of two rows, what runs of their completions (nothing of the second), and the third row.
    assert packed.ids_1_L.tolist() == [[10, 11, 20, 21, 12, 13, 14, 40]]
    assert packed.positions_1_L.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert packed.predictors_K.tolist() == [1, 2, 3, 1, 6, 7]
    assert packed.scored_K.tolist() == [20, 21, 22, 30, 40, 41]
    shared, alone = packed.mask.blocks
    assert alone.places_N_W.tolist() == [[4, 5, 6, 7], [0, 1, 1, 1]]
    assert (shared.places_N_W.tolist(), shared.before_P.tolist()) == ([[2, 3]], [0, 1])  # type: ignore[union-attr]
    assert shared.allowed.long().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]  # type: ignore[union-attr]
    assert packed.back(torch.arange(6.0).unsqueeze(0), 3, 3).tolist() == [[0, 1, 2], [3, 0, 0], [4, 5, 0]]
    assert PackedRows.of(ids, 3, np.array([[2, 0]] * 3), np.arange(3)) is None  # nothing to score


CONFIGS: dict[str, tuple[Any, torch.dtype]] = {
    "llama": (LlamaConfig(**SIZES), torch.float64),
    "qwen2": (Qwen2Config(**SIZES), torch.float64),
    "qwen3": (Qwen3Config(**SIZES), torch.float64),
    "a window as long as a row": (MistralConfig(**SIZES, sliding_window=14), torch.float64),
    "experts": (Qwen3MoeConfig(**SIZES, **EXPERTS), torch.float32),
}
QUICK = [("llama", True), ("qwen2", False), ("experts", True)]


CASES = [(name, share) for name in CONFIGS for share in (False, True)]


@pytest.mark.parametrize(
    ("name", "share"), [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES]
)
def test_packed_rows_are_as_rows_alone(name: str, share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config, dtype = CONFIGS[name]
    if share:
        monkeypatch.setattr(packed_rows, "PAIRS", 12)
    assert_same(model_of(config, dtype), EXACT[dtype], share)


def assert_same(model: Any, tolerance: float, share: bool) -> None:
    """Log-probabilities, entropies and gradient of packed rows and of rows by themselves."""
    packing, batch = Packing(share, window_of(model.config)), batch_of()
    assert exact_in(model, packing).packed
    packed = packing.pack(*batch.values())
    assert packed is not None
    # Prompts of 5, 5, 7, 7, 1, 1, 3 or of 5, 7, 1, 3, and completions without their last token.
    assert packed.ids_1_L.size(1) == (16 if share else 29) + 8 + 2 + 3 + 0 + 5 + 1 + 4
    slope = torch.randn(len(ROWS), 10, generator=torch.Generator().manual_seed(2), dtype=model.dtype)
    found = []
    for scored in (score(model, *batch.values()), packing.logps(score, {"model": model, **batch}, packed)):
        model.zero_grad()
        live = batch["attention_mask"][:, -10:]
        ((scored[0] + 0.3 * scored[1]) * slope * live).sum().backward()
        gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((gradient, (scored[0] * live).detach(), (scored[1] * live).detach()))
    assert relative_gap(found[1][0], found[0][0]) < tolerance
    assert (found[1][1] - found[0][1]).abs().max() < 10 * tolerance
    assert (found[1][2] - found[0][2]).abs().max() < 10 * tolerance


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=12),
    prompt=st.integers(1, 60),
    micro_steps=st.integers(1, 4),
)
def test_packed_plans_never_compute_more(rows: list[tuple[int, int]], prompt: int, micro_steps: int) -> None:
    lengths = np.array([[prompt + group, completion] for group, completion in rows])
    shared, alone = np.array([group for group, _ in rows]), np.arange(len(rows))
    block = [(lengths, np.ones(len(rows), dtype=bool))]
    plans = [plan_block(block, micro_steps, groups=groups)[0] for groups in ([shared], [alone], None)]
    assert plans[0].computed <= plans[1].computed <= plans[2].computed
    for plan, groups in zip(plans[:2], (shared, alone), strict=True):
        assert sorted(row for part in plan.steps for row in part if row >= 0) == [*range(len(rows))]
        width = max(p for p, _ in lengths) + max(c for _, c in lengths)
        limit = -(-len(rows) // micro_steps) * width
        assert all(part_tokens(lengths, part, groups) <= limit for part in plan.steps)
        assert len(plan.steps) == micro_steps
    assert plans[0].distinct == lengths[:, 1].sum() + sum(prompt + group for group in set(shared.tolist()))


def dropping(model: Any) -> Any:
    model.model.layers[0].self_attn.attention_dropout = 0.1
    return model


def test_reason_against_sharing() -> None:
    llama = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    assert reason_against_sharing(llama) is None
    jitters = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=2, router_jitter_noise=0.1))
    assert "jitter_noise 0.1" in str(reason_against_sharing(jitters))
    lora = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    assert "lora_dropout.default" in str(reason_against_sharing(get_peft_model(llama, lora)))
    assert "layers.0.self_attn has attention_dropout 0.1" in str(
        reason_against_sharing(dropping(model_of(llama.config)))
    )


def ignores_positions(model: Any) -> None:
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: forward(
        x, torch.arange(x.size(1)).unsqueeze(0) if len(position_ids) == 1 else position_ids
    )


def ignores_positions_and_drops(model: Any) -> None:
    """Its dropout would change log-probabilities by as much as its positions do."""
    ignores_positions(dropping(model))


def reads_the_mask(model: Any) -> None:
    layer = model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda *arguments, attention_mask, **keywords: forward(
        *arguments, attention_mask=None if attention_mask is None else attention_mask & attention_mask, **keywords
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (ignores_positions, ": log-probabilities differ by"),
        (ignores_positions_and_drops, ": log-probabilities differ by"),
        (reads_the_mask, "the model calls __and__ on the mask"),
    ],
)
def test_inexact_model_is_noticed(change: Callable[[Any], None], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(*CONFIGS["llama"])
    assert exact_in(model, Packing(share=True)).packed
    change(model)
    with caplog.at_level(logging.WARNING, logger="trl_grpo_ext.trainer.compact.packed"):
        assert not exact_in(model, Packing(share=True)).packed
    assert all(module.training for module in model.modules())
    assert reason in caplog.text


def test_a_pass_that_does_not_run_the_model_is_noticed() -> None:
    model, batch, packing = model_of(*CONFIGS["llama"]), batch_of(), Packing(share=True)
    packed = packing.pack(*batch.values())
    assert packed is not None
    with pytest.raises(UpstreamError, match="LlamaModel"):
        packing.logps(lambda *_, **__: (torch.zeros(1), None, None), {"model": model, **batch}, packed)


def test_rows_that_are_not_packed(caplog: pytest.LogCaptureFixture) -> None:
    packing, inside = Packing(share=True, window=13), batch_of()
    inside["attention_mask"][0, 9] = 0
    for _ in range(2):
        assert packing.pack(*batch_of().values()) is None
        assert packing.pack(*inside.values()) is None
    long, padded = [record.getMessage() for record in caplog.records if "packed" in record.name]  # once each
    assert "a row of 14 tokens" in long
    assert "padding inside" in padded
