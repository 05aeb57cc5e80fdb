"""The text of messages, and of a completion in either of TRL's two forms."""

from collections.abc import Mapping
from typing import Any


def completion_text(completion: Any) -> str:
    """Return what the model wrote to the user.

    A string is returned unchanged. A list of messages gives the last assistant message with text (one that only calls a
    tool has none); a message without a role counts as the assistant's. The text blocks of block content are joined.
    Anything else gives an empty string: a completion never raises.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Mapping):
        completion = [completion]
    if not isinstance(completion, (list, tuple)):
        return ""
    for message in reversed(completion):
        if isinstance(message, Mapping) and message.get("role", "assistant") == "assistant":
            text = content_text(message.get("content"))
            if text and not text.isspace():
                return text
    return ""


def joined_text(completion: Any) -> str:
    """All text of a completion or prompt: a string itself, or the contents of its messages one after the other."""
    if isinstance(completion, Mapping):
        completion = [completion]
    if not isinstance(completion, (list, tuple)):
        return content_text(completion)
    return "".join(content_text(m.get("content") if isinstance(m, Mapping) else m) for m in completion)


def content_text(content: Any) -> str:
    """The text of a message's content: a string, or the text blocks of a list; anything else is empty."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        return ""
    parts = []
    for block in content:
        text = block.get("text") if isinstance(block, Mapping) and block.get("type", "text") == "text" else block
        if isinstance(text, str):
            parts.append(text)
    return "".join(parts)
