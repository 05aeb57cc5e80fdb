"""Images in TRL's batches and passes, of which processors make one tensor: one part for each row, and joined again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid

from ..batch import PROMPT_TYPES
from . import contract, reading

COUNTS = frozenset({"num_images", "num_tiles"})  # lists of numbers, one for each row, which no model takes


@dataclass(frozen=True)
class Images:
    """The images of some rows."""

    parts: Mapping[str, Sequence[Any]]  # by entry and row; None for a row whose batch had no images
    types: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Images:
        """Those of a batch, or of a pass by the names of its arguments."""
        entries = reading.images_of(batch)
        types = {key: entries.pop(key) for key in PROMPT_TYPES if key in entries}
        if "pixel_attention_mask" not in entries or "spatial_shapes" in entries:  # else each row has its own
            entries = split_pixel_values_by_grid(entries)
        parts = {key: torch.split(value, 1) if torch.is_tensor(value) else value for key, value in entries.items()}
        return cls(parts, types)

    def __bool__(self) -> bool:
        return "pixel_values" in self.parts

    def at(self, rows: Sequence[int]) -> Images:
        parts = {key: [parts[row] for row in rows] for key, parts in self.parts.items()}
        return Images(parts, {key: types[[*rows]] for key, types in self.types.items()})

    def with_types(self, changed: Callable[[torch.Tensor], torch.Tensor]) -> Images:
        """The same with other columns."""
        return Images(self.parts, {key: changed(types) for key, types in self.types.items()})

    def between(self, columns: slice) -> Images:
        return self.with_types(lambda types: types[:, columns])

    def same(self, one: int, other: int) -> bool:
        """Whether two rows have the same images."""
        pairs = [(parts[one], parts[other]) for parts in self.parts.values()]
        return all(torch.equal(*pair) if torch.is_tensor(pair[0]) else pair[0] == pair[1] for pair in pairs)

    def entries(self, device: torch.device) -> dict[str, Any]:
        """The opposite of `of`; where no row has an image, none of the tensors is left."""
        entries: dict[str, Any] = {key: [count or 0 for count in self.parts[key]] for key in COUNTS & self.parts.keys()}
        for key in self.parts.keys() - COUNTS:
            if tensors := [part for part in self.parts[key] if part is not None and len(part)]:
                entries[key] = torch.cat(_of_one_shape(tensors)).to(device)
        return {**entries, **self.types}

    def packed(self, rows: Sequence[int], source_L: torch.Tensor) -> dict[str, Any]:
        """What a model takes of these rows where their tokens stand in one; `source_L` are places in `(B * W,)`."""
        entries = Images(self.at(rows).parts, {}).entries(source_L.device)
        if "pixel_attention_mask" in entries and "spatial_shapes" not in entries:
            for key in ("pixel_values", "pixel_attention_mask"):
                entries[key] = entries[key].flatten(0, 1).unsqueeze(0)
        entries |= {key: types.reshape(1, -1)[:, source_L] for key, types in self.types.items()}
        return {key: value for key, value in entries.items() if key not in COUNTS}


NO_IMAGES = Images({}, {})


def _of_one_shape(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Pictures of different sizes, or rows with different numbers of them, filled up with zeros as processors do."""
    largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]

    def missing(tensor: torch.Tensor) -> Iterator[int]:
        for size, wanted in zip(reversed(tensor.shape[1:]), reversed(largest), strict=True):
            yield from (0, wanted - size)

    return [pad(tensor, [*missing(tensor)]) for tensor in tensors]


def by_row(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with a list for each entry of images, and its token types cut where the completions begin."""
    found = Images.of(batch)
    width = batch["prompt_ids"].size(1)
    rows = {**batch, **{key: [*parts] for key, parts in found.parts.items()}}
    for key, types in found.types.items():
        rows[PROMPT_TYPES[key]] = types[:, :width]
        rows[key] = types[:, width:]
    return rows


def joined(rows: dict[str, Any]) -> dict[str, Any]:
    """The opposite of `by_row`."""
    batch = dict(rows)
    parts = {key: batch.pop(key) for key in contract.MULTIMODAL_KEYS if isinstance(rows.get(key), list)}
    types = {key: torch.cat([batch.pop(own), batch[key]], dim=1) for key, own in PROMPT_TYPES.items() if own in rows}
    return {**batch, **Images(parts, types).entries(batch["prompt_ids"].device)}
