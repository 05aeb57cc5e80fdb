"""The results used last, by a digest of what they are of."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Keeps so many results, those used last, each under a `digest`. For any thread; a copy by pickle begins empty.

    Args:
        size: How many; 0 keeps none.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.size,)

    def get(self, key: bytes | None) -> T | None:
        """What is kept under this key; None where it is nothing."""
        with self._lock:
            if key is None or key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key]

    def put(self, key: bytes | None, result: T) -> None:
        """Keep a result; the one not used for longest makes room. Without a key nothing is kept."""
        if key is None:
            return
        with self._lock:
            self._kept[key] = result
            self._kept.move_to_end(key)
            while len(self._kept) > self.size:
                self._kept.popitem(last=False)


def digest(data: Any) -> bytes | None:
    """A digest of JSON data; None for what is no plain data, whose `repr` or pickle need not distinguish two values."""
    try:
        text = json.dumps(data, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=32).digest()
