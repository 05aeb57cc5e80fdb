"""Fenced blocks as models write them: in tags and lists, after prose, closed on the last line of code.

A fence in a triple-quoted string of a block belongs to the string. Everything here is linear in the text.
"""

import re

Block = tuple[str, int, int, bool]  # label in lower case, start and end of the inside, whether it is closed

_IN_A_LINE = r"(?<!`)```(?!`)(?:(?P<label>(?i:json|python3?|py))[ \t]+)?(?P<inside>[^`\n]++)```(?!`)"
_OUTSIDE = re.compile(
    rf"(?P<thought></think(?:ing)?>)|{_IN_A_LINE}|(?P<fence>(?<!`)`{{3,}}+|^[ \t]*+~{{3,}}+)(?P<mark>[^`\n]*+)$", re.M
)
_ANSWERS = ("", "json", "python", "python3", "py")
_LABEL = re.compile(r"[{.\s]*+([\w+#-]*)")
# What may stand before a fence that opens a block but not its line: with a label anything, else one of these.
_LEADS = re.compile(r".*[:>]\s*|\s*(?:[-*+]|\d+[.)])\s*")
# In a block: what hides fences (escapes, comments, strings), and what ends it. Where no quote follows that would close
# a string, none is looked for again before the line ends, so each line is read a few times at most.
_INSIDE = {
    mark: re.compile(
        r"\\.|#[^\n]*+|(?P<quotes>'''|\"\"\")|'(?:[^'\\\n]|\\.)*+'|\"(?:[^\"\\\n]|\\.)*+\""
        rf"|(?P<tag></(?:think(?:ing)?|answer)>)|{_IN_A_LINE}|(?P<fence>^[ \t]*+{mark}{{3,}}+)|(?P<glued>{glued})",
        re.M,
    )
    for mark, glued in (("`", r"(?<!`)`{3,}+(?=[ \t\r]*+(?:<|$))"), ("~", r"(?!)"))
}
_STRINGS = {
    mark: re.compile(rf"((?:[^{mark[0]}\\]|\\.|{mark[0]}(?!{mark[1:]}))*+){mark}", re.S) for mark in ("'''", '"""')
}
_FENCES = re.compile(r"^[ \t]*+(?:`{3,}+|~{3,}+)(\w*)", re.M)


def fences(text: str) -> list[Block]:
    """The fenced blocks of a text; those in the thinking only if all that follow it are of other languages."""
    blocks: list[Block] = []
    thought: list[Block] = []
    before: list[Block] = []  # a block that the prompt has opened
    unclosed: set[str] = set()
    last = len(text.rstrip())
    begin = at = 0
    while found := _OUTSIDE.search(text, at):
        at = found.end()
        if found["thought"]:
            thought = _joined(thought, blocks)
            blocks = []
            before = []
            begin = at
        elif found["inside"]:
            if found["label"]:
                blocks.append((found["label"].lower(), *found.span("inside"), True))
        elif found["mark"].strip().startswith("<") or (not found["mark"].strip() and at >= last):  # nothing follows
            before = before or [("", begin, begin + len(text[begin : found.start()].rstrip()), True)]
        elif _opens(text, found):
            start = min(at + 1, len(text))
            end, at, closed = _end(text, start, found["fence"].strip(), unclosed)
            blocks.append((_LABEL.match(found["mark"])[1].lower(), start, end, closed))  # type: ignore[index]
    return _joined(thought, blocks) or before


def _joined(thought: list[Block], blocks: list[Block]) -> list[Block]:
    if any(label in _ANSWERS for label, *_ in blocks):
        return blocks
    thought += blocks
    return thought


def _opens(text: str, found: re.Match[str]) -> bool:
    mark = found["mark"].strip()
    before = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
    if not before.strip():
        return True
    return found["fence"][0] == "`" and (len(mark.split()) == 1 or (not mark and bool(_LEADS.fullmatch(before))))


def _end(text: str, start: int, fence: str, unclosed: set[str]) -> tuple[int, int, bool]:
    """Where the inside of a block ends, where to read on, and whether a fence closes it.

    `unclosed` are the quotes that nothing closes in the rest of the text.
    """
    at = start
    while found := _INSIDE[fence[0]].search(text, at):
        at = found.end()
        quotes = found["quotes"]
        mark = found["fence"] or found["glued"]
        if quotes and quotes not in unclosed:
            string = _STRINGS[quotes].match(text, at)
            if string is None:
                unclosed.add(quotes)
            elif not any(_FENCES.findall(string[1])[1::2]):  # else the second fence opens a block: a quote is missing
                at = string.end()
        elif found["tag"]:
            return found.start(), found.start(), False
        elif mark and len(mark.strip()) >= len(fence):
            if found["glued"]:
                return found.start(), at, True
            end = max(start, found.start() - 1)
            again = text[at : at + 1].isalnum() or text[at : at + 1] == "{"  # a label: this one was left open
            return end, found.start() if again else at, not again
    return len(text), len(text), False


def without_indentation(code: str) -> str:
    """Code without the indentation of its first line: that of a list around it."""
    first = len(code) - len(code.lstrip())
    margin = first - code.rfind("\n", 0, first) - 1
    return re.sub(rf"^[ \t]{{1,{margin}}}+", "", code, flags=re.M) if margin else code
