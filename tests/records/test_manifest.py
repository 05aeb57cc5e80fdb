"""The manifest by itself: how two differ, what a source hash covers, hostile files."""

import functools
import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.errors import ManifestError
from trl_grpo_ext.guard.calls import reward_name
from trl_grpo_ext.guard.guarded import guarded
from trl_grpo_ext.plugins.loading import resolve
from trl_grpo_ext.records.manifest import (
    HIDDEN,
    Manifest,
    PluginRecord,
    differences,
    hash_of_module,
    plain_mapping,
    version_notes,
)

VALUES = st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.just(0.5), st.sampled_from("ab"))
PARAMETERS = st.dictionaries(st.sampled_from(["alpha", "beta"]), VALUES, max_size=2)
RECORDS = st.builds(
    PluginRecord,
    kind=st.sampled_from(["reward", "advantage_hook", "loss_aggregation"]),
    name=st.sampled_from(["x", "y"]),
    distribution=st.sampled_from([None, "one", "two"]),
    version=st.sampled_from([None, "1", "2"]),
    target=st.sampled_from(["m:a", "m:b"]),
    parameters=st.none() | PARAMETERS,
    weight=st.sampled_from([None, 0.5, 1.0]),
    switches=st.dictionaries(st.just("guard"), VALUES),
    source_hash=st.sampled_from([None, "aa", "bb"]),
    inside=st.sampled_from([None, "z, rewards[0]"]),
)
MANIFESTS = st.builds(Manifest, plugins=st.lists(RECORDS, max_size=4).map(tuple), versions=st.just({}))


def same(old: PluginRecord | None, new: PluginRecord | None) -> bool:
    """Whether two records at one place are of one plugin: all but how it is described, and a hash that is unknown."""
    if old is None or new is None:
        return False
    hashes = (old.source_hash, new.source_hash)
    first, second = (asdict(replace(r, source_hash=None, selected=True)) for r in (old, new))
    return (None in hashes or hashes[0] == hashes[1]) and json.dumps(first) == json.dumps(second)


@given(MANIFESTS, st.data())
def test_differences_none_for_equal_plugins(old: Manifest, data: st.DataObject) -> None:
    # An oracle that matches by place and not by name, on manifests that are near each other.
    assert differences(old, Manifest.from_plain(json.loads(json.dumps(old.plain())))) == []
    records = list(old.plugins)
    for index in range(len(records)):
        if data.draw(st.booleans()):
            records[index] = data.draw(RECORDS)
    new = Manifest(tuple(data.draw(st.permutations(records))) if data.draw(st.booleans()) else tuple(records))
    expected = all(
        same(before, here)
        for kind in ("reward", "advantage_hook", "loss_aggregation")
        for before, here in zip_longest(*([r for r in m.plugins if r.kind == kind] for m in (old, new)))
    )
    assert (differences(old, new) == []) == expected


FOCAL = PluginRecord(
    "loss_aggregation", "focal", "grpo-focal", "0.1.0", "grpo_focal:Focal", {"gamma": 2.0}, source_hash="aa"
)


@pytest.mark.parametrize(
    ("here", "sentence"),
    [
        ({"version": "0.2.0", "source_hash": "bb"}, 'version "0.1.0" in the checkpoint, "0.2.0" here'),
        ({"source_hash": "bb"}, "its source differs, although its version does not"),
        ({"source_hash": None}, None),
        ({"parameters": {"gamma": 2}}, None),
        ({"parameters": {"gamma": True}}, "parameter gamma 2.0 in the checkpoint, true here"),
        ({"parameters": None}, 'parameters "known" in the checkpoint, "not known" here'),
        ({"switches": {"skip_zero_variance": True}}, "skip_zero_variance not set in the checkpoint, true here"),
    ],
)
def test_sentences(here: dict[str, Any], sentence: str | None) -> None:
    expected = [] if sentence is None else [f"loss aggregation focal: {sentence}"]
    assert differences(Manifest((FOCAL,)), Manifest((replace(FOCAL, **here),))) == expected


def test_two_of_one_name_are_told_apart_by_their_order() -> None:
    twice = Manifest((FOCAL, replace(FOCAL, parameters={"gamma": 1.0})))
    assert differences(twice, twice) == []
    (first, second) = differences(twice, Manifest(twice.plugins[::-1]))
    assert "gamma 2.0 in the checkpoint, 1.0 here" in first
    assert "gamma 1.0 in the checkpoint, 2.0 here" in second
    plain = replace(FOCAL, name="plain")
    (sentence,) = differences(Manifest((FOCAL, plain)), Manifest((plain, FOCAL)))
    assert sentence == "loss aggregations: the order is focal, plain in the checkpoint, plain, focal here"


def test_the_libraries_beneath_are_no_difference_and_a_note() -> None:
    old = Manifest((FOCAL,), {"trl": "1.15.0", "torch": "2"})
    new = Manifest((FOCAL,), {"trl": "1.16.0", "torch": "2"})
    assert differences(old, new) == []
    assert version_notes(old, new) == ["trl 1.15.0 in the checkpoint, 1.16.0 here"]


def test_the_line_names_a_plugin_as_often_as_it_acts() -> None:
    hook = PluginRecord("advantage_hook", "h", "d", "1")
    assert Manifest((hook, hook, FOCAL)).line() == (
        "advantage hooks h (d 1), h_2 (d 1); loss aggregation focal (grpo-focal 0.1.0)"
    )


def test_what_a_file_says_does_not_reach_the_terminal() -> None:
    bad = replace(FOCAL, name="x\x1b]0;owned\x07\nerror", version="\x1b[31m1", parameters={"\x1b[2J": "\x1b[2J" * 999})
    sentences = [*differences(Manifest((bad,)), Manifest()), *differences(Manifest((FOCAL,)), Manifest((bad,)))]
    sentences += differences(Manifest((replace(bad, name="focal"),)), Manifest((FOCAL,)))
    sentences += version_notes(Manifest((), {"trl\x1b": "\x1b"}), Manifest())
    assert len(sentences) > 5
    assert all(text.isprintable() for text in sentences)
    assert max(map(len, sentences)) < 700


def test_writing_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    file = tmp_path / "new" / "plugins.json"
    Manifest((replace(FOCAL, name="ä\u2028\ud800"),)).write(file)  # even what UTF-8 cannot hold
    assert Manifest.read(file).plugins[0].name == "ä\u2028\ud800"
    Manifest((FOCAL,)).write(file)
    assert Manifest.read(file) == Manifest((FOCAL,))
    assert [path.name for path in file.parent.iterdir()] == ["plugins.json"]


GOOD = json.loads(json.dumps(Manifest((FOCAL,), {"trl": "1"}).plain()))


def with_record(**values: Any) -> dict[str, Any]:
    return {**GOOD, "plugins": [{**GOOD["plugins"][0], **values}]}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 100_000,
        {**GOOD, "format": 2},
        {**GOOD, "versions": None},
        {**GOOD, "plugins": ["x"]},
        {**GOOD, "plugins": [{"kind": "reward"}]},
        with_record(kind="optimizer"),
        with_record(weight="1"),
        with_record(more=1),
    ],
    ids=lambda content: str(content)[:40],
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "plugins.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ManifestError) as refused:
        Manifest.read(file)
    assert str(file) in str(refused.value)
    assert len(str(refused.value)) < 700


def test_hash_of_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    plugin = tmp_path / "mine" / "plugin.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for content in (b"one = 1\n", b"one = 1\r\n", b"one = 2\n"):
        plugin.write_bytes(content)
        found.append(hash_of_module("mine.plugin"))
    assert found[0] == found[1] != found[2]
    assert "mine" not in sys.modules
    assert [hash_of_module(name) for name in ("itertools", "no_such_module", "mine.no", "__main__")] == [None] * 4


def bare(rewards: list[Any], hooks: Any = (), aggregation: Any = None) -> Any:
    """As much of a trainer as a manifest asks for."""
    return SimpleNamespace(
        reward_funcs=rewards,
        reward_func_names=list(map(reward_name, rewards)),
        reward_weights=torch.ones(len(rewards)),
        advantage_hooks=hooks,
        loss_aggregation=aggregation,
    )


def reward(completions: list[str], limit: float = 1.0, **columns: Any) -> list[float]:
    return [limit for _ in completions]


@dataclass
class Judge:
    """A reward whose constructor's parameters are its attributes."""

    limit: float = 0.5
    options: Any = None
    api_key: str = "sk-1"

    def __post_init__(self) -> None:
        self.calls = 0

    def __call__(self, **columns: Any) -> list[float]:
        return []


def test_objects_are_recorded_by_what_they_are_built_with() -> None:
    judge = Judge(2.0, {"a": (1, math.inf)})
    rewards = [functools.partial(reward, limit=3), judge, guarded(judge, timeout=4), Judge(options=object()).__call__]
    hook = load_advantage_hooks("sign_scaling")[0]
    records = Manifest.of(bare(rewards, [hook])).plugins
    assert [record.parameters for record in records[:4]] == [
        {"limit": 3},
        {"limit": 2.0, "options": {"a": [1, "inf"]}, "api_key": "(not recorded)"},
        {"limit": 2.0, "options": {"a": [1, "inf"]}, "api_key": "(not recorded)"},
        None,
    ]
    assert [record.target for record in records[:4]] == [
        f"{__name__}:{name}" for name in ("reward", "Judge", "Judge", "Judge.__call__")
    ]
    assert records[2].switches["guard"]["timeout"] == 4
    assert records[4].target.endswith("transforms:SignScaling")
    assert records[4].distribution == "trl-grpo-ext"
    assert all(record.source_hash for record in records)
    changing = load_advantage_hooks({"name": "kl_in_reward", "coefficient": 0.5, "target": 0.001, "horizon": 40})[0]
    assert Manifest.of(bare([], [changing])).plugins[0].parameters is None


KEY = "sk-" + "a1" * 10
NO_SECRETS = (
    "sk-learn-experiments-long-name, hf-internal-testing/tiny-random-Llama, hf_grpo_smollm2_run_1, The Bearer knows"
)
HIDDEN_IN: dict[str, tuple[Any, Any]] = {
    "headers": (
        {"Authorization": "Basic a", "X-Auth": "b", "x-api-key": "c", "n": 1},
        {"Authorization": HIDDEN, "X-Auth": HIDDEN, "x-api-key": HIDDEN, "n": 1},
    ),
    "openaiKey": ("s", HIDDEN),
    "hf_token": ("s", HIDDEN),
    "keys": ([KEY, "answer"], [HIDDEN, "answer"]),
    "pat": ("ghp_" + "a1" * 18, HIDDEN),
    "url": ("http://u:p@h/v1?n=1&api_key=s&m=2", f"http://{HIDDEN}@h/v1?n=1&api_key={HIDDEN}&m=2"),
    "command": ("curl -H 'Authorization: Bearer s-1'", f"curl -H 'Authorization: Bearer {HIDDEN}'"),
    "pad_token": ("<pad>", "<pad>"),
    "monkey": (NO_SECRETS, NO_SECRETS),
    "max_tokens": (5, 5),
}


@pytest.mark.parametrize("name", HIDDEN_IN)
def test_secrets_are_not_recorded(name: str) -> None:
    value, recorded = HIDDEN_IN[name]
    assert plain_mapping({name: value}) == {name: recorded}


def test_the_policy_of_a_guard_given_in_python_is_a_difference() -> None:
    plain, other = (Manifest.of(bare([guarded(Judge(), timeout=4, **policy)])) for policy in ({}, {"on_error": 0.0}))
    assert differences(plain, Manifest.of(bare([guarded(Judge(), timeout=4, on_error="raise")]))) == []
    (sentence,) = differences(plain, other)
    assert sentence.startswith("reward Judge: guard")
    assert '"outcomes": {"error": 0.0}' in sentence


def test_an_aggregation_is_known_only_while_it_is_the_one() -> None:
    loaded = resolve("loss_aggregation", {"name": "length_power", "alpha": 0.5})
    known = Manifest.of(bare([], (), loaded.object), {"loss_aggregation": loaded}).plugins[0]
    assert (known.parameters, known.selected) == ({"alpha": 0.5}, True)
    other = resolve("loss_aggregation", "token_mean").object
    replaced = Manifest.of(bare([], (), other), {"loss_aggregation": loaded}).plugins[0]
    assert (replaced.name, replaced.selected) == ("token_mean", False)
