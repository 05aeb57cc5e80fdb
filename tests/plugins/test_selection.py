"""An entry of a selection: every way to write one, what is none, and that reading it raises nothing else."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.plugins.kinds import KINDS
from trl_grpo_ext.plugins.selection import Selection, parse_selection


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (" think_format ", Selection("think_format")),
        ("some-dist:think_format", Selection("think_format", "some-dist")),
        ("pkg.mod:Class.attr", Selection("Class.attr", "pkg.mod")),
        ({"name": "d:a", "weight": 2, "alpha": [1]}, Selection("a", "d", {"alpha": [1]}, 2.0)),
        ("{name: think_format, weight: 0.2}", Selection("think_format", weight=0.2)),
        (
            " {name: d:a, weight: 1e-3, alpha: 2E5, tag: 1e, n: 3}",
            Selection("a", "d", {"alpha": 2e5, "tag": "1e", "n": 3}, 1e-3),
        ),
        (Selection("a", "d", {"x": 1}, 0.5), Selection("a", "d", {"x": 1}, 0.5)),
    ],
)
def test_every_way_to_write_a_selection(value: Any, expected: Selection) -> None:
    assert parse_selection("reward", value) == expected
    assert parse_selection("reward", expected.plain()) == expected
    assert isinstance(expected.plain(), dict) == bool(expected.parameters or expected.weight)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("a:b:c", "'a:b:c' does not select a reward"),
        ({"name": True}, "{'name': True} does not select a reward"),
        ({"name": "a", "weight": "1e-3"}, "1.0e-3"),
        ("{name: a, weight: .inf}", "inf"),
        ("{name: a, on: 1}", "True"),
        ("{name: a, when: 2020-99-99}", "month must be in 1..12"),
    ],
)
def test_what_is_no_selection(value: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        parse_selection("reward", value)
    with pytest.raises(ConfigurationError, match="weight"):
        parse_selection("loss_aggregation", {"name": "a", "weight": 1.0})


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_values = _scalars | st.lists(_scalars, max_size=3) | st.dictionaries(_scalars, _scalars, max_size=3)
_mappings = st.dictionaries(st.sampled_from(["name", "weight", "guard"]) | _scalars, _values, max_size=4)
_yaml_like = st.text(alphabet="{}[]:,&*!|>'\"#%@`=-+.~ \n\tabn01eE_<?", max_size=30).map("{".__add__)


@given(kind=st.sampled_from(KINDS), value=_values | _mappings | _yaml_like | st.text().map("{".__add__) | st.text())
def test_reading_raises_nothing_but_this_package_s_errors(kind: Any, value: Any) -> None:
    try:
        selection = parse_selection(kind, value)
    except ConfigurationError:
        return
    assert selection.name
    assert all(isinstance(name, str) for name in selection.parameters)
    assert parse_selection(kind, selection) == selection or selection.parameters != selection.parameters  # nan
