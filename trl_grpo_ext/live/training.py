"""The part of the trainer that can be watched: the log file, the summary, and bars for slow rewards.

| TRL calls | we add |
| --- | --- |
| `__init__` | the callbacks |
| `_calculate_rewards` | bars, in a terminal |

None of it changes a number.
"""

from __future__ import annotations

from typing import Any

from .log_file import LiveLog
from .reward_bars import bars_wanted, with_bar
from .summary import use_console_summary


class CanBeWatched:
    """What `GRPOExtMixin` does to be watched."""

    args: Any
    accelerator: Any

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        trl: Any = self
        trl.add_callback(LiveLog())
        if every := getattr(self.args, "summary_steps", 0):
            use_console_summary(trl, every)

    def _calculate_rewards(self, inputs: Any, prompts: Any, *arguments: Any) -> Any:
        calculate = super()._calculate_rewards  # type: ignore[misc]
        if not bars_wanted(self.args, self.accelerator.is_main_process):
            return calculate(inputs, prompts, *arguments)
        trl: Any = self
        functions, names = trl.reward_funcs, trl.reward_func_names
        trl.reward_funcs = [with_bar(*pair, len(prompts)) for pair in zip(functions, names, strict=True)]
        try:
            return calculate(inputs, prompts, *arguments)
        finally:
            trl.reward_funcs = functions
