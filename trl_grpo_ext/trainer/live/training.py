"""The part of the trainer that can be watched: the log file, the summary, and bars for slow rewards.

| TRL calls | we add |
| --- | --- |
| `__init__` | the callbacks |
| `_generate_single_turn` | a bar, in a terminal |
| `_calculate_rewards` | bars, in a terminal |

None of it changes a number.
"""

from __future__ import annotations

from typing import Any

from ...records.log import LiveLog
from .bars import bars_wanted, generation_bar, with_bar
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

    def _generate_single_turn(self, prompt_ids: Any, *arguments: Any, **keywords: Any) -> Any:
        generate = super()._generate_single_turn  # type: ignore[misc]
        if not bars_wanted(self.args, self.accelerator.is_main_process):
            return generate(prompt_ids, *arguments, **keywords)
        trl: Any = self
        elsewhere = trl.use_vllm or trl.use_transformers_continuous_batching
        layer = None if elsewhere else self.accelerator.unwrap_model(trl.model).get_output_embeddings()
        with generation_bar(len(prompt_ids), trl.max_completion_length, self._reward_before("reward"), layer):
            return generate(prompt_ids, *arguments, **keywords)

    def _reward_before(self, name: str) -> float | None:
        """The newest value of a metric in training."""
        trl: Any = self
        if kept := trl._metrics["train"].get(name):
            return float(kept[-1])
        return next((log[name] for log in reversed(trl.state.log_history) if name in log), None)

    def _calculate_rewards(self, inputs: Any, prompts: Any, *arguments: Any) -> Any:
        calculate = super()._calculate_rewards  # type: ignore[misc]
        if not bars_wanted(self.args, self.accelerator.is_main_process):
            return calculate(inputs, prompts, *arguments)
        trl: Any = self
        functions, names = trl.reward_funcs, trl.reward_func_names
        trl.reward_funcs = [
            with_bar(function, name, len(prompts), self._reward_before(f"rewards/{name}/mean"))
            for function, name in zip(functions, names, strict=True)
        ]
        try:
            return calculate(inputs, prompts, *arguments)
        finally:
            trl.reward_funcs = functions
