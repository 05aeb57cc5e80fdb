"""The hook and the reward, on numbers worked out by hand."""

from __future__ import annotations

import pickle

import pytest
import torch
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.testing import assert_conforms, make_rollout

from grpo_equation_credit import EquationCredit, equation_accuracy

RIGHT, WRONG = "3+4=7", "3+4=8"
COMPLETIONS = [RIGHT, "so " + WRONG, "no sums", "2 x 3 = <<2*3=6>>6 pens"]


def test_it_conforms() -> None:
    assert_conforms("advantage_hook", "equation_credit")
    assert_conforms("reward", "equation_accuracy", completions=COMPLETIONS)


def test_advantages_by_hand() -> None:
    texts = [RIGHT, "a" + WRONG]
    rollout = make_rollout([5, 6], texts=texts, completions=texts)
    hook = EquationCredit(right=0.25, wrong=-1.0)
    expected = [[0.25] * 5 + [0.0], [0.0] + [-1.0] * 5]
    assert rollout.span_values(hook.on_rollout(rollout.mask_B_T, rollout)).tolist() == expected


def test_only_the_result_is_paid() -> None:
    assert EquationCredit(pay="result").spans("so 3+4 = <<3+4=7>>7 pens") == [(18, 19, 0.5)]
    assert EquationCredit(pay="result").spans(WRONG) == [(4, 5, -0.5)]


def test_an_equation_that_holds_is_paid_once_and_a_wrong_one_costs_every_time() -> None:
    hook = EquationCredit()
    assert hook.spans("1+1=2 1 + 1 = 2 1+1=3 1+1=3") == [(0, 5, 0.5), (16, 21, -0.5), (22, 27, -0.5)]
    many = " ".join(f"{n}+1={n + 1}" for n in range(20))
    assert [len(EquationCredit(most=most).spans(many)) for most in (0, 3, 50)] == [0, 3, 20]


def test_the_reward_is_the_share_of_distinct_equations_that_hold() -> None:
    scores = equation_accuracy(completions=[RIGHT, WRONG, "no sums", f"{RIGHT} {RIGHT} {WRONG}"])
    assert scores == [1.0, 0.0, None, 0.5]
    assert [(part.score, part.places[0][:2]) for part in scores[3].parts] == [(1.0, (0, 5)), (0.0, (12, 17))]
    assert equation_accuracy(completions=[[{"role": "assistant", "content": WRONG}]]) == [0.0]
    assert [one.parts for one in pickle.loads(pickle.dumps(scores[:2]))] == [one.parts for one in scores[:2]]


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"right": "much"}, "right must be a finite number, got 'much'"),
        ({"wrong": float("nan")}, "wrong must be a finite number, got nan"),
        ({"pay": "sum"}, "pay must be 'equation' or 'result', got 'sum'"),
        ({"most": -1}, "most must be a whole number, 0 or more, got -1"),
    ],
)
def test_parameters_that_cannot_work(parameters: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        EquationCredit(**parameters)  # type: ignore[arg-type]


def test_it_changes_nothing_that_it_was_given() -> None:
    rollout = make_rollout([5], texts=[RIGHT])
    before = rollout.mask_B_T.clone()
    EquationCredit().on_rollout(rollout.mask_B_T, rollout)
    assert torch.equal(rollout.mask_B_T, before)
