"""TRL's batch by hand: which tokens count, and batches joined."""

import torch

from trl_grpo_ext.trainer.batch import BatchKeys, counting_mask, join_batches, scaled_for_masked_groups, two_rows_of


def test_counting_mask_leaves_out_tools() -> None:
    batch = {"completion_mask": torch.tensor([[1, 1, 0]]), "tool_mask": None}
    assert counting_mask(batch).tolist() == [[1, 1, 0]]
    assert counting_mask({**batch, "tool_mask": torch.tensor([[1, 0, 1]])}).tolist() == [[1, 0, 0]]


def test_join_batches_by_kind_of_entry() -> None:
    one = {"completion_ids": torch.tensor([[5, 6]]), "images": ["a"], "items": torch.tensor(3), "none": None}
    two = two_rows_of(one)
    assert (two["completion_ids"].tolist(), two["images"], two["none"]) == ([[5, 6], [5, 6]], ["a", "a"], None)
    assert two["items"].item() == 3  # no row of its own
    assert two_rows_of(two) == two
    assert join_batches([two, one])["completion_ids"].shape == (3, 2)


def test_scaled_for_masked_groups_only_where_there_are_some() -> None:
    assert [scaled_for_masked_groups(6.0, batch) for batch in ({}, {BatchKeys.masked_groups_factor: 1.5})] == [6.0, 9.0]
