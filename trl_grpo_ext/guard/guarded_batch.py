"""One batch of a guarded reward: what the cache knows, the calls for the rest, and the outcomes put together."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import PluginOutputError
from .calls import NOT_COLUMNS
from .guarded_calls import Result
from .outcomes import Judgement

# They belong to this process, and neither travel to another nor say anything about a completion.
STAY_HERE = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})
_NOT_IN_KEY = NOT_COLUMNS - {"prompts", "completions"}


class Batch:
    """One batch, cut into calls: which rows each of them has, and what became of them."""

    def __init__(
        self, completions: Sequence[Any], columns: Mapping[str, Any], batch_size: int | None, cache: Cache
    ) -> None:
        self.columns = {**columns, "completions": completions}
        self._count = len(completions)
        self._cache = cache
        self._keys = [cache.key(self._of_row(row)) for row in range(self._count)] if cache.size else []
        self._known: dict[int, Judgement] = {}
        self._same_as: dict[int, int] = {}
        first: dict[bytes, int] = {}
        for row, key in enumerate(self._keys):
            if key is None:
                continue
            if (kept := cache.get(key)) is not None:
                self._known[row] = kept
            elif first.setdefault(key, row) != row:
                self._same_as[row] = first[key]
        rows = [row for row in range(self._count) if row not in self._known and row not in self._same_as]
        size = batch_size or max(1, len(rows))
        self.calls = [rows[start : start + size] for start in range(0, len(rows), size)]
        self.results: dict[int, Result] = {}
        self.causes: dict[int, BaseException | None] = {}

    def _per_completion(self, name: str) -> bool:
        value = self.columns[name]
        return isinstance(value, list | tuple) and len(value) == self._count and name != "trainer_state"

    def _of_row(self, row: int) -> dict[str, Any]:
        names = (name for name in self.columns if name not in _NOT_IN_KEY and self._per_completion(name))
        return {name: self.columns[name][row] for name in names}

    def columns_of(self, call: int, *, leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
        """What the reward is called with."""
        rows = self.calls[call]
        if len(rows) == self._count:
            return {name: value for name, value in self.columns.items() if name not in leave_out}
        picked = {}
        for name, value in self.columns.items():
            if name in leave_out or name in ("log_extra", "log_metric"):  # these are for whole batches
                continue
            picked[name] = [value[row] for row in rows] if self._per_completion(name) else value
        return picked

    def judgements(self, reward: str) -> list[Judgement]:
        """Each completion's outcome, once all calls have results."""
        judged = dict(self._known)
        for call, rows in enumerate(self.calls):
            result = self.results[call]
            if result.broken is not None:
                if len(rows) == self._count:
                    raise result.broken
                raise PluginOutputError(
                    f"{result.broken} That call had {_rows(rows)} of the batch's {self._count}."
                ) from result.broken
            for position, row in enumerate(rows):
                judged[row] = result.judgement(position)
                self.causes[row] = result.cause
                if self._keys and (key := self._keys[row]) is not None and result.scores is not None:
                    self._cache.put(key, judged[row])
        for row, other in self._same_as.items():
            judged[row], self.causes[row] = judged[other], self.causes[other]
        return [judged[row] for row in range(self._count)]


class Jobs(Sequence[Any]):
    """The calls as jobs of a `WorkerPool`, made when they are asked for."""

    def __init__(self, batch: Batch, calls: Sequence[int]) -> None:
        self._batch, self._calls = batch, calls

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: Any) -> Any:
        return self._batch.columns_of(self._calls[index], leave_out=STAY_HERE)


class Cache:
    """The results used last, by a digest of what a completion was scored with."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: OrderedDict[bytes, Judgement] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Cache, (self.size,)  # a copy begins empty

    def key(self, row: Mapping[str, Any]) -> bytes | None:
        """None for what is no plain data, whose `repr` or pickle need not tell two values apart."""
        try:
            text = json.dumps(row, sort_keys=True)
        except (TypeError, ValueError, RecursionError):
            return None
        return hashlib.blake2b(text.encode(), digest_size=32).digest()

    def get(self, key: bytes) -> Judgement | None:
        """What is kept under this key."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: bytes, judgement: Judgement) -> None:
        """Keep a result; the one not used for longest makes room."""
        with self._lock:
            self._kept[key] = judgement
            self._kept.move_to_end(key)
            while len(self._kept) > self.size:
                self._kept.popitem(last=False)


def _rows(rows: Sequence[int]) -> str:
    return f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} rows, {rows[0]} to {rows[-1]},"
