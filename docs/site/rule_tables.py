"""The tables of the kit's rules in `docs/writing_plugins.md`, made from what the rules say of themselves."""

from trl_grpo_ext.plugins.kinds import FACTS
from trl_grpo_ext.testing.rules import rules_of

MARKER = "<!-- the rules, by docs/site/rule_tables.py -->"


def with_rules(text: str) -> str:
    """A page's text with the tables in the place of the marker."""
    return text.replace(MARKER, tables()) if MARKER in text else text


def tables() -> str:
    """A table of each kind's rules, in the order in which they are checked."""
    parts = []
    for kind, facts in FACTS.items():
        rows = [f"| `{rule.name}` | {rule.summary} | {rule.why} |" for rule in rules_of(kind)]
        heading = f"### {facts.label.capitalize()}s"
        parts.append("\n".join([heading, "", "| rule | it asks | what for |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts)
