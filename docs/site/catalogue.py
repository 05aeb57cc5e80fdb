"""The catalogue: a page for every built-in plugin, from its docstring and its worked example."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

import trl_grpo_ext
from trl_grpo_ext import available
from trl_grpo_ext.plugins.description import PluginDocs, describe
from trl_grpo_ext.plugins.kinds import FACTS, PLURALS
from trl_grpo_ext.plugins.loading import Kind, PluginInfo

from .notation import formulas, latex
from .staging import DOCS
from .worked import WITHOUT, Worked, all_worked, shown

PACKAGE = Path(trl_grpo_ext.__file__).parent
FOLDERS: dict[Kind, str] = {
    kind: f"{facts.word}{PLURALS[kind].removeprefix(facts.label)}" for kind, facts in FACTS.items()
}
TITLES: dict[Kind, str] = {kind: plural.capitalize() for kind, plural in PLURALS.items()}
_INTRODUCTIONS: dict[Kind, str] = {
    "reward": "How good is this completion? A number for each of the `B` completions, or None.",
    "advantage_hook": "Which tokens deserve the credit? Advantages `(B, T)` in, advantages `(B, T)` out.",
    "loss_aggregation": "How much does each token's loss count? Weights `(B, T)`, or a reduction to one number.",
    "group_filter": "Which groups are worth training on? Keep or not, and why not, for each group (`resample`).",
    "prompt_sampler": "Which prompts next? Row numbers for each round of sampling, by what came of others or not.",
    "token_loss": "What else does each token pay? Losses `(B, T)`, added to TRL's policy loss or in its place.",
}
_STAGES = {
    "on_rollout": "once per generation batch (`on_rollout`)",
    "on_forward": "at every forward pass of the loss (`on_forward`)",
    "weights": "weights, once per generation batch (`weights`)",
    "reduce": "a reduction of each micro-batch (`reduce`)",
    "keep": "in each round of `resample` (`keep`)",
    "draw": "before each round of sampling (`draw`)",
    "loss": "at every forward pass of the loss (`loss`)",
}
_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)


def built_in() -> list[PluginInfo]:
    """All built-in plugins, in the order of their kinds and names."""
    return sorted(
        (info for info in available() if info.builtin), key=lambda info: (list(FOLDERS).index(info.kind), info.name)
    )


def write(folder: Path) -> list[Path]:
    """Write the pages into `folder/catalogue`; the source files that they link to are returned."""
    installed = available()
    worked = all_worked()
    top = folder / "catalogue"
    described = [describe(info, installed) for info in built_in()]
    sources = []
    for docs in described:
        page = top / FOLDERS[docs.info.kind] / f"{docs.info.name}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        example = worked.get((docs.info.kind, docs.info.name))
        page.write_text(plugin_page(docs, example), encoding="utf-8")
        if docs.file is not None:
            sources.append(docs.file)
    for kind, name in FOLDERS.items():
        of_kind = [docs for docs in described if docs.info.kind == kind]
        (top / name / "index.md").write_text(_kind_page(kind, of_kind), encoding="utf-8")
    (top / "index.md").write_text(_index_page(described), encoding="utf-8")
    return sorted(set(sources))


def source_page(file: Path) -> str:
    """Where the site has a source file."""
    return "source/" + file.resolve().relative_to(PACKAGE.parent).with_suffix("").as_posix()


def _index_page(described: Sequence[PluginDocs]) -> str:
    counts = Counter(docs.info.kind for docs in described)
    lines = [
        "# The catalogue",
        "",
        f"All {len(described)} built-in plugins, made from what the installed package says of itself: the docstrings, "
        "the parameters, and worked examples that the plugins themselves computed when these pages were built. "
        "`trl-grpo-ext show NAME` prints the same of any installed plugin, whoever wrote it.",
        "",
    ]
    lines += [
        f"- [{TITLES[kind]}]({name}/index.md) ({counts[kind]}). {_INTRODUCTIONS[kind]}"
        for kind, name in FOLDERS.items()
    ]
    listed = "\n".join(f"{name}/index" for name in FOLDERS.values())
    return "\n".join([*lines, "", f"```{{toctree}}\n:hidden:\n\n{listed}\n```", ""])


def _kind_page(kind: Kind, described: Sequence[PluginDocs]) -> str:
    rows = [
        [
            f"[`{docs.info.name}`]({docs.info.name}.md)",
            ", ".join(f"`{a}`" for a in docs.info.aliases),
            prose(docs, docs.doc.summary),
        ]
        for docs in described
    ]
    listed = "\n".join(docs.info.name for docs in described)
    return "\n".join(
        [
            f"# {TITLES[kind]}",
            "",
            _INTRODUCTIONS[kind],
            "",
            table(["plugin", "also called", "what it does"], rows),
            "",
            f"```{{toctree}}\n:hidden:\n\n{listed}\n```",
            "",
        ]
    )


def plugin_page(docs: PluginDocs, worked: Worked | None) -> str:
    """The page of one plugin, in Markdown."""
    info = docs.info
    parts = [f"# `{info.name}`", _facts(docs), prose(docs, docs.doc.description)]
    parts += ["## Select it", f"```yaml\n{documented_yaml(info)}```"]
    if docs.parameters:
        rows = [
            [
                f"`{one.name}`",
                f"`{one.type}`" if one.type else "",
                "required" if one.required else f"`{one.default}`",
                prose(docs, docs.doc.parameters.get(one.name, "")),
            ]
            for one in docs.parameters
        ]
        parts += ["## Parameters", table(["name", "type", "default", "meaning"], rows)]
    parts += ["## Worked example", _worked(info, worked)]
    for title in ("Returns", "Raises", "Source", "Departures"):
        if text := docs.doc.sections.get(title):
            parts += [f"## {title}", _listed(docs, text) if title == "Raises" else prose(docs, text)]
    if docs.doc.papers:
        links = [f"- [arXiv:{number}](https://arxiv.org/abs/{number})" for number in docs.doc.papers]
        parts += ["## Papers", "\n".join(links)]
    return "\n\n".join(parts) + "\n"


def _facts(docs: PluginDocs) -> str:
    info = docs.info
    module, _, attribute = info.target.partition(":")
    facts = [
        ("kind", f"[{TITLES[info.kind].lower()}](index.md)"),
        ("also called", ", ".join(f"`{alias}`" for alias in info.aliases)),
        ("acts", "; ".join(_STAGES[name] for name in docs.methods if name in _STAGES)),
        ("needs", _needs(docs.declares.get("needs"))),
        ("columns", ", ".join(f"`{column}`" for column in docs.columns)),
        ("dotted path", f"`{module}:{attribute}`"),
    ]
    if docs.file is not None:
        at = f"{source_page(docs.file)}.html#L-{docs.line}"
        facts.append(("source", f'<a href="../../{at}">{Path(docs.file).name}, line {docs.line}</a>'))
    facts.append(("more", f"[its entry in the built-in plugins](../../plugins.md#{info.name})"))
    return table(["", ""], [[label, value] for label, value in facts if value])


def _needs(declared: Any) -> str:
    """The names as code; what is no list of names as it is."""
    return ", ".join(f"`{need}`" for need in declared) if isinstance(declared, list | tuple) else declared or ""


def documented_yaml(info: PluginInfo) -> str:
    """A plugin's selection: the YAML of its entry in `docs/plugins.md`, or, where that has none, its bare name."""
    page = (DOCS / "plugins.md").read_text(encoding="utf-8")
    section = re.search(rf"^### `{info.name}`\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    if not section:
        raise LookupError(f"docs/plugins.md has no entry '### `{info.name}`'.")
    block = re.search(r"```yaml\n(.*?)```", section[1], re.DOTALL)
    return block[1] if block else _yaml(info.kind, info.name)


def _yaml(kind: Kind, selection: Any) -> str:
    """A selection as the setting of a run."""
    facts = FACTS[kind]
    selected = [selection] if facts.several else selection
    for key in reversed(facts.setting):
        selected = {key: selected}
    return yaml.safe_dump(selected, default_flow_style=None, sort_keys=False, width=1_000)


def _worked(info: PluginInfo, worked: Worked | None) -> str:
    if worked is None:
        return WITHOUT[(info.kind, info.name)]
    result = worked.result()
    columns = {**worked.given, **{head: values for head, values in result.items() if head != "total"}}
    rows = [[label, *(shown(values[row]) for values in columns.values())] for row, label in enumerate(worked.rows)]
    parts = [f"```yaml\n{_yaml(info.kind, worked.selection)}```", worked.note, table(["", *columns], rows)]
    if "total" in result:
        parts.append(f"Together, `Σ w·l` is **{shown(result['total'])}**.")
    return "\n\n".join(filter(None, parts))


# ------------------------------------------------------------------------------------------------------ text


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def prose(docs: PluginDocs, text: str) -> str:
    """A docstring's text in Markdown, its formulas set."""
    known_ones = set(formulas(docs.doc.description))
    out = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.split("\n")
        if all(line.startswith("    ") for line in lines):
            plain = "\n".join(line[4:] for line in lines)
            known = next((one for one in known_ones if one.split() == plain.split()), None)
            out.append(f"```math\n{latex(known)}\n```" if known else f"```text\n{plain}\n```")
        else:
            out.append(_CODE.sub(lambda code: _set(code[0], known_ones), _escaped(paragraph)))
    return "\n\n".join(out)


def _set(code: str, known_ones: set[str]) -> str:
    inside = " ".join(code.strip("`").split())
    return f"{{math}}`{latex(inside)}`" if inside in known_ones else f"`{inside}`" if code.startswith("``") else code


def _escaped(text: str) -> str:
    """Text outside of code cannot begin HTML or emphasis."""
    parts = _CODE.split(text)
    return "".join(
        part if place % 2 else part.replace("<", "&lt;").replace("*", r"\*") for place, part in enumerate(parts)
    )


def _listed(docs: PluginDocs, text: str) -> str:
    """`Error: when.`, one below the other."""
    items: list[str] = []
    for line in text.split("\n"):
        if re.match(r"\w+: ", line):
            name, _, what = line.partition(": ")
            items.append(f"`{name}`: {what}")
        elif items:
            items[-1] += f" {line.strip()}"
        else:
            items.append(line)
    return "\n".join(f"- {prose(docs, item)}" for item in items)
