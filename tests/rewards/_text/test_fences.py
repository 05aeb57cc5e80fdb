"""Fences as models write them, by hand; and hostile ones, in linear time."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.rewards._text.fences import fences
from trl_grpo_ext.rewards._text.json_text import find_json
from trl_grpo_ext.rewards.python_tests import fenced_code

ADD = "def add(a, b):\n    return a + b"
DOCUMENTED = 'def add(a, b):\n    """Add.\n\n    ```\n    add(1, 2)\n    ```\n    """\n    return a + b'
EXAMPLE = "n = 1\n\n'''\nExample:\n```python\n5 -> 6\n```\n'''"
PROMPT = 'prompt = """Answer in ```json\n{}\n``` format"""'
COMMENTED = "# ```\n# add(1, 2)\n# ```\nx = '```'.join('</think>')"
LISTED = "\n".join(f"   {line}" for line in ADD.split("\n"))
OBJECT = '{"answer": "``` </answer>"}'
CODE: list[tuple[str, str]] = [
    ("```python\nx = 1\n```\n```python\nx = 2\n```", "x = 2"),
    ("```py\nx = 1\n```\n```bash\nls\n```", "x = 1"),
    ("```Python title=a.py\nx = 1", "x = 1"),
    (f"```{{python}}\n{ADD}\n```\n```\n3\n```", ADD),
    ("````python\n```\nx\n```\n````", "```\nx\n```"),
    ("  ~~~python\nx = 1\n  ~~~", "x = 1"),
    ("```python\n```", ""),
    ("```python print(1)```", "print(1)"),
    # Tags, special tokens and prose around the fences.
    (f"<answer>```python\n{ADD}\n``` </answer>", ADD),
    (f"<answer>\n```python\n{ADD}\n</answer>", f"{ADD}\n"),
    (f"```python\n{ADD}\n```<|im_end|>", ADD),
    (f"Here is the code: ```\n{ADD}\n```. Done.", ADD),
    (f"```python\n{ADD}```\nDone.", ADD),
    (f"```\n{ADD}\n```\nThe call ```add(1, 2)``` is 3.\n```\n", ADD),
    (f"{ADD}\n```", ADD),  # the prompt ends with the opening fence
    (f"<think>x</think>{ADD}\n```<|im_end|>", ADD),
    (f"I use ```python in the answer.\nAnd a ```<tag>.\n```python\n{ADD}\n```", ADD),
    ("```\n```", ""),
    # Lists.
    (f"1. The function:\n\n   ```python\n{LISTED}\n   ```\n", ADD),
    (f"1. ```python\n{LISTED}\n   ```\n", ADD),
    ('```python\nx = """a\n   \nb"""\n```', 'x = """a\n   \nb"""'),
    # Fences in strings and comments.
    (f"```python\n{DOCUMENTED}\n```", DOCUMENTED),
    (f"```python\n{EXAMPLE}\n```\nDone.", EXAMPLE),
    (f"```python\n{PROMPT}\n```", PROMPT),
    (f"```python\n{COMMENTED}\n```", COMMENTED),
    (f"```text\nit's '''odd\n```\n```python\n{DOCUMENTED}\n```", DOCUMENTED),
    (f'```python\ndef f():\n    """Draft\n```\nBetter:\n```python\n{DOCUMENTED}\n```', DOCUMENTED),
    # Blocks that are left open, and thinking.
    (f"maybe\n```python\ndef add(a,\nno wait\n\n```python\n{ADD}\n```", ADD),
    (f"```markdown\n# Adding\n```python\n{ADD}\n```\n```", ADD),
    (f"<think>\n```python\ndef add(a,\nthat's wrong</think>\nHere:\n```\n{ADD}\n```", ADD),
    (f"<think>\n```python\nx = 1\n```\n</think>\n```\n{ADD}\n```", ADD),
    (f"<think>\n```python\n{ADD}\n```\n</think>\nRun it:\n```bash\npython a.py\n```", ADD),
    # No fence.
    (ADD, ADD),
    (f"<think>\nx\n</think>\n\n{ADD}", f"\n\n{ADD}"),
    (f"<think>x</think>\n<answer>\n{ADD}\n</answer>", f"\n{ADD}\n"),
    ("def last(t):\n    return t.split('</think>')[1]", "def last(t):\n    return t.split('</think>')[1]"),
]
JSON: list[tuple[str, str | None]] = [
    (f"<answer>```json\n{OBJECT}\n```</a>", OBJECT),
    (f"```json\n1\n```\n```JSON\n{OBJECT}\n```\n```\n2\n```", OBJECT),  # a marked fence goes before
    ("```json\n1\n``` x\n```\n```json\n2", "1"),  # the last one is not closed
    *(("```\n1\n```\n```python\n2\n```", "1"), ("```python\n1\n```", None)),
    (f"The answer is ```json {OBJECT.replace('``` ', '')}```", OBJECT.replace("``` ", "")),
    (f"- x\n  ```json\n  {OBJECT}\n  ```", OBJECT),
    (f"<think>\n```json\n1\n```\n</think>\n```\n{OBJECT}\n```", OBJECT),
    (f"```json\n{OBJECT}", None),
]


@pytest.mark.parametrize(("text", "code"), CODE)
def test_fenced_code(text: str, code: str) -> None:
    assert fenced_code(text) == code
    assert fenced_code(text.replace("\n", "\r\n")).replace("\r", "").rstrip("\n") == code.rstrip("\n")


@pytest.mark.parametrize(("text", "inside"), JSON)
def test_fenced_json(text: str, inside: str | None) -> None:
    where = find_json(text, "fence")
    assert (where and text[slice(*where)]) == inside


PIECES = ("`", "```", "```\n", "```python\n", "~~~\n", "'''", '"""', "'", '"', "\\", "#", "<", ">", ":", "x", " ", "\n")
PIECES += ("</think>", "</answer>", "<answer>", "1. ", "   ", "```x```")


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_fences_stand_in_order(text: str) -> None:
    blocks = fences(text)
    edges = [edge for _, start, end, _ in blocks for edge in (start, end)]
    assert edges == sorted(edges)
    assert edges[-1:] <= [len(text)]
    fenced_code(text)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "```\n", "```\n'''"])
def test_fences_are_found_in_linear_time(first: str) -> None:
    mixed = ("'\\", "'\"\\'", "''' \\'''", "#'''\n", "'''\n```\n```x\n", "'''```x\n\"\"\"", "a```", "```<")
    for piece in PIECES + mixed:
        text = first + piece * 20_000
        before = time.process_time()
        fenced_code(text)
        assert time.process_time() - before < 1.0, (first, piece)
