"""A small worked example of every built-in plugin: what goes in by hand, and what the plugin itself makes of it.

The examples are computed when the site is built, so that a page cannot say what the code does not do; the tests hold
them against values that were worked out by hand.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Column = Sequence[Any]


@dataclass(frozen=True)
class Worked:
    """One example.

    Attributes:
        selection: What selects the plugin, as in YAML.
        rows: What each row of the table is: a completion, a token.
        given: By heading, one value per row.
        run: From the selection to what comes out: by heading, one value per row. What is one value of all rows stands
            under the heading `total` and is a number.
        note: What else has to be known to follow it.
    """

    selection: Any
    rows: Sequence[str]
    given: Mapping[str, Column]
    run: Callable[[Any], Mapping[str, Any]]
    note: str = ""

    def result(self) -> Mapping[str, Any]:
        """Run the plugin."""
        return self.run(self.selection)


def completions(count: int) -> list[str]:
    """Labels of rows."""
    return [f"completion {number}" for number in range(1, count + 1)]


def tokens(words: Sequence[str]) -> list[str]:
    """Labels of rows."""
    return [f"token {number}, `{word}`" for number, word in enumerate(words, 1)]


def shown(value: Any) -> str:
    """A value in a table: numbers with five digits after the point and none that say nothing."""
    if isinstance(value, str):
        return f"`{value}`" if value else "(empty)"
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, list | tuple):
        return ", ".join(shown(one) for one in value)
    text = f"{float(value):.5f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text.replace("-", "−")


def all_worked() -> dict[tuple[str, str], Worked]:
    """By kind and name, the examples."""
    from . import (
        worked_aggregations,
        worked_filters,
        worked_hooks,
        worked_rewards,
        worked_samplers,
        worked_token_losses,
    )

    return {
        **{("reward", name): example for name, example in worked_rewards.EXAMPLES.items()},
        **{("advantage_hook", name): example for name, example in worked_hooks.EXAMPLES.items()},
        **{("loss_aggregation", name): example for name, example in worked_aggregations.EXAMPLES.items()},
        **{("group_filter", name): example for name, example in worked_filters.EXAMPLES.items()},
        **{("prompt_sampler", name): example for name, example in worked_samplers.EXAMPLES.items()},
        **{("token_loss", name): example for name, example in worked_token_losses.EXAMPLES.items()},
    }


WITHOUT: dict[tuple[str, str], str] = {
    ("reward", "classifier"): (
        "It scores with a model of yours, and a model is nothing that the build of a page could bring along. Its tests "
        "run a tiny one, and the recipe `detox_grpo.py` trains with one."
    ),
    ("reward", "reasoning_gym"): "Its examples are the tasks of a package, which the build of a page does not install.",
    ("reward", "environment_steps"): "It scores what an environment paid, and a page has none.",
    ("reward", "judge"): "It asks a server, and the build of a page has none. Its tests run one on this machine.",
}
"""By kind and name, why a plugin has no example."""
