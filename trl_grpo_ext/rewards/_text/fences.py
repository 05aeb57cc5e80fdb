"""Fenced blocks of Markdown."""


def fences(text: str) -> list[tuple[str, str, bool]]:
    """The fenced blocks of a text: label in lower case, inside, and whether it is closed. Linear in the text."""
    blocks: list[tuple[str, list[str], bool]] = []
    fence = ""
    for line in text.split("\n"):
        stripped = line.strip()
        if fence and stripped and set(stripped) == {fence[0]} and len(stripped) >= len(fence):
            blocks[-1] = (*blocks[-1][:2], True)
            fence = ""
        elif fence:
            blocks[-1][1].append(line)
        elif stripped.startswith(("```", "~~~")):
            mark = stripped.lstrip(stripped[0])
            if "`" not in mark:  # else it is code in a line
                fence = stripped[: len(stripped) - len(mark)]
                blocks.append((mark.strip().partition(" ")[0].lower(), [], False))
    return [(label, "\n".join(inside), closed) for label, inside, closed in blocks]
