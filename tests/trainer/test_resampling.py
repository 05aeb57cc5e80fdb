"""`resample`: known rounds and kept groups; gradients of batches made by hand; ranks; checkpoints; bad filters.

The rollouts are scripted. Prompts are a, b, c, ... in this order, two for each batch; which are flat is known.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.support import (
    arguments,
    flat,
    length_reward,
    prompts,
    relative_gap,
    scripted_completion,
    scripted_rollout,
    train,
)
from tests.trainer.launch import launch
from tests.trainer.process_worker import Float64ExtTrainer, run_job
from tests.trainer.support import mixed
from trl_grpo_ext import GRPOExtTrainer, Rollout
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.types import FilterDeclaration

SIGNAL = {"filter": "signal"}


class Seen(Float64ExtTrainer):
    """Keeps what each loss is computed on."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        super().__init__(*arguments, **keywords)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.seen.append({key: v.clone() for key, v in inputs.items() if isinstance(v, torch.Tensor)})
        return super()._compute_loss(model, inputs)


def trained_on(trainer: Any, step: int) -> str:
    """The letters of the prompts of a step, each once, in alphabetical order."""
    texts = trainer.processing_class.batch_decode(trainer.seen[step]["prompt_ids"], skip_special_tokens=True)
    return "".join(sorted({text[0] for text in texts}))


def groups_logged(logs: list[dict[str, float]]) -> list[dict[str, float]]:
    steps = [log for log in logs if "loss" in log]
    return [{name[7:]: v for name, v in log.items() if name.startswith("groups/")} for log in steps]


def run(model: Path, folder: Path, letters: str = "a", **settings: Any) -> Any:
    settings = {"prompt_count": 8, "max_steps": 4, "resample": SIGNAL, "dtype": "float64", **settings}
    return train(model, folder, settings.pop("trainer_class", Seen), reward_funcs=flat(letters), **settings)


def test_rounds_kept_groups_and_metrics(tiny_model: Path, tmp_path: Path) -> None:
    # a is flat. 1: ab -> b, cd -> bc, d is left over. 2: ef. 3: gh. 4: ab -> b, cd -> bc.
    done = run(tiny_model, tmp_path)
    assert [trained_on(done.trainer, step) for step in range(4)] == ["bc", "ef", "gh", "bc"]
    found = zip([2, 1, 1, 2], [1, 0, 0, 1], strict=True)
    assert groups_logged(done.logs) == [
        {"kept": 1, "rounds": rounds, "prompts_used": 2 * rounds, "surplus": once} | {"dropped/equal_rewards": once}
        for rounds, once in found
    ]
    # TRL's metrics are of all that was sampled, the tokens too.
    logs = [log for log in done.logs if "loss" in log]
    assert [log["frac_reward_zero_std"] for log in logs] == [0.25, 0, 0, 0.25]
    lengths = [len(scripted_completion(f"{c}{'abcdefgh'.index(c)} ", n, 10)) for c in "abcdefghabcd" for n in range(4)]
    assert logs[-1]["num_tokens"] == sum(lengths) + 3 * len(lengths)
    assert [log["epoch"] for log in logs] == [0.25, 0.5, 0.75, 1.0]  # as without


DENOMINATORS: dict[str, dict[str, Any]] = {
    "rows": {"loss_type": "grpo", "beta": 0.3, "token_records": 4},
    "constant": {"loss_type": "dr_grpo", "compact_updates": "exact"},
    "rows, an entropy bonus": {"loss_type": "grpo", "beta": 0.3, "entropy_coef": 0.5, "token_records": 4},
    "constant, an entropy bonus": {"loss_type": "dr_grpo", "entropy_coef": 0.5},
    "sums, an entropy bonus": {"loss_type": "luspo", "entropy_coef": 0.5},
    "sapo, an entropy bonus": {"loss_type": "sapo", "entropy_coef": 0.5},
    "weights": {"loss_aggregation": "seq_mean_token_mean", "beta": 0.3},
    "groups": {"loss_aggregation": "prompt_mean", "compact_updates": "exact"},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", DENOMINATORS.values(), ids=DENOMINATORS.keys())
def test_resample_denominators_of_a_partial_batch(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    # Only b has a signal, so the gradient is that of a batch of b alone.
    filled = run(tiny_model, tmp_path / "filled", letters="acdefgh", max_steps=1, **settings)
    assert groups_logged(filled.logs)[0]["kept"] == 0.5
    wanted = by_hand(tiny_model, tmp_path / "hand", "b", per_device_train_batch_size=4, **settings)
    assert relative_gap(filled.weights, wanted.weights) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_resample_with_nothing_kept(tiny_model: Path, tmp_path: Path, loss_type: str) -> None:
    chosen = {"filter": {"name": "accuracy_between", "low": 8.0, "high": 9.0}, "max_rounds": 3}
    with pytest.warns(UserWarning, match="6 groups in 3 rounds"):
        done = run(tiny_model, tmp_path, resample=chosen, max_steps=2, loss_type=loss_type)
    assert [log["kept"] for log in groups_logged(done.logs)] == [0, 0]
    assert all(not gradient.any() for step in done.gradients for gradient in step.values())


@pytest.mark.slow
def test_a_filter_that_keeps_everything_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    # Over several passes, so that the order is TRL's in each of them.
    settings: dict[str, Any] = {"max_steps": 9, "shuffle_dataset": True, "seed": 3}
    keeps_all = {"name": "accuracy_between", "low": -100.0, "high": 100.0}
    with_it = run(tiny_model, tmp_path / "with", resample={"filter": keeps_all}, **settings)
    without = run(tiny_model, tmp_path / "without", resample=None, **settings)
    order = [trained_on(without.trainer, n) for n in range(9)]
    assert [trained_on(with_it.trainer, n) for n in range(9)] == order
    assert len({*order}) > 4
    assert max(map(relative_gap, with_it.gradients, without.gradients)) < 1e-12


def by_hand(model: Path, folder: Path, letters: str, **settings: Any) -> Any:
    """One step on these prompts, sampled at once."""
    rows = {"train_dataset": prompts(8).select(["abcdefgh".index(letter) for letter in letters])}
    return run(model, folder, **{"max_steps": 1, "resample": None, "trainer_arguments": rows, **settings})


SETTINGS: dict[str, dict[str, Any]] = {
    "compact": {"compact_updates": "exact"},
    "padded, sequence means, a kl penalty": {"pad_to_multiple_of": 16, "loss_type": "grpo", "beta": 0.3},
    "hooks of groups": {"advantage_hooks": ["leave_one_out", "sign_scaling"], "loss_aggregation": "prompt_mean"},
    "micro-batches": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_gradient_of_a_batch_by_hand(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    filled = run(tiny_model, tmp_path / "filled", max_steps=1, **settings)
    wanted = by_hand(tiny_model, tmp_path / "hand", "bc", **settings)
    assert relative_gap(filled.weights, wanted.weights) < 1e-13
    assert any(bool(gradient.any()) for gradient in filled.gradients[0].values())
    shapes = [[batch["completion_ids"].shape for batch in each.trainer.seen] for each in (filled, wanted)]
    assert shapes[0] == shapes[1]  # and no padding more


@pytest.mark.slow
def test_two_ranks_do_what_one_does(tiny_model: Path, tmp_path: Path) -> None:
    common = {
        "float64": True,
        "flat_groups": True,
        "prompt_count": 8,
        "max_steps": 4,
        "num_generations": 4,
        "resample": {"filter": {"name": "all_of", "filters": ["signal", "not_all_truncated"]}, "max_rounds": 3},
    }
    jobs = {
        "whole groups": {**common, "per_device_train_batch_size": 4},
        "split groups": {**common, "num_generations": 8, "per_device_train_batch_size": 4},
        "surplus": {**common, "per_device_train_batch_size": 6, "shuffle_dataset": True, "seed": 2},
        "not full": {**common, "per_device_train_batch_size": 8, "loss_type": "grpo", "beta": 0.1, "prompt_count": 7},
        "an aggregation": {**common, "per_device_train_batch_size": 6, "loss_aggregation": "prompt_mean"},
    }
    ranks = launch(jobs, tiny_model, tmp_path / "two")
    for name, job in jobs.items():
        both = {**job, "per_device_train_batch_size": 2 * job["per_device_train_batch_size"]}
        alone = run_job(tiny_model, tmp_path / name, both)
        for rank in ranks:
            assert relative_gap(rank[name]["weights"], alone["weights"]) < 1e-12
        logs = groups_logged(ranks[0][name]["logs"])
        assert logs == groups_logged(alone["logs"])
        assert max(log["rounds"] for log in logs) > 1
    assert any(log["surplus"] for log in groups_logged(ranks[0]["surplus"]["logs"]))
    assert any(log["kept"] < 1 for log in groups_logged(ranks[0]["not full"]["logs"]))


def resumed(model: Path, folder: Path, checkpoint: int, **settings: Any) -> Any:
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, **settings}
    return run(model, folder, resume=str(folder / f"checkpoint-{checkpoint}"), **settings)


@pytest.mark.slow
def test_resuming_is_exact(tiny_model: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {"shuffle_dataset": True, "advantage_hooks": ["centred"], "loss_aggregation": "token_mean"}
    whole = run(tiny_model, tmp_path, max_steps=6, save_strategy="steps", save_steps=1, **more)
    for checkpoint in (2, 5):  # in the second pass over the data too
        again = resumed(tiny_model, tmp_path, checkpoint, **more)
        assert relative_gap(again.weights, whole.weights) < 1e-13
        assert len(again.trainer.seen) == 6 - checkpoint
        for n, batch in enumerate(again.trainer.seen):
            assert torch.equal(batch["completion_ids"], whole.trainer.seen[checkpoint + n]["completion_ids"])


@pytest.mark.slow
def test_a_checkpoint_inside_a_generation_batch_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps_per_generation": 2, "per_device_train_batch_size": 4, "save_strategy": "steps"}
    with pytest.raises(ConfigurationError, match="save_steps=3"):
        run(tiny_model, tmp_path, **settings, save_steps=3)
    whole = run(tiny_model, tmp_path, max_steps=5, **settings, save_steps=2)  # and at the end, inside
    again = resumed(tiny_model, tmp_path, 2, **settings, save_steps=2, max_steps=5)
    assert relative_gap(again.weights, whole.weights) < 1e-13
    with pytest.raises(ConfigurationError):
        resumed(tiny_model, tmp_path, 5, **settings, save_steps=2, max_steps=8)


@pytest.mark.slow
def test_a_checkpoint_without_a_state_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    run(tiny_model, tmp_path, max_steps=2, save_strategy="steps", save_steps=1, resample=None)
    (tmp_path / "checkpoint-2" / "trl_grpo_ext_plugins.json").unlink()  # as of plain TRL
    with pytest.warns(UserWarning, match="plugins"), pytest.raises(ConfigurationError):
        resumed(tiny_model, tmp_path, 2, max_steps=3)


class KeepsAll:
    """Keeps every group, and what it saw."""

    def __init__(self, **declared: Any) -> None:
        self.declares = FilterDeclaration(**declared)

    def keep(self, rollout: Rollout) -> Any:
        self.seen = rollout
        return [True] * len(rollout.texts)


@pytest.mark.slow
def test_what_a_filter_sees(tiny_model: Path, tmp_path: Path) -> None:
    plain, needy = KeepsAll(), KeepsAll(needs=("advantages", "old_entropies"))
    for number, one in enumerate((plain, needy)):
        given = {"resample": {"filter": one}}
        train(tiny_model, tmp_path / str(number), max_steps=1, trainer_arguments=given)
    assert (plain.seen.advantages_B_T, plain.seen.old_entropies_B_T) == (None, None)
    assert needy.seen.advantages_B_T is not None
    assert needy.seen.old_entropies_B_T is not None


class TooLong:
    """Drops the first group, and the second for the same reason in another spelling."""

    def keep(self, rollout: Rollout) -> Any:
        kept = [True] * len(rollout.texts)
        size = rollout.num_generations
        return ["too long"] * size + ["too_long"] * size + kept[2 * size :]


@pytest.mark.slow
def test_reasons_that_share_a_metric_are_counted_together(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"trainer_arguments": {"resample": {"filter": TooLong(), "max_rounds": 1}}}
    done = train(tiny_model, tmp_path, prompt_count=8, max_steps=1, **settings)
    assert groups_logged(done.logs)[0]["dropped/too_long"] == 2


ADAPTS = {"name": "kl_in_reward", "form": "completion", "target": 0.1}
REFUSED: dict[str, dict[str, Any]] = {
    "batch_whitening": {"advantage_hooks": ["batch_whitening"]},
    "kl_in_reward": {"advantage_hooks": [ADAPTS], "beta": 0.1},
    "with batch": {"scale_rewards": "batch"},
}


class OwnLoss(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs)


@pytest.mark.slow
def test_what_cannot_be_exact_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    for named, settings in REFUSED.items():
        with pytest.raises(ConfigurationError, match=named):
            train(tiny_model, tmp_path, resample=SIGNAL, **settings)
    own = {"loss_type": "grpo", "entropy_coef": 0.5}
    with pytest.raises(ConfigurationError, match=r"entropy bonus .*dapo"):
        train(tiny_model, tmp_path, mixed(OwnLoss), resample=SIGNAL, **own)
    stream = {"train_dataset": prompts(8).to_iterable_dataset(), "rollout_func": scripted_rollout}
    with pytest.raises(ConfigurationError):
        GRPOExtTrainer(str(tiny_model), length_reward, arguments(tmp_path, resample=SIGNAL), **stream)
