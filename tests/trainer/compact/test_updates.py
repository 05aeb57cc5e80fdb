"""`compact_updates: exact` gives the gradient of `off`, on made-up micro-batches and a real model.

Hypothesis chooses lengths, masks and advantages. Each restriction of `Freedom` is lifted once, to show that the
gradient would then be another one. Whole trainings are in `test_trainings`.
"""

import logging
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import OWN_AGGREGATION, arguments, length_reward, prompts, relative_gap
from tests.trainer.compact.runs import (
    ALL_ROWS_RUN,
    DIFFERENT,
    EXACT,
    FREE,
    SORTED,
    Bonus,
    Case,
    Row,
    Whitened,
    batches_of,
    cases,
)
from tests.trainer.process_worker import Float64CompactTrainer, Float64Trainer
from trl_grpo_ext import GRPOExtConfig, Totals
from trl_grpo_ext.credit.chain import HookChain
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.plugins.loading import load_loss_aggregation
from trl_grpo_ext.trainer import upstream
from trl_grpo_ext.trainer.batch import counting_mask
from trl_grpo_ext.trainer.compact.packed import Packing
from trl_grpo_ext.trainer.compact.updates import CompactUpdates, Freedom, _warn_once, freedom_of
from trl_grpo_ext.trainer.extension import Extension
from trl_grpo_ext.trainer.reaggregation import Reaggregation

# --------------------------------------------------------------------------------- made-up batches, a real model


class Weights:
    """Stands for any aggregation by weights; the batch has them already."""

    def weights(self, mask_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        raise NotImplementedError


class Bench:
    """A trainer whose settings change between made-up batches."""

    def __init__(self, model: Path, folder: Path, **more: Any) -> None:
        args = arguments(folder, compact_updates="exact", model_init_kwargs={"dtype": torch.float64}, **more)
        self.trainer: Any = Float64CompactTrainer(str(model), length_reward, args, train_dataset=prompts(8))
        self.trainer.model.train()
        self.trainer._trl_grpo_ext.self_checked = True
        self.trainer._trl_grpo_ext.row_count = 10**6  # made-up rows are not in the table of completions
        self.packings = {None: None, False: Packing(share=False), True: Packing(share=True)}
        self.shares: bool | None = None  # None: rows are padded

    def set(
        self, loss_type: str, beta: float = 0.0, aggregation: Any = None, hook: Any = None, **values: Any
    ) -> Freedom:
        trainer = self.trainer
        trainer.loss_type, trainer.beta = loss_type, beta
        hooks = [] if hook is None else [hook]
        ours = trainer._trl_grpo_ext
        ours.chain = HookChain(hooks)
        section = ours.agreement.section
        self.aggregation = aggregation
        trainer._trl_grpo_ext.reaggregation = aggregation and Reaggregation(
            aggregation, trainer._trl_grpo_ext.facts, loss_type, section
        )
        trainer.entropy_coef = values.get("entropy_coef", 0.0)
        trainer._entropy_bonus_enabled = trainer.entropy_coef != 0
        trainer.top_entropy_quantile = values.get("top_entropy_quantile", 1.0)
        self.freedom = freedom_of(upstream.loss_settings_of(trainer), aggregation, hooks, trainer.model.config)
        return self.freedom

    def compact(self, case: Case, freedom: Freedom | None = None) -> CompactUpdates:
        trainer = self.trainer
        return CompactUpdates(
            freedom or self.freedom,
            replace(trainer._trl_grpo_ext.facts, accumulation=case.micro_steps, steps_per_generation=case.micro_steps),
            loss_type=trainer.loss_type if self.aggregation is None else None,
            packing=self.packings[self.shares],
            policy=lambda: (partial(Float64Trainer._get_per_token_logps_and_entropies, trainer), trainer.model),
            log=trainer._trl_grpo_ext.add_metrics,
        )

    def batches(self, case: Case) -> list[dict[str, Any]]:
        """Made-up micro-batches with tokens of the vocabulary, and ratios near 1."""
        trainer, batches = self.trainer, batches_of(case)
        trainer.args.gradient_accumulation_steps = trainer.args.steps_per_generation = case.micro_steps
        trainer.current_gradient_accumulation_steps = case.micro_steps
        total = sum(int(counting_mask(batch).sum()) for batch in batches)
        for batch in batches:
            for key in ("prompt_ids", "completion_ids"):
                batch[key] = 3 + batch[key] % 39
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            with torch.no_grad():
                logps, *_ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, attention, batch["completion_ids"].size(1)
                )
            batch["old_per_token_logps"] = logps + 0.3 * batch["old_per_token_logps"]
            batch["ref_per_token_logps"] = logps + 0.5 * batch["ref_per_token_logps"]
            ratio, counting = 0.5 + batch["importance_sampling_ratio"], counting_mask(batch) != 0
            batch["importance_sampling_ratio"] = ratio if case.sequence_ratio else torch.where(counting, ratio, 1.0)
            batch["num_items_in_batch"] = torch.tensor(float(total))
            batch["advantages"] = batch["advantages"].double()
            size = batch["advantages"].size(0)
            batch["trl_grpo_ext_totals"] = Totals(
                tokens=total, sequences=size * case.micro_steps, prompts=1, max_completion_length=10, processes=1
            )
            for key in ("reward", "raw_reward", "baseline"):
                batch[f"trl_grpo_ext_{key}"] = torch.zeros(size, dtype=torch.float64)
            batch["trl_grpo_ext_zero_variance"] = torch.zeros(size, dtype=torch.bool)
        return batches

    def gradient(self, batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        trainer = self.trainer
        trainer.model.zero_grad()
        loss = 0.0
        for batch in batches:
            here = trainer.compute_loss(trainer.model, batch)
            trainer.accelerator.backward(here)
            loss += float(here.detach())
        found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
        return {**found, "loss": torch.tensor(loss)}

    def gap(self, case: Case, freedom: Freedom | None = None) -> float:
        """Of gradient and loss, relative to the gradient or to 1 where that is smaller."""
        trainer, batches = self.trainer, self.batches(case)
        theirs = self.gradient(batches)
        trainer._trl_grpo_ext.compact = self.compact(case, freedom)
        planned = trainer._trl_grpo_ext.compact.plan(batches, torch.float64)
        assert len(planned) == case.micro_steps
        ours = self.gradient(planned)
        assert ours.keys() == theirs.keys()
        differ = math.sqrt(sum(float((ours[n] - theirs[n]).pow(2).sum()) for n in ours))
        return differ / max(1.0, math.sqrt(sum(float(theirs[n].pow(2).sum()) for n in theirs)))


@pytest.fixture(scope="module")
def made(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tiny_model, tmp_path_factory.mktemp("bench"))


@pytest.fixture
def bench(made: Bench) -> Bench:
    made.shares = None
    return made


LOSSES = [*OWN_AGGREGATION, "weights"]


@pytest.mark.slow
@given(
    case=cases(),
    name=st.sampled_from(LOSSES),
    beta=st.sampled_from([0.0, 0.1]),
    level=st.booleans(),
    shares=st.sampled_from([None, False, True]),
)
@settings(max_examples=90, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_gradient_of_any_batch_is_the_same(
    bench: Bench, case: Case, name: str, beta: float, level: bool, shares: bool | None
) -> None:
    bench.trainer.importance_sampling_level = "sequence" if level else "token"
    bench.shares = shares
    bench.set("grpo" if name == "weights" else name, beta, Weights() if name == "weights" else None)
    assert bench.gap(case) < EXACT["float64"]


@pytest.mark.slow
@given(case=cases(), name=st.sampled_from(LOSSES), beta=st.sampled_from([0.0, 0.1]))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_with_a_forward_hook(bench: Bench, case: Case, name: str, beta: float) -> None:
    bench.trainer.importance_sampling_level = "token"
    bench.set("grpo" if name == "weights" else name, beta, Weights() if name == "weights" else None, Bonus())
    assert bench.gap(case) < EXACT["float64"]


ROWS = [(1, 6, 1.0), (3, 1, 0.0), (2, 2, -1.0), (1, 3, 0.5), (2, 4, 0.0), (2, 1, 2.0)]
MIXED = Case([Row(p, (True,) * c, (a,) * 6) for p, c, a in ROWS], 3, False, (1, 1), False, False)
LONELY = replace(MIXED, rows=[MIXED.rows[0], *[Row(2, (), (0.0,) * 6)] * 5])
"""One row that runs, for three micro-steps."""


@pytest.mark.parametrize(
    ("configured", "lifted"),
    [
        ({"loss_type": "dapo", "entropy_coef": 0.1}, ALL_ROWS_RUN),
        ({"loss_type": "dapo", "entropy_coef": 0.1}, SORTED),
        ({"loss_type": "dapo", "top_entropy_quantile": 0.5}, SORTED),
        ({"loss_type": "grpo", "aggregation": "token_mean_local"}, SORTED),
        ({"loss_type": "dapo", "hook": Whitened()}, SORTED),
        ({"loss_type": "bnpo", "beta": 0.1}, SORTED),
        ({"loss_type": "dapo", "beta": 0.1}, FREE),
        ({"loss_type": "grpo", "beta": 0.1}, ALL_ROWS_RUN),
        ({"loss_type": "luspo", "beta": 0.1}, ALL_ROWS_RUN),
        ({"loss_type": "dapo", "hook": Bonus()}, FREE),
        ({"loss_type": "grpo", "hook": Bonus()}, ALL_ROWS_RUN),
        ({"loss_type": "bnpo", "hook": Bonus()}, SORTED),
    ],
)
def test_more_freedom_would_give_another_gradient(bench: Bench, configured: dict[str, Any], lifted: Freedom) -> None:
    bench.trainer.importance_sampling_level = "token"
    if "aggregation" in configured:
        configured = {**configured, "aggregation": load_loss_aggregation(configured["aggregation"])}
    bench.set(**configured)
    assert bench.gap(MIXED) < EXACT["float64"]
    bench.set(**configured)
    assert bench.gap(MIXED, lifted) > DIFFERENT


@pytest.mark.parametrize("configured", [{"beta": 0.1}, {"hook": Bonus()}])
def test_placeholders_that_count_would_give_another_gradient(
    bench: Bench, configured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.trainer.importance_sampling_level = "token"
    bench.set("dapo", **configured)
    assert bench.gap(LONELY) < EXACT["float64"]

    def counting(part: dict[str, Any], held: list[bool]) -> None:
        part["advantages"][torch.tensor(held)] = 0
        part["completion_mask"][torch.tensor(held), 0] = 1

    monkeypatch.setattr("trl_grpo_ext.trainer.compact.rows._make_placeholders", counting)
    assert bench.gap(LONELY) > DIFFERENT


def test_a_gap_would_be_seen(bench: Bench) -> None:
    # One advantage is off by a thousandth.
    bench.set("dapo")
    batches = bench.batches(MIXED)
    theirs = bench.gradient(batches)
    batches[0]["advantages"] = batches[0]["advantages"] * 1.001
    assert relative_gap(bench.gradient(batches), theirs) > 1e-5


# ------------------------------------------------------------------------------------------- what is refused


def test_multimodal_batches_run_as_trl_deals_them(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.set("dapo")
    trainer = bench.trainer
    dealt = [{**batch, "pixel_values": torch.zeros(2, 3), "num_images": [1, 1]} for batch in bench.batches(MIXED)]
    trainer._buffered_inputs, trainer._step, trainer._trl_grpo_ext.compact = dealt, 1, bench.compact(MIXED)
    _warn_once.cache_clear()
    for _ in range(2):
        with caplog.at_level(logging.WARNING, logger="trl_grpo_ext.trainer.compact.updates"):
            assert trainer._prepare_inputs(None) is dealt[1]
    assert trainer._buffered_inputs is dealt
    said = [record.getMessage() for record in caplog.records if record.name == "trl_grpo_ext.trainer.compact.updates"]
    assert said == ["compact_updates: multimodal inputs (num_images, pixel_values) run as TRL deals them."]


def test_a_liger_loss_is_refused() -> None:
    stand_in = SimpleNamespace(_trainer=None, settings=None, _args=SimpleNamespace(use_liger_kernel=True))
    with pytest.raises(ConfigurationError, match="does not work with use_liger_kernel"):
        Extension._make_compact_updates(stand_in, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"compact_updates": "on"}, "compact_updates must be off or exact, got 'on'"),
        ({"share_prompts": True}, "share_prompts needs compact_updates: exact"),
    ],
)
def test_settings_are_checked(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GRPOExtConfig(output_dir=str(tmp_path), use_cpu=True, **overrides)
    of_yaml: Any = {"compact_updates": False}  # which reads `off` so
    assert GRPOExtConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **of_yaml).compact_updates == "off"
