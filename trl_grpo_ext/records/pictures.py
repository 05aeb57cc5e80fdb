"""Small copies of a prompt's pictures, which the token records keep and the report shows.

What a report reads may be anybody's file. Only a JPEG of the size that we write is decoded, and the page has what
pillow encodes again.
"""

import base64
import io
from collections.abc import Mapping
from typing import Any

EDGE = 256  # pixels of the longest edge of a copy
MOST = 4  # pictures kept of a prompt
LARGEST = 300_000  # bytes of a copy; noise of 256 by 256 pixels takes 60,000


def copies_of(prompt: Any) -> list[bytes]:
    """JPEGs of the first pictures in a prompt's messages, of those that pillow holds."""
    messages = prompt if isinstance(prompt, list) else []
    contents = [one.get("content") for one in messages if isinstance(one, Mapping)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    pictures = [block.get("image") for block in blocks if isinstance(block, Mapping) and block.get("type") == "image"]
    if not pictures:
        return []
    try:
        from PIL import Image
    except ImportError:
        return []
    return [_jpeg(picture) for picture in pictures[:MOST] if isinstance(picture, Image.Image)]


def data_uri(content: Any) -> str:
    """A copy that was read from a file, encoded again; a `ValueError` if it is no JPEG, or larger than any copy is."""
    from PIL import Image

    if not isinstance(content, bytes) or len(content) > LARGEST:
        raise ValueError("it is larger than a copy")
    try:
        picture = Image.open(io.BytesIO(content), formats=["JPEG"])
        if max(picture.size) > EDGE:
            raise ValueError(f"it has {picture.size[0]} x {picture.size[1]} pixels")
        encoded = _jpeg(picture)
    except (OSError, SyntaxError, TypeError, LookupError, OverflowError, Image.DecompressionBombError) as error:
        raise ValueError(f"it is no JPEG ({type(error).__name__})") from error
    return f"data:image/jpeg;base64,{base64.b64encode(encoded).decode('ascii')}"


def _jpeg(picture: Any) -> bytes:
    buffer = io.BytesIO()
    small = picture.convert("RGB")
    small.info.clear()  # its metadata
    small.thumbnail((EDGE, EDGE))
    small.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
