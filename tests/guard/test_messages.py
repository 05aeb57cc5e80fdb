"""The text of messages: the last that the assistant wrote, or all of it."""

from typing import Any

from trl_grpo_ext.guard.messages import completion_text

CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "calculator"}}]}
TOOL = {"role": "tool", "content": "5"}
IMAGE = {"type": "image", "url": "5"}


def says(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


MESSAGES = [
    *(("18", "18"), ([says("18")], "18"), (says("18"), "18"), ([says("17"), says("18")], "18")),
    *(([says([IMAGE, {"type": "text", "text": "1"}, {"type": "text", "text": "8"}, "."])], "18."), ([CALL], "")),
    *(([CALL, TOOL, says("18")], "18"), ([says("18"), CALL, TOOL], "18"), ([says("18"), says(" \n")], "18")),
    *(([{"role": "tool", "content": "18"}], ""), ([], ""), (None, ""), ([18, "18"], "")),
]


def test_completion_text_is_the_last_of_the_assistant() -> None:
    for completion, text in MESSAGES:
        assert completion_text(completion) == text
