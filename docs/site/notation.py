"""Formulas as docstrings write them, `A_i = r_i - mean_{j≠i} r_j`, in the LaTeX that sets them.

A docstring is read in terminals and editors, so its formulas are plain text. Nothing here knows what they mean:
subscripts, powers, roots, fractions and names of several letters are recognised by how they are written. What is not
recognised stays as it is.
"""

import re
import textwrap

# fmt: off
_SYMBOLS = {
    "·": r" \cdot ", "≤": r" \le ", "≥": r" \ge ", "≠": r" \ne ", "←": r" \leftarrow ", "≈": r" \approx ",
    "Σ": r"\sum ", "∑": r"\sum ", "√": r"\sqrt ", "∝": r" \propto ", "∞": r"\infty ", "×": r" \times ",
    "⌊": r"\lfloor ", "⌋": r" \rfloor ", "*": r" \cdot ", "<": r" \lt ", ">": r" \gt ", "%": r"\% ",
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\varepsilon ", "κ": r"\kappa ",
    "λ": r"\lambda ", "μ": r"\mu ", "π": r"\pi ", "ρ": r"\rho ", "σ": r"\sigma ", "ℓ": r"\ell ",
}
# fmt: on
_FUNCTIONS = frozenset({"log", "exp", "min", "max", "cos"})
_TOKEN = re.compile(
    r"(?P<size>\|[^|]+\|)|(?P<bar>[A-Za-z]̄)|(?P<word>[A-Za-z][A-Za-z]+(?:'s|(?:[_-][A-Za-z][A-Za-z-]+)*))|(?P<letter>[^\W\d_])|(?P<number>\d+(?:\.\d+)?)"
    r'|(?P<quoted>"[^"]*")|(?P<raised>[⁺⁻])|(?P<power>\^)|(?P<below>_)|(?P<space>\s+)|(?P<sign>.)',
    re.DOTALL,
)
_SPACED = frozenset("=+-·/≤≥≠←≈<>*\x02")
_ENDS_A_FRACTION = (" = ", " + ", " - ", " · ", ", ", " := ", " ← ", " ≈ ")

_PAIRS = {"(": ")", "{": "}", "[": "]"}


def formulas(description: str) -> list[str]:
    """The formulas of a docstring: code and indented lines that contain a sum, or a relation between spaces."""
    found = []
    for paragraph in description.split("\n\n"):
        if all(line.startswith("    ") for line in paragraph.split("\n")):
            found.append(textwrap.dedent(paragraph))
        else:
            found += [" ".join(code.split()) for code in re.findall(r"`+([^`]+)`", paragraph)]
    return [text for text in dict.fromkeys(found) if _reads_as_formula(text)]


def _reads_as_formula(text: str) -> bool:
    related = any(f" {relation} " in text for relation in ("=", "←", "∝", ":=", "≈", "\\sum"))
    return related or any(sign in text for sign in "Σ∑·")


def latex(formula: str) -> str:
    """The LaTeX of one formula; of several lines, one below the other."""
    lines = [line for line in formula.split("\n") if line.strip()]
    if len(lines) > 1:
        rows = (" & ".join(_line(part) for part in re.split(r"\s{3,}", line.strip())) for line in lines)
        return r"\begin{array}{lll}" + r" \\ ".join(rows) + r"\end{array}"
    return _line(formula.strip())


def _line(text: str) -> str:
    return re.sub(r" {2,}", " ", _tokens(_fractions(text) if _in_pairs(text) else text)).strip()


def _in_pairs(text: str) -> bool:
    """Whether every bracket closes the one of its kind; a fraction's parts are found by them."""
    opened: list[str] = []
    for letter in text:
        if letter in _PAIRS:
            opened.append(_PAIRS[letter])
        elif letter in _PAIRS.values() and (not opened or opened.pop() != letter):
            return False
    return not opened


def _closing(text: str, start: int) -> int:
    """Where the bracket at `start` ends; the end of the text where it does not."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == _PAIRS[text[start]]) * -1 + (text[place] == text[start])
        if depth == 0:
            return place
    return len(text)


def _fractions(text: str) -> str:
    """Set `a / b`, with spaces around the stroke, as \x02{a}{b}; the last one first, so that others stay inside."""
    place = _stroke(text)
    if place < 0:
        return text
    before, after = text[:place], text[place + 3 :]
    start = max((_last(before, end) for end in _ENDS_A_FRACTION), default=0)
    end = min((_first(after, mark) for mark in _ENDS_A_FRACTION), default=len(after))
    above, below = (_bare(part) for part in (before[start:], after[:end]))
    return f"{_fractions(before[:start])}\x02{{{_fractions(above)}}}{{{_fractions(below)}}}{_fractions(after[end:])}"


def _outside(text: str) -> list[int]:
    """The places that no bracket of this text encloses."""
    depth, places = 0, []
    for place, letter in enumerate(text):
        depth -= letter in ")}]"
        if depth <= 0:
            places.append(place)
        depth += letter in "({["
    return places


def _stroke(text: str) -> int:
    return next((place for place in _outside(text) if text.startswith(" / ", place)), -1)


def _last(text: str, mark: str) -> int:
    found = [place + len(mark) for place in _outside(text) if text.startswith(mark, place)]
    return found[-1] if found else 0


def _first(text: str, mark: str) -> int:
    return next((place for place in _outside(text) if text.startswith(mark, place)), len(text))


def _bare(part: str) -> str:
    part = part.strip()
    return part[1:-1] if part.startswith("(") and _closing(part, 0) == len(part) - 1 else part


def _tokens(text: str) -> str:
    out, place = [], 0
    while place < len(text):
        if text[place] == "\x02":
            above_end = _closing(text, place + 1)
            below_end = _closing(text, above_end + 1)
            out.append(
                rf"\frac{{{_tokens(text[place + 2 : above_end])}}}{{{_tokens(text[above_end + 2 : below_end])}}}"
            )
            place = below_end + 1
            continue
        match = _TOKEN.match(text, place)
        assert match is not None  # the last alternative takes any character
        kind, token, place = match.lastgroup, match[0], match.end()
        if kind in ("power", "below") or token == "√":
            inside, place = _argument(text, place, wide=kind != "below")
            out.append({"power": "^", "below": "_"}.get(str(kind), r"\sqrt") + f"{{{inside}}}")
        elif kind == "space":
            out.append(_space(text[: match.start()].rstrip()[-1:], text[place : place + 1]))
        elif token == "*" and text[place : place + 1] == "_":
            out.append("^{*}")  # a star on a letter, not a product
        else:
            out.append(_plain(str(kind), token))
    return "".join(out)


def _space(before: str, after: str) -> str:
    """None around signs, which MathML spaces by itself."""
    if before == ",":
        return r"\, "
    return "" if set(before + after) & _SPACED else r"\; "


def _argument(text: str, place: int, wide: bool) -> tuple[str, int]:
    """What follows `^`, `_` or `√`: a bracket, or as much as belongs together."""
    if text.startswith(("{", "(") if wide else "{", place):
        end = _closing(text, place)
        return _tokens(text[place + 1 : end]), end + 1
    match = re.compile(r"[-≤<≥>]?(?:[A-Za-z]{2,}|[^\W\d_]|\d+)").match(text, place)
    return (_tokens(match[0]), match.end()) if match else ("", place)


def _plain(kind: str, token: str) -> str:
    if kind == "bar":
        return rf"\bar{{{token[0]}}}"
    if kind == "word":
        if token in _FUNCTIONS:
            return rf"\{token} "
        return rf"\text{{{token}}}"
    if kind == "quoted":
        return rf"\text{{“{token[1:-1]}”}}"
    if kind == "size":
        return rf"{{\lvert {_tokens(token[1:-1])} \rvert}}"
    if kind == "raised":
        return "^{+}" if token == "⁺" else "^{-}"
    return _SYMBOLS.get(token, token)
