"""The contract with the installed TRL: what `upstream` lists is there, is complete, and behaves as we assume."""

import ast
import functools
import importlib
import inspect
import re
import textwrap
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.utils
import pytest
from trl import GRPOTrainer

import trl_grpo_ext
from tests.support import arguments, length_reward, prompts, scripted_rollout
from trl_grpo_ext import GRPOExtMixin
from trl_grpo_ext.errors import UpstreamError
from trl_grpo_ext.trainer.upstream import contract

PACKAGE = Path(trl_grpo_ext.__file__).parent
UPSTREAM = "trainer/upstream/"
ADAPTER = ("trainer/mixin.py", UPSTREAM, "asynchronous/trainer.py")
"""The files that touch TRL's trainers."""

OF_TRANSFORMERS = "launch/checkpoints/"
"""The files that touch transformers' trainer."""

LISTED = {*contract.METHODS, *contract.SAVING, "_run_epoch", *contract.ATTRIBUTES}


def made(tiny_model: Path, folder: Path, trainer_class: type = GRPOTrainer, **settings: Any) -> Any:
    rows = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    return trainer_class(
        str(tiny_model),
        length_reward,
        arguments(folder, **{"max_steps": 1, **rows, **evaluation, **settings}),
        train_dataset=prompts(8),
        eval_dataset=prompts(2),
        rollout_func=scripted_rollout,
    )


class Batches(GRPOTrainer):
    """TRL's trainer; keeps its generation batches."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.kept_batches = [*getattr(self, "kept_batches", []), batch]
        return batch


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer after one step and one evaluation."""
    trainer = made(tiny_model, tmp_path_factory.mktemp("trained"), Batches)
    trainer.train()
    return trainer


def test_everything_listed_is_there(trained: Any) -> None:
    contract.check_class(GRPOTrainer)
    contract.check_instance(trained)
    assert len(trained.kept_batches) == 2  # in training and in evaluation
    for batch in trained.kept_batches:
        contract.check_batch(batch)


def test_a_method_that_is_gone_or_changed_is_named() -> None:
    methods = {name: getattr(GRPOTrainer, name) for name in contract.METHODS}
    contract.check_class(type("Same", (), methods))
    with pytest.raises(UpstreamError) as raised:
        contract.check_class(object)
    assert all(name in str(raised.value) for name in contract.METHODS)  # all at once

    def other(self: Any, something_else: Any) -> None: ...

    for changed in contract.METHODS:
        with pytest.raises(UpstreamError, match=changed):
            contract.check_class(type("Changed", (), {**methods, changed: other}))


def test_what_is_lost_is_named(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = {name: value for name, value in vars(trained.args).items() if name != "delta"}
    monkeypatch.setattr(trained, "args", SimpleNamespace(**args))
    monkeypatch.delattr(trained, "_buffered_inputs")
    with pytest.raises(UpstreamError, match=r"Batches.*_buffered_inputs.*delta"):
        contract.check_instance(trained)
    batch = {key: value for key, value in trained.kept_batches[0].items() if key != "completion_mask"}
    with pytest.raises(UpstreamError, match="completion_mask"):
        contract.check_batch(batch)


def test_versions_that_are_refused_warned_of_and_silent() -> None:
    for installed in ("1.15.2", "1.16.0rc1", "2.0.0.dev0", "3.0"):
        with pytest.raises(UpstreamError, match=installed):
            contract.check_version(installed)
    for installed in ("1.17.0.dev0", "1.99.3"):
        with pytest.warns(UserWarning, match=installed):
            contract.check_version(installed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for installed in ("1.16", "1.16.1.dev0"):
            contract.check_version(installed)


def test_scoring_makes_one_gather_and_it_is_of_the_scores() -> None:
    # Where a reward fails, our trainer makes that gather in its place, so that the other ranks are not left waiting.
    tree = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._calculate_rewards)))
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    collective = re.compile(r"(?!asyncio)[\w.]*(gather|reduce|broadcast|barrier|wait_for_everyone)\w*\(")
    assert list(filter(collective.match, calls)) == ["gather(rewards_per_func)"]
    assert importlib.import_module(GRPOTrainer.__module__).gather is accelerate.utils.gather


def test_every_loss_type_of_the_installed_trl_is_known() -> None:
    # TRL's own list is the chain of comparisons in its loss; a type of which only we know would be as wrong.
    tree = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._compute_loss)))
    known_to_trl: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "self.loss_type":
            known_to_trl |= {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)}
    assert known_to_trl == contract.LOSS_TYPES


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    """The package's files."""
    return [(file.relative_to(PACKAGE).as_posix(), ast.parse(file.read_text())) for file in PACKAGE.rglob("*.py")]


def mentioned(tree: ast.Module) -> set[str]:
    """Every attribute that is read or set, every method that is defined, every string (`getattr(x, "name")`)."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def of_trl(trained: Any) -> set[str]:
    """All names on TRL's trainer, whether of the class or set while it lives."""
    ours = {"kept_batches"}
    return {*dir(GRPOTrainer), *vars(trained)} - ours


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_every_private_name_of_trl_in_use_is_listed(trained: Any) -> None:
    private = {name for name in of_trl(trained) if is_private(name)}
    assert len(private) > 50
    # Rewards, samplers and what guards them never see a trainer, so a name of theirs is their own.
    near = [
        (file, tree)
        for file, tree in trees()
        if not file.startswith(("guard/", "history/report/", "prompt_samplers/", "rewards/", "testing/"))
    ]
    used = {(file, name) for file, tree in near for name in mentioned(tree) & private}
    assert {
        ("trainer/mixin.py", "_compute_loss"),
        ("trainer/upstream/acting.py", "_logs"),
        ("trainer/upstream/contract.py", "_entropy_window_stats"),
    } <= used
    unlisted = {(file, name) for file, name in used if name not in LISTED}
    assert not unlisted, f"private names of TRL that contract.METHODS and contract.ATTRIBUTES don't list: {unlisted}"
    elsewhere = {(file, name) for file, name in used if not file.startswith((*ADAPTER, OF_TRANSFORMERS))}
    assert not elsewhere, f"private names of TRL outside the adapter: {elsewhere}"


def test_nothing_is_listed_that_is_not_used() -> None:
    used: set[str] = set()
    for name, tree in trees():
        if name.startswith((OF_TRANSFORMERS, "trainer/")):
            # The lists themselves are no use.
            kept = [node for node in tree.body if name != f"{UPSTREAM}contract.py" or isinstance(node, ast.FunctionDef)]
            used |= mentioned(ast.Module(body=kept, type_ignores=[]))
    unused = {*LISTED, *contract.ARGUMENTS, *contract.BATCH_KEYS} - used
    assert not unused, f"listed in upstream and used nowhere: {unused}"


def test_no_name_of_ours_hides_one_of_trls(trained: Any) -> None:
    ours = {name for name in vars(GRPOExtMixin) if not name.startswith("__")} - contract.METHODS.keys()
    assert "loss_aggregation" in ours
    assert ours & of_trl(trained) == {"_buffered_inputs"}  # which ours arranges
