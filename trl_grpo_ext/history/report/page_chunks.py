"""How the page carries its data: gzip in base64, numbers as byte planes, three bytes each.

A number keeps the first 24 of the 32 bits of a float32, rounded: its relative error is at most 2⁻¹⁶ (0.0016 %). The
bytes of a column are stored in planes, all first bytes, then all second ones, which gzip makes small. Whole numbers
keep four bytes. In front of the planes stands a header as JSON, and in front of that its length as four bytes, the
lowest first.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

_FLOAT_BYTES, _INTEGER_BYTES = 3, 4


def squeezed(content: bytes) -> str:
    """Bytes as gzip in base64; the same for the same bytes."""
    return base64.b64encode(gzip.compress(content, compresslevel=6, mtime=0)).decode("ascii")


def unsqueeze(text: str) -> bytes:
    """What `squeezed` made small."""
    return gzip.decompress(base64.b64decode(text))


def rounded(values: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """The numbers as the page has them: float32 with 15 bits behind the leading one, to the nearest."""
    import numpy

    bits = numpy.ascontiguousarray(values, dtype=numpy.float32).view(numpy.uint32)
    finite = (bits & numpy.uint32(0x7F800000)) != 0x7F800000
    largest = (bits & numpy.uint32(0x7FFFFFFF)) >= 0x7F7FFF80  # would round up to infinity
    up = numpy.where(finite & ~largest, bits + numpy.uint32(0x80), bits)
    kept: numpy.ndarray[Any, Any] = (up & numpy.uint32(0xFFFFFF00)).view(numpy.float32)
    return kept


def pack(counts: Sequence[int], columns: Mapping[str, numpy.ndarray[Any, Any]]) -> bytes:
    """Columns with one value per token, as bytes.

    Args:
        counts: Tokens of each row, one row after the other.
        columns: By name, `sum(counts)` values each: floating point, or whole numbers.
    """
    import numpy

    total = sum(counts)
    described, planes = [], []
    for name, values in columns.items():
        if values.shape != (total,):
            raise ValueError(f"The column {name!r} has the shape {values.shape}, not ({total},).")
        whole = values.dtype.kind in "iub"
        kept = values.astype("<i4") if whole else rounded(values).astype("<f4")
        bytes_of = kept.view(numpy.uint8).reshape(total, 4)
        # The most significant byte first; of a float the last one is zero and left out.
        planes += [bytes_of[:, 3 - place].tobytes() for place in range(_INTEGER_BYTES if whole else _FLOAT_BYTES)]
        described.append([name, "integer" if whole else "float"])
    header = json.dumps({"counts": list(counts), "columns": described}).encode("ascii")
    return len(header).to_bytes(4, "little") + header + b"".join(planes)


def unpack(content: bytes) -> tuple[list[int], dict[str, numpy.ndarray[Any, Any]]]:
    """What `pack` packed: the tokens of each row, and the columns. The page does the same in `assets/chunks.js`."""
    import numpy

    size = int.from_bytes(content[:4], "little")
    header = json.loads(content[4 : 4 + size])
    place, total = 4 + size, sum(header["counts"])
    columns: dict[str, numpy.ndarray[Any, Any]] = {}
    for name, kind in header["columns"]:
        count = _INTEGER_BYTES if kind == "integer" else _FLOAT_BYTES
        bytes_of = numpy.zeros((total, 4), numpy.uint8)
        for plane in range(count):
            bytes_of[:, 3 - plane] = numpy.frombuffer(content, numpy.uint8, total, place)
            place += total
        columns[name] = bytes_of.reshape(-1).view("<i4" if kind == "integer" else "<f4")
    return header["counts"], columns
