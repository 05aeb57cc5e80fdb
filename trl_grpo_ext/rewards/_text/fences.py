"""Fenced blocks of Markdown."""


def fences(text: str) -> list[tuple[str, int, int, bool]]:
    """The fenced blocks of a text: label in lower case, start and end of the inside, and whether it is closed.

    Linear in the text.
    """
    blocks: list[tuple[str, int, int, bool]] = []
    fence = ""
    start = 0
    for line in text.split("\n"):
        stripped = line.strip()
        end = start + len(line)
        if fence and stripped and set(stripped) == {fence[0]} and len(stripped) >= len(fence):
            blocks[-1] = (*blocks[-1][:3], True)
            fence = ""
        elif fence:
            blocks[-1] = (*blocks[-1][:2], end, False)
        elif stripped.startswith(("```", "~~~")):
            mark = stripped.lstrip(stripped[0])
            if "`" not in mark:  # else it is code in a line
                fence = stripped[: len(stripped) - len(mark)]
                inside = min(end + 1, len(text))
                blocks.append((mark.strip().partition(" ")[0].lower(), inside, inside, False))
        start = end + 1
    return blocks
