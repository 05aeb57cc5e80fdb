"""The YAML that `show` offers: it parses, selects, loads as it stands, and its comments tell the truth."""

from __future__ import annotations

import datetime
import importlib
import inspect
import math
import re
from typing import Any

import pytest
import yaml
from hypothesis import example as hypothesis_example
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.plugins.discovery import PluginInfo, available
from trl_grpo_ext.plugins.docs.describe import describe
from trl_grpo_ext.plugins.docs.example import PLACEHOLDER, example, in_yaml
from trl_grpo_ext.plugins.docs.signature import Parameter
from trl_grpo_ext.plugins.docs.source import split_target
from trl_grpo_ext.plugins.loading import resolve
from trl_grpo_ext.plugins.selection import parse_selection

BUILT_IN = [info for info in available() if info.builtin]
KEYS = {"reward": "rewards", "advantage_hook": "advantage_hooks", "loss_aggregation": "loss_aggregation"}


def selected(info: PluginInfo, text: str) -> Any:
    read = yaml.safe_load(text)
    assert list(read) == [KEYS[info.kind]]
    (value,) = read.values()
    return value if info.kind == "loss_aggregation" else value[0]


@pytest.mark.parametrize("info", BUILT_IN, ids=lambda info: info.name)
def test_the_example_of_a_built_in_can_be_pasted(info: PluginInfo) -> None:
    text = describe(info, BUILT_IN, importing=False).example
    asked = parse_selection(info.kind, selected(info, text))
    assert asked.name == info.name
    module, attribute = split_target(info.target)
    thing = getattr(importlib.import_module(module), attribute)
    assert set(asked.parameters.values()) <= {PLACEHOLDER}
    if not asked.parameters:
        resolve(info.kind, asked)
    if isinstance(thing, type):
        real = {} if thing.__init__ is object.__init__ else inspect.signature(thing).parameters
        assert set(asked.parameters) == {name for name, one in real.items() if one.default is one.empty}
        uncommented = selected(info, re.sub(r"(?m)^(\s*)# ", r"\1", text))
        defaults = {name: one.default for name, one in real.items() if one.default is not one.empty}
        given_ = uncommented if isinstance(uncommented, dict) else {}
        for name, default in defaults.items():
            written = given_[name]
            if (info.name, name) == ("length_softmax", "r"):  # 1 / 9, which stands in a comment
                assert "r:  # default: 1 / 9" in text
            else:
                assert written == (list(default) if isinstance(default, tuple) else default)
                assert type(written) is (list if isinstance(default, tuple) else type(default))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(plain)
@hypothesis_example({"\n": None, "\U00010000": None})
@hypothesis_example({"\n": "\\ud800\\udc00", "\x7f": "\\\U0001f469\x7f"})
@hypothesis_example({"\n": [float("inf"), 1e16, -1e-9, "1e16", "null"]})
def test_any_default_is_written_on_one_line_and_read_back(value: Any) -> None:
    text = in_yaml(value)
    assert text.replace("\t", "").isprintable()
    read = yaml.safe_load(f"key: {text}")["key"]
    assert repr(read) == repr(value) or (isinstance(value, float) and math.isnan(value))


@pytest.mark.parametrize(
    "value", [1e-5, 1e20, -1e-300, math.inf, "1e-5", "yes", "on", "null", "1_000", "0x1f", "a: b", "# a"]
)
def test_what_yaml_reads_as_something_else_is_quoted(value: Any) -> None:
    read = yaml.safe_load(f"key: {in_yaml(value)}")["key"]
    assert (type(read), read) == (type(value), value)


def test_what_yaml_cannot_say_is_a_comment() -> None:
    with pytest.raises(ValueError, match="cannot be written as YAML"):
        in_yaml(object())
    made = Parameter("when", "Any", False, "datetime.timedelta(1)", datetime.timedelta(1), True)
    assert example("reward", "x", [made]).endswith("    # when:  # default: datetime.timedelta(1)\n")


def test_hostile_names_and_types_stay_on_their_lines() -> None:
    parameters = [
        Parameter("a", "Literal['\n  - evil']"),
        Parameter("b", None, False, "'x\n- y'", "x\n- y", True),
        Parameter("on", None, False, "1", 1, True),
    ]
    for name in ("x: y", "- z", "{a", "\u202eback", "a\nb", "no"):
        text = example("advantage_hook", name, parameters)
        assert len(text.splitlines()) == 5
        assert "\u202e" not in text
        read = yaml.safe_load(text)
        assert read == {"advantage_hooks": [{"name": name, "a": PLACEHOLDER}]}
