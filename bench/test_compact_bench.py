"""The benchmarks of compact updates: their rollouts are what they say, both arms run, the maths is right."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

from bench import compact_updates_gpu, rank_balance
from bench.compact_cells import EXACT, PLAIN, markdown, put
from bench.compact_rollouts import PROFILES, SHARES, Cell, Script, Size, completion_lengths, prompt_lengths
from bench.compact_updates import QUICK, run


def test_every_cell_is_measured_and_both_arms_make_the_same_update(tmp_path: Path) -> None:
    cells = [Cell(profile, share) for profile in PROFILES for share in SHARES]
    results = run(cells, QUICK, 1, tmp_path, tiny=True)
    assert [result.cell for result in results] == cells
    for result in results:
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in result.seconds.values())
        assert result.norm_gap < 1e-5
        assert result.padding[EXACT] <= 1.25
        assert 0 < result.peak[EXACT] <= result.peak[PLAIN]
    outliers = results[cells.index(Cell(PROFILES[2], 40))]
    assert outliers.padding[PLAIN] > 2
    assert outliers.peak[EXACT] < 0.75 * outliers.peak[PLAIN]
    lines = markdown(results).splitlines()
    assert len(lines) == 2 + 9
    assert len({line.count("|") for line in lines}) == 1


def test_the_lengths_are_those_of_the_profile() -> None:
    size = Size()
    assert set(completion_lengths(PROFILES[0], size, 10)) == {171}
    assert set(prompt_lengths(PROFILES[0], size)) == {56}
    log_normal = completion_lengths(PROFILES[1], size, 10)
    assert statistics.fmean(log_normal) == pytest.approx(512 / 3, rel=0.01)
    assert statistics.stdev(np.log(log_normal)) == pytest.approx(0.4, rel=0.02)
    assert max(log_normal) < 512
    assert sorted(prompt_lengths(PROFILES[1], size))[:: size.groups - 1] == [16, 96]


@pytest.mark.parametrize("groups_with_signal", [10, 6, 2, 1])
def test_completions_at_the_limit_are_in_groups_that_have_a_signal(groups_with_signal: int) -> None:
    size = Size()
    lengths = completion_lengths(PROFILES[2], size, groups_with_signal)
    at_the_limit = [row for row, length in enumerate(lengths) if length == size.limit]
    assert len(at_the_limit) == 2
    assert max(at_the_limit) < groups_with_signal * size.members


@pytest.mark.parametrize("share", SHARES)
def test_the_rewards_leave_the_wanted_share_without_signal(share: int) -> None:
    script = Script(Size())
    script.cell = Cell(PROFILES[1], share)
    rewards = np.array(script.reward(completions=[""] * 80)).reshape(10, 8)
    assert (rewards.std(axis=1) == 0).mean() == share / 100


def test_padding_of_plain_trl_by_hand() -> None:
    script = Script(Size(groups=2, members=2, limit=64))
    script.cell = Cell(PROFILES[2], 0)
    prompts, completions = script.lengths()
    assert sorted(prompts) == [2, 2, 12, 12]
    assert max(completions) == 64
    assert script.padding() == pytest.approx(4 * (12 + 64) / (28 + sum(completions)))


def test_generated_text_replaces_what_is_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a -->old<!-- end of a -->\nafter\n")
    put(page, "a", "new")
    put(page, "a", "newer")
    assert page.read_text() == "before\n<!-- a -->\n\nnewer\n\n<!-- end of a -->\nafter\n"


def test_text_is_added_to_a_page_without_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    put(page, "a", "first")
    put(page, "b", "second")
    assert page.read_text() == (
        "<!-- a -->\n\nfirst\n\n<!-- end of a -->\n\n<!-- b -->\n\nsecond\n\n<!-- end of b -->\n"
    )


def test_an_exchange_halves_the_work_where_one_rank_has_all_of_it() -> None:
    lengths = np.tile(np.array([10, 30], dtype=np.int64), (64, 1))
    blocks = [(lengths, np.full(64, signal)) for signal in (True, False)]
    sharded, ddp = rank_balance.planned(blocks, budget=8 * 40)
    assert (sharded, ddp) == (64 * 40, 64 * 40)
    dealt, moved = rank_balance.exchanged(blocks)
    assert [len(rows) for rows, _ in dealt] == [32, 32]
    assert moved == 32 * (40 * 16 + 30 * 12)  # ids and masks of all tokens, three log-probabilities of completions
    assert rank_balance.planned(dealt, budget=8 * 40) == (32 * 40, 32 * 40)


def test_ranks_meet_in_every_part_or_once_per_window() -> None:
    # 8 parts of one row on each rank: the first rank has the longest first part, the second longer ones behind it.
    first = np.array([[1, 99], *[[1, 9]] * 7], dtype=np.int64)
    second = np.array([[1, 29]] * 8, dtype=np.int64)
    runs = np.ones(8, dtype=bool)
    assert rank_balance.planned([(first, runs), (second, runs)], budget=100) == (100 + 7 * 30, 8 * 30)


def test_drawn_groups_without_signal_are_whole_and_as_many_as_asked() -> None:
    blocks = rank_balance.drawn(PROFILES[2], 40, 4, np.random.default_rng(0))
    runs = np.concatenate([rows for _, rows in blocks]).reshape(-1, rank_balance.MEMBERS)
    assert set(runs.mean(axis=1)) == {0.0, 1.0}
    assert (~runs[:, 0]).sum() == round(0.4 * 32)
    lengths = np.concatenate([rows for rows, _ in blocks])
    assert (lengths[:, 1] == rank_balance.LIMIT).sum() >= round(0.02 * 256)


def test_the_shapes_have_as_many_parameters_as_their_names_say() -> None:
    import torch
    from transformers import Qwen2ForCausalLM

    for name, parameters in {"0.5B": 494_032_768, "1.5B": 1_543_714_304}.items():
        with torch.device("meta"):
            model = Qwen2ForCausalLM(compact_updates_gpu.config_of(name, tiny=False))
        assert model.num_parameters() == parameters


def test_without_a_gpu_the_script_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    compact_updates_gpu.main([])
    assert "no CUDA device" in capsys.readouterr().out


def test_the_cells_that_say_most_come_first_and_none_is_missing() -> None:
    cells = compact_updates_gpu.cells_in_order()
    assert cells[0] == Cell(PROFILES[2], 40)
    assert len(cells) == len(set(cells)) == 9
