"""What a real training recorded, run again: the advantages and weights that its loss used."""

from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from tests.support import length_reward, train
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.history.compare import Comparison, compare

CASES: dict[str, dict[str, Any]] = {
    "bnpo, no scale": {"loss_type": "bnpo", "scale_rewards": "none", "mask_truncated_completions": True},
    "luspo, signs": {"loss_type": "luspo", "advantage_hooks": [{"name": "sign_scaling", "positive": 0.5}]},
    "cispo, tokens": {
        "loss_type": "cispo",
        "advantage_hooks": ["prefix_tree", "repetition_penalty", "truncation_masking"],
    },
    "old policy": {"advantage_hooks": ["zero_variance_credit", "low_probability"], "loss_aggregation": "sign_balanced"},
    "tail mean": {"loss_aggregation": "tail_mean"},
    "shaped, scheduled": {
        "advantage_hooks": [
            "tests.trainer.test_rollout_stage:ByTokens",
            {"name": "reward_schedule", "weights": {"length_reward": [[0, 0.5], [4, 2.0]]}},
        ],
        "scale_rewards": "none",
    },
    "skipping": {"loss_aggregation": {"name": "length_power", "alpha": 0.75, "skip_zero_variance": True}},
}
"""Those that `test_derivatives.py` does not hold against a training's gradient."""


def coarse_reward(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """One or nothing, so that some groups have no signal; and no value for some."""
    return [None if ids[0] % 5 == 0 else float(sum(ids) % 2) for ids in completion_ids]


def records(folder: Path) -> list[list[dict[str, Any]]]:
    files = sorted((folder / "token_records").glob("*.parquet"))
    assert len(files) == 2
    return [pyarrow.parquet.read_table(file).to_pylist() for file in files]


def assert_as_recorded(compared: Comparison, name: str, folder: Path) -> None:
    both = zip(records(folder), compared.results[name], strict=True)
    live = 0
    for rows, played in both:
        assert len(rows) == len(played.advantages_B_T) == 8
        for row, advantages_T, weights_T in zip(rows, played.advantages_B_T, played.weights_B_T, strict=True):
            size = len(row["token_ids"])
            assert advantages_T[:size].tolist() == pytest.approx(row["advantage"], rel=1e-4, abs=1e-5)
            assert weights_T[:size].tolist() == pytest.approx(row["weight"], rel=1e-4, abs=1e-8)
            live += sum(weight > 0 for weight in row["weight"])
    assert live > 20


QUICK = ("cispo, tokens", "tail mean")


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in CASES])
def test_run_selection_gives_what_the_loss_used(tiny_model: Path, tmp_path: Path, case: str) -> None:
    settings = {"max_completion_length": 10, **CASES[case]}
    train(tiny_model, tmp_path, token_records=8, **settings)
    compared = compare(tmp_path, [settings, {"loss_aggregation": "token_sum"}])
    assert_as_recorded(compared, "selection 1", tmp_path)
    assert all([*batch.rewards] == ["length_reward"] for batch in compared.batches)  # not what a shaper added
    # What was compared is not the same whatever is selected.
    with pytest.raises(AssertionError):
        assert_as_recorded(compared, "selection 2", tmp_path)


WEIGHTED: list[dict[str, Any]] = [
    {"reward_weights": [2.0, -1.0], "multi_objective_aggregation": "normalize_then_sum"},
    {"reward_weights": [0.0, 1.0], "advantage_hooks": ["normalised"], "loss_aggregation": "sign_balanced"},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", WEIGHTED, ids=["each normalised", "one of two"])
def test_run_selection_of_two_rewards(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    train(tiny_model, tmp_path, token_records=8, reward_funcs=[length_reward, coarse_reward], **settings)
    called = {**settings, "rewards": [length_reward, coarse_reward]}
    unsaid = {name: value for name, value in settings.items() if name != "reward_weights"}  # those of the run count
    selections = [settings, called, unsaid]
    compared = compare(tmp_path, selections)
    for number in range(1, len(selections) + 1):
        assert_as_recorded(compared, f"selection {number}", tmp_path)
    assert any(row["rewards"][1][1] is None for rows in records(tmp_path) for row in rows)
    assert [pair.moved for pair in compared.pairs] == [pytest.approx(0, abs=1e-9)] * (len(selections) - 1)


def assert_to_the_digit(compared: Comparison, name: str, folder: Path, count: int) -> None:
    for batch, played in zip(compared.batches, compared.results[name], strict=True):
        rows = pyarrow.parquet.read_table(folder / "token_records" / f"step_{batch.step:05d}.parquet").to_pylist()
        for row, advantages_T in zip(rows, played.advantages_B_T.tolist(), strict=True):
            assert advantages_T[: len(row["advantage"])] == row["advantage"]
            count -= 1
    assert count == 0


SCHEDULE = {"name": "reward_schedule", "form": "step", "weights": {"coarse_reward": [[0, 0.0], [1, 1.0]]}}
RUN = {"reward_funcs": [length_reward, coarse_reward], "reward_weights": [0.5, 0.0]}


def test_run_selection_knows_weights_and_step(tiny_model: Path, tmp_path: Path) -> None:
    hooks = [SCHEDULE, "centred"]
    train(tiny_model, tmp_path, token_records=16, steps_per_generation=2, max_steps=4, advantage_hooks=hooks, **RUN)
    compared = compare(tmp_path, {"same": {"advantage_hooks": hooks}, "without": {"advantage_hooks": ["centred"]}})
    assert [(batch.step, batch.scored_step) for batch in compared.batches] == [(2, 0), (4, 2)]
    assert all(batch.weights == {"length_reward": 0.5, "coarse_reward": 0.0} for batch in compared.batches)
    assert_to_the_digit(compared, "same", tmp_path, 32)
    # A selection without the schedule has the run's weights.
    alone = [0.5 * value for batch in compared.batches for value in batch.rewards["length_reward"] if value is not None]
    assert compared.selections[1].reward_mean == pytest.approx(sum(alone) / 32)
    assert compared.selections[0].reward_mean > compared.selections[1].reward_mean + 0.1


def test_run_selection_without_the_runs_other_files(tiny_model: Path, tmp_path: Path) -> None:
    train(tiny_model, tmp_path, token_records=8, advantage_hooks=[SCHEDULE, "centred"], **RUN)
    (tmp_path / "trl_grpo_ext_settings.json").unlink()
    assert_to_the_digit(compare(tmp_path, [{"advantage_hooks": [SCHEDULE, "centred"]}]), "selection 1", tmp_path, 16)
    (tmp_path / "trl_grpo_ext_plugins.json").unlink()
    with pytest.raises(ConfigurationError, match=r"length_reward, coarse_reward.* are unknown: give reward_weights"):
        compare(tmp_path, [{"advantage_hooks": ["centred"]}])


def test_run_selection_unmasks_what_the_run_masked(tiny_model: Path, tmp_path: Path) -> None:
    runs = {masked: tmp_path / str(masked) for masked in (True, False)}
    for masked, folder in runs.items():
        train(tiny_model, folder, token_records=8, max_steps=1, mask_truncated_completions=masked)
    settings: dict[str, dict[str, Any]] = {"no": {"mask_truncated_completions": False}, "as the run": {}}
    compared = compare(runs[True], settings)
    assert_to_the_digit(compared, "no", runs[False], 8)
    assert_to_the_digit(compared, "as the run", runs[True], 8)
    unmasked, masked = (compared.results[name][0] for name in settings)
    assert unmasked.mask_B_T.sum() > masked.mask_B_T.sum()
    assert masked.mask_B_T[torch.tensor(compared.batches[0].truncated)].sum() == 0


def test_compare_takes_temperature_and_limit_of_the_run(tiny_model: Path, tmp_path: Path) -> None:
    settings = {"temperature": 0.5, "loss_type": "dr_grpo", "learning_rate": 0.0}
    train(tiny_model, tmp_path, token_records=16, per_device_train_batch_size=16, max_steps=1, **settings)
    compared = compare(tmp_path, [{"loss_type": "dr_grpo"}], model=str(tiny_model))
    assert not any("another policy" in sentence for sentence in compared.notes), compared.notes
    assert any("another policy" in one for one in compare(tmp_path, [{}], model=str(tiny_model), temperature=1.0).notes)
    (played,) = compared.results["selection 1"]
    assert played.weights_B_T.max() == pytest.approx(1 / (16 * 10))  # TRL's own default is 512


@pytest.mark.slow
def test_read_saved_takes_the_later_of_two_files(tiny_model: Path, tmp_path: Path) -> None:
    train(tiny_model, tmp_path, token_records=16, steps_per_generation=2, prompt_count=4)
    shaped = {"advantage_hooks": ["entropy_shaping"]}
    compared = compare(tmp_path, [shaped])
    assert list(compared.steps) == [2]
    assert any("1 of 2 tables" in sentence for sentence in compared.notes)
    first, second = sorted((tmp_path / "token_records").iterdir())
    second.unlink()
    with pytest.raises(ConfigurationError):  # half of the first had not been trained on
        compare(first, [shaped])
    compare(first, [{"advantage_hooks": ["centred"]}])


def by_prompt(completion_ids: list[list[int]], prompts: list[str], **columns: Any) -> list[float]:
    """The same for all completions of every other prompt: their groups have no signal."""
    varied = length_reward(completion_ids)
    return [value if prompt[0] in "ac" else 1.0 for value, prompt in zip(varied, prompts, strict=True)]


@pytest.mark.slow
def test_read_saved_leaves_out_untrained_groups(tiny_model: Path, tmp_path: Path) -> None:
    train(tiny_model, tmp_path, token_records=8, compact_updates="exact", reward_funcs=by_prompt)
    compared = compare(tmp_path, [{}, {"advantage_hooks": ["entropy_shaping"]}])
    assert (compared.completions, compared.groups) == (8, 2)
    assert any("8 completions are left out" in sentence for sentence in compared.notes)
    recorded = [row["advantage"] for rows in records(tmp_path) for row in rows if row["advantage"] is not None]
    again = [row for played in compared.results["selection 1"] for row in played.advantages_B_T.tolist()]
    assert len(recorded) == len(again) == 8
    for ours, theirs in zip(again, recorded, strict=True):
        assert ours[: len(theirs)] == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert compare(tmp_path, [{}]).completions == 16  # nobody has to see them
