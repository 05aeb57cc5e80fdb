"""Pictures of prompts: from a data set's image to the token records, and from anybody's file to a page."""

import base64
import io
import re
import struct
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from tests.history.report.make_big_run import byte_level, rollout_of, write_around, write_step
from tests.history.report.test_page import unpack
from tests.tiny_vision import drawing
from trl_grpo_ext.history.report import load_run
from trl_grpo_ext.history.report.page import page
from trl_grpo_ext.history.report.page_data import page_data
from trl_grpo_ext.history.run_files import read_columns
from trl_grpo_ext.records.pictures import EDGE, LARGEST, MOST, copies_of, data_uri


def jpeg(width: int, height: int, **options: Any) -> bytes:
    buffer = io.BytesIO()
    drawing(0, width, height).save(buffer, **{"format": "JPEG", **options})
    return buffer.getvalue()


def asked(*pictures: Any) -> list[dict[str, Any]]:
    blocks = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*blocks, {"type": "text", "text": "what colour?"}]}]


def opened(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/jpeg;base64,"))))


def test_copies_of_a_prompt() -> None:
    (copy,) = copies_of(asked(drawing(1, 1024, 512).convert("RGBA")))
    assert Image.open(io.BytesIO(copy)).size == (EDGE, EDGE // 2)
    assert len(copies_of(asked(*[drawing(1)] * 9))) == MOST
    assert copies_of(asked("https://a.place/picture.png", {"bytes": b"..."}, None)) == []
    assert copies_of("a text") == copies_of([{"role": "user", "content": "a text"}]) == copies_of(None) == []


def test_a_copy_is_encoded_again() -> None:
    marked = jpeg(64, 32, comment=b"<script>alert(1)</script>")
    assert b"script" in marked
    shown = opened(data_uri(marked))
    assert shown.size == (64, 32)
    assert b"script" not in base64.b64decode(data_uri(marked).partition(",")[2])
    noise = Image.frombytes("RGB", (EDGE, EDGE), torch.randint(0, 256, (3 * EDGE * EDGE,)).byte().numpy().tobytes())
    (copy,) = copies_of(asked(noise))
    assert len(copy) < LARGEST
    assert opened(data_uri(copy)).size == (EDGE, EDGE)


def claimed(width: int, height: int) -> bytes:
    """A small file whose header has these sizes."""
    whole = bytearray(jpeg(16, 16))
    at = whole.index(b"\xff\xc0") + 5
    whole[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(whole)


HOSTILE: dict[str, Any] = {
    "empty": b"",
    "svg": b"<svg onload=alert(1)>",
    "png": jpeg(16, 16, format="PNG"),
    "cut": jpeg(64, 64)[:200],
    "large": jpeg(EDGE + 1, 4),
    "claims to be huge": claimed(65000, 65000),
    "claims no width": claimed(0, 16),
    "long": jpeg(16, 16) + b"x" * LARGEST,
    "none": None,
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_files_are_refused(hostile: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (whatever is wrong with it)
        data_uri(HOSTILE[hostile])


def test_pictures_stand_beside_their_prompts(tmp_path: Path) -> None:
    """Two groups have the same text and different pictures; a damaged one is left out and named."""
    run = tmp_path / "run"
    write_around(run, 10)
    prompts: Any = [asked(drawing(1)), asked(drawing(2), drawing(3)), asked(drawing(4))]
    rewards = torch.rand(6, 3).double()
    path = write_step(run, 10, rollout_of(prompts, [[5, 6, 7, 8, 9]] * 6, byte_level(), rewards))
    table = pyarrow.parquet.read_table(path)
    copies = read_columns(path)["images"]
    assert copies[0] == copies[1] == copies_of(prompts[0])
    damaged = [*copies[:4], [copies[4][0][:40]], copies[5]]
    pyarrow.parquet.write_table(table.set_column(table.column_names.index("images"), "images", [damaged]), path)
    loaded = load_run(run)
    data = page_data([loaded], 100)
    text = unpack(data.chunks[data.index["runs"][0]["steps"][0]["text"]])
    shown = [text["pictures"][prompt] for prompt in text["prompt"]]
    assert [len(pictures) for pictures in shown] == [1, 1, 2, 2, 0, 1]
    assert shown[0] == shown[1] != shown[5]
    assert opened(shown[2][1]).size == (16, 16)
    assert "\n".join(loaded.missing).count("was left out: it is no JPEG") == 1
    html, notes = page([loaded], 100)
    assert any("was left out" in note for note in notes)
    assert not re.search(r'src="(?!data:)', html)
