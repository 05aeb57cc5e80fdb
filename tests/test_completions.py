"""What a completion consists of: parts as numbers, what is no part, and the numbers of turns."""

import copy
import json
import math
import pickle
from typing import Any

import pytest
import torch

from trl_grpo_ext.completions import turn_numbers
from trl_grpo_ext.errors import PluginOutputError
from trl_grpo_ext.types import END, WHOLE, Part, Parts, Place


class TestParts:
    def test_it_is_the_number(self) -> None:
        score = Parts({"a": (0.25, (0, 7)), "b": 0.75})
        assert isinstance(score, float)
        assert score == 0.5
        assert hash(score) == hash(0.5)
        assert json.dumps([score]) == "[0.5]"
        assert torch.tensor([score, Parts([], 2)]).tolist() == [0.5, 2.0]  # how TRL takes it

    def test_the_value_is_the_weighted_mean_of_what_applies_or_the_authors(self) -> None:
        parts = [Part("a", 1.0, 3.0), Part("b", 0.0), Part("c", None, 9.0), Part("d", math.nan)]
        assert Parts(parts) == 0.75
        assert Parts(parts, -2) == -2.0
        for nothing in (Parts([]), Parts([Part("a", None)]), Parts([Part("a", 1.0, 0.0)])):
            assert math.isnan(nothing)

    def test_names_and_places_as_they_are_given(self) -> None:
        score = Parts({"a": (True, None), "b": (0, (3, 4)), "c": (1, [(3, 4), END]), "d": 1, "e": None})
        assert score.parts == (
            Part("a", 1.0, 1.0, ()),
            Part("b", 0.0, 1.0, (Place(3, 4),)),
            Part("c", 1.0, 1.0, (Place(3, 4), END)),
            Part("d", 1.0, 1.0, (WHOLE,)),
            Part("e", None, 1.0, (WHOLE,)),
        )
        twice = Parts([Part("a", 1.0), Part("a_2", 1.0), Part("a", 0.0), Part("b", 0.0), Part("a", 0.0)])
        assert [part.name for part in twice.parts] == ["a", "a_2", "a_3", "b", "a_4"]

    def test_it_travels_with_its_parts(self) -> None:
        score = Parts([Part("a", -0.25, 2.0, [(1, 2)]), Part("b", None, places=Place(turn=3))], 7.0)
        for other in (pickle.loads(pickle.dumps(score)), copy.copy(score), copy.deepcopy(score)):
            assert type(other) is Parts
            assert (other, other.parts) == (score, score.parts)

    @pytest.mark.parametrize(
        "wrong",
        [
            *({"name": name} for name in ("", 5)),
            *({"score": score} for score in (math.inf, "x", 10**400)),
            *({"weight": weight} for weight in (-1.0, math.nan, math.inf)),
            *({"places": place} for place in ((-1, 2), (3, 2), [(1, 2, 3, 4, 5)], ("a", "b"), (0.5, 1), 7)),
            *({"places": place} for place in (Place(1), Place(0, 1, -1), Place(None, 2), Place(None, turn=1))),
        ],
    )
    def test_what_is_no_part_is_refused_where_it_is_made(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(PluginOutputError):
            Parts([Part("a", 1.0)._replace(**wrong)])

    @pytest.mark.parametrize("wrong", [{"a": (1.0,)}, {"a": (1.0, None, 2.0)}, [1.0, 2.0], ["a"]])
    def test_other_forms_are_refused(self, wrong: Any) -> None:
        with pytest.raises(PluginOutputError, match="A part must have"):
            Parts(wrong)

    def test_many_parts_of_one_name_take_no_time(self) -> None:
        assert len({part.name for part in Parts([Part("a", 1.0)] * 20_000).parts}) == 20_000


def test_turn_numbers_count_runs() -> None:
    wrote = torch.tensor([[1, 1, 0, 1, 0, 0], [0, 1, 0, 1, 1, 0], [0] * 6, [1] * 6]).bool()
    assert turn_numbers(wrote).tolist() == [[0, 0, -1, 1, -1, -1], [-1, 0, -1, 1, 1, -1], [-1] * 6, [0] * 6]
