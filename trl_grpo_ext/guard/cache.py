"""A least-recently-used cache of results, keyed by a digest of their inputs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Keeps the `size` most recently used results by `digest`. Thread-safe; a pickled copy starts empty."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.size,)

    def get(self, key: bytes | None) -> T | None:
        """The result under this key, or None."""
        with self._lock:
            if key is None or key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key]

    def put(self, key: bytes | None, result: T) -> None:
        """Keep a result; without a key, do nothing."""
        if key is None:
            return
        with self._lock:
            self._kept[key] = result
            self._kept.move_to_end(key)
            while len(self._kept) > self.size:
                self._kept.popitem(last=False)


def digest(data: Any) -> bytes | None:
    """A digest of JSON data; None for anything else, since equal `repr`s or pickles may hide different values."""
    try:
        text = json.dumps(data, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=32).digest()
