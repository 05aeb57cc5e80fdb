"""Every number of a comparison, worked out by hand on four completions."""

import json
from pathlib import Path

import pytest
import torch

from tests.history.compare.saved_files import two_groups, write_words
from trl_grpo_ext.history.compare import Comparison, compare
from trl_grpo_ext.history.compare.comparison import quarters

BASE = {"advantage_hooks": ["centred"], "loss_aggregation": "token_mean"}
OTHER = {"advantage_hooks": ["raw_reward"], "loss_aggregation": "seq_mean_token_mean"}
NAMES = ("selection 1", "selection 2")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare(two_groups(tmp_path_factory.mktemp("saved")), [BASE, OTHER])


# Under the base A = .5, -.5, 0, 0 and every one of 10 tokens weighs .1: masses .1, .2, 0, 0.
# Under the other A = 1, 0, 1, 1 and every completion weighs .25: masses .25, 0, .25, .25.


def test_results_by_hand(compared: Comparison) -> None:
    assert (compared.completions, compared.groups, compared.tokens) == (4, 2, 10)
    assert list(compared.steps) == [0]
    (base,), (other,) = (compared.results[name] for name in NAMES)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]])
    assert torch.equal(base.mask_B_T, mask.float())
    assert torch.equal(base.advantages_B_T, torch.tensor([[0.5], [-0.5], [0.0], [0.0]]) * mask)
    assert torch.allclose(base.weights_B_T, 0.1 * mask)
    assert torch.equal(other.advantages_B_T, torch.tensor([[1.0], [0.0], [1.0], [1.0]]) * mask)
    assert torch.allclose(other.weights_B_T, torch.tensor([[1 / 8], [1 / 16], [1 / 4], [1 / 12]]) * mask)


def test_selections_by_hand(compared: Comparison) -> None:
    base, other = compared.selections
    for one in (base, other):
        assert one.reward_mean == 0.75
    assert base.without_signal == 0.5
    assert other.without_signal == 0.5  # every token has an advantage, and nothing can be learnt from equal rewards
    assert base.positive_mass == pytest.approx(1 / 3)
    assert other.positive_mass == 1.0


def test_mass_by_length(compared: Comparison) -> None:
    parts = compared.by_length
    assert [part.name.split(" (")[1] for part in parts] == [f"{n} to {n} tokens)" for n in (1, 2, 3, 4)]
    assert [part.completions for part in parts] == [1, 1, 1, 1]
    assert [part.tokens for part in parts] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert [part.mass[NAMES[0]] for part in parts] == pytest.approx([0, 1 / 3, 0, 2 / 3])
    assert [part.mass[NAMES[1]] for part in parts] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_mass_by_correctness(compared: Comparison) -> None:
    assert [(part.name, part.completions) for part in compared.by_correctness] == [("right", 3), ("wrong", 1)]
    assert [part.mass[NAMES[0]] for part in compared.by_correctness] == pytest.approx([1 / 3, 2 / 3])
    assert [part.mass[NAMES[1]] for part in compared.by_correctness] == pytest.approx([1, 0])
    assert [part.tokens for part in compared.by_correctness] == pytest.approx([0.6, 0.4])


def test_pairs_by_hand(compared: Comparison) -> None:
    (pair,) = compared.pairs
    assert pair.same_sign == 0.25
    assert pair.moved == pytest.approx((2 / 3 + 1 / 3 + 1 / 3) / 2)
    assert pair.moved_between_tokens == pytest.approx(2 / 3)
    plain = json.loads(json.dumps(compared.plain(), allow_nan=False))
    assert plain["pairs"][0]["same_sign"] == 0.25
    assert not {"batches", "results"} & plain.keys()


def test_the_opposite_moves_nothing_and_turns_all(tmp_path: Path) -> None:
    compared = compare(two_groups(tmp_path), [{}, {"reward_weights": [-1.0]}, {"loss_type": "grpo"}])
    opposite, other = compared.pairs
    assert (opposite.same_sign, opposite.moved, opposite.moved_between_tokens) == (0.5, 0.0, 0.0)
    assert (opposite.turned, other.turned) == (1.0, 0.0)


def test_comparison_without_any_gradient(tmp_path: Path) -> None:
    folder = write_words(tmp_path, [{"prompt": "p", "completion": "a", "rewards": {"r": 1.0}}] * 4)
    compared = compare(folder, [{"advantage_hooks": ["centred"]}, {}])
    assert compared.selections[0].without_signal == 1
    assert compared.selections[0].positive_mass is None
    assert all(part.mass["selection 1"] is None for part in compared.by_length)
    assert compared.pairs[0].moved is None
    json.dumps(compared.plain(), allow_nan=False)


def test_quarters_by_hand() -> None:
    assert quarters(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])).tolist() == [-1, 0, 1, 2, 3]
    assert quarters(torch.tensor([7.0, 7.0, 7.0])).tolist() == [0, 0, 0]
    assert quarters(torch.tensor([0.0])).tolist() == [-1]
