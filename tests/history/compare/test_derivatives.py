"""Groups' gradients are the trainer's; sketches keep what they promise; equal directions are computed once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import relative_gap, scripted_completion, train
from trl_grpo_ext.history.compare import Comparison, Gradients, compare
from trl_grpo_ext.history.compare.derivatives import CountSketch, Group, Policy, basis_of
from trl_grpo_ext.history.compare.gradients import PLAIN, POLICY_GRADIENT

CHAIN: list[Any] = [
    "centred",
    {"name": "sign_scaling", "positive": 0.5},
    {"name": "entropy_shaping", "alpha": 0.3},
    {"name": "low_probability", "alpha": 0.5},
]
SELECTIONS: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss_type": "grpo", "scale_rewards": "batch"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "prefix tree": {"advantage_hooks": ["prefix_tree"]},
    "chain": {"advantage_hooks": CHAIN, "loss_aggregation": "prompt_mean"},
    "sign balanced": {"loss_aggregation": "sign_balanced"},
    "tail mean": {"loss_aggregation": "tail_mean"},
}
"""They differ by completion, by token, by sign and by loss."""
ALL = 1_000_000
"""Dimensions with which the sketch is exact."""


@pytest.fixture(scope="module")
def recorded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of plain TRL on four groups, recorded whole."""
    folder = tmp_path_factory.mktemp("recorded")
    train(tiny_model, folder, token_records=16, per_device_train_batch_size=16, max_steps=1)
    return folder


def gradients_in(compared: Comparison) -> Gradients:
    assert compared.gradients is not None
    return compared.gradients


def group_of(prompt: int) -> Group:
    return Group([5 + prompt, 7, 9], [scripted_completion("p", member, 12) for member in range(4)])


def policy_of(folder: Path, dtype: torch.dtype = torch.float32, rows: int = 3) -> Policy:
    return Policy(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), rows=rows)


def slow_gradient(policy: Policy, group: Group, coefficients_n: torch.Tensor) -> torch.Tensor:
    """One completion at a time, without padding, by the plain formula."""
    total = torch.zeros(())
    rest = coefficients_n.tolist()
    for completion in group.completions:
        logits = policy.model(input_ids=torch.tensor([[*group.prompt, *completion]])).logits[0]
        for place, token in enumerate(completion, start=len(group.prompt) - 1):
            total = total + rest.pop(0) * torch.log_softmax(logits[place], 0)[token]
    gradients = torch.autograd.grad(total, list(policy.trained.values()))
    return torch.cat([one.flatten() for one in gradients])


DAILY = ("grpo", "chain", "tail mean")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.nightly] * (n not in DAILY)) for n in SELECTIONS])
def test_gradients_of_groups_are_the_trainers(tiny_model: Path, tmp_path: Path, recorded: Path, name: str) -> None:
    settings = {"max_completion_length": 10, **SELECTIONS[name]}
    plain: dict[str, Any] = {"token_records": 0, "per_device_train_batch_size": 16, "max_steps": 1}
    run = train(tiny_model, tmp_path, dtype="float64", **plain, **settings)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    compared = compare(recorded, {name: settings}, dimensions=ALL, model=model, tokenizer=str(tiny_model))
    assert compared.groups == 4
    found = gradients_in(compared)
    assert found.sketch_error == 0
    parameters = run.gradients[0]
    sizes = [one.numel() for one in parameters.values()]
    parts = torch.split(-found.sketches[name].mean(dim=0), sizes)
    ours = {key: part.view(one.shape) for (key, one), part in zip(parameters.items(), parts, strict=True)}
    assert relative_gap(ours, parameters) < 1e-6
    other = dict(zip(parameters, torch.split(-found.sketches[POLICY_GRADIENT].mean(dim=0), sizes), strict=True))
    assert relative_gap({k: v.view(parameters[k].shape) for k, v in other.items()}, parameters) > 1e-2


def test_basis_shares_backward_passes(tiny_model: Path, recorded: Path) -> None:
    length: dict[str, Any] = {"length": {"loss_aggregation": "seq_mean_token_mean"}}
    more = gradients_in(compare(recorded, {"plain again": {}, **length}, model=str(tiny_model)))
    plain, same = more.selections[0], more.selections[2]
    assert plain.name == PLAIN
    assert plain.ratio.value == pytest.approx(same.ratio.value)
    assert same.worth.value == pytest.approx(1.0)
    alone = gradients_in(compare(recorded, length, model=str(tiny_model)))
    assert torch.allclose(more.sketches["length"], alone.sketches["length"], rtol=1e-4, atol=1e-6)
    one, two, three = torch.randn(3, 9, dtype=torch.float64)
    rows = basis_of(torch.stack([one, 3 * one.float().double(), 1e-9 * two, one - 5 * two, 0 * one]))
    assert torch.allclose(rows @ rows.T, torch.eye(2, dtype=torch.float64))
    assert len(basis_of(torch.stack([one, two, three]))) == 3
    assert len(basis_of(torch.zeros(2, 4, dtype=torch.float64))) == 0


def test_policy_of_other_completions_is_noted(tiny_model: Path, recorded: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for factor, noted in ((1.0, False), (1.5, True)):  # the records are of the first
        with torch.no_grad():
            model.lm_head.weight.mul_(factor)
        found = compare(recorded, [{}], model=model, tokenizer=str(tiny_model))
        assert any("another policy" in sentence for sentence in found.notes) == noted


@pytest.mark.parametrize("rows", [1, 3])
def test_policy_against_one_completion_at_a_time(tiny_model: Path, rows: int) -> None:
    policy = policy_of(tiny_model, rows=rows)
    group = group_of(0)
    coefficients_S_n = torch.randn(2, sum(map(len, group.completions)), dtype=torch.float64)
    sketch = CountSketch(policy.trained, ALL, 0)
    sketches_S_k, logps_n = policy.gradients(group, coefficients_S_n, sketch)
    for coefficients_n, sketch_k in zip(coefficients_S_n, sketches_S_k, strict=True):
        expected = slow_gradient(policy, group, coefficients_n)
        assert (sketch_k - expected).norm() < 2e-6 * expected.norm()
    assert logps_n is not None
    logps = []
    for completion in group.completions:
        logits = policy.model(input_ids=torch.tensor([[*group.prompt, *completion]])).logits[0]
        logps_T_V = torch.log_softmax(logits[len(group.prompt) - 1 : -1], dim=1)
        logps += logps_T_V.gather(1, torch.tensor(completion).unsqueeze(1)).flatten().tolist()
    assert logps_n.tolist() == pytest.approx(logps, abs=1e-5)


def test_sketch_is_unbiased_within_its_error(tiny_model: Path) -> None:
    """Over 300 seeds: means within four standard errors, and the standard error itself not above the bound."""
    policy = policy_of(tiny_model)
    group, other = group_of(0), group_of(1)
    exact = CountSketch(policy.trained, ALL, 0)
    # Of one sign, so that signs that did not cancel would show.
    ones = torch.ones(1, sum(map(len, group.completions)))
    (x,), (y,) = (policy.gradients(one, ones, exact)[0].abs() for one in (group, other))
    pieces = [one.shape for one in policy.trained.values()]
    split = [size.numel() for size in pieces]
    k, seeds = 256, 300
    squares, products = [], []
    for seed in range(seeds):
        sketch = CountSketch(policy.trained, k, seed)
        assert not sketch.exact
        assert sketch.dimensions == k
        sketched = [
            sketch.project([part.view(s) for part, s in zip(torch.split(v, split), pieces, strict=True)])
            for v in (x, y)
        ]
        squares.append(float(sketched[0] @ sketched[0]))
        products.append(float(sketched[0] @ sketched[1]))
    square_bound = (2 / k) ** 0.5 * float(x @ x)
    product_bound = ((float(x @ x) * float(y @ y) + float(x @ y) ** 2) / k) ** 0.5
    for values, truth, bound in ((squares, float(x @ x), square_bound), (products, float(x @ y), product_bound)):
        found = torch.tensor(values, dtype=torch.float64)
        assert abs(float(found.mean()) - truth) < 4 * bound / seeds**0.5
        assert float(found.std()) < 1.15 * bound  # 300 seeds know a deviation to 4 %
        assert float(found.std()) > 0.2 * bound  # and it is no identity
