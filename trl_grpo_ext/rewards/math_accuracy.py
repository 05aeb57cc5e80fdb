r"""Is the answer in the completion mathematically equal to the reference? math-verify's verdict, which always comes."""

from __future__ import annotations

from ._math.judge import MathReward


class MathAccuracy(MathReward):
    r"""Score 1.0 where the completion's answer equals the reference in the column `solution`, 0.0 where it does not.

    The verdict is math-verify's, with the settings of TRL's `accuracy_reward`: the reference is read by `parse` with
    its defaults; the completion's answer must be LaTeX, in `\boxed{}` or in an environment behind the word "answer".
    But math-verify's timeouts are signals. They work in the main thread alone (TRL turns them off in others), don't
    bound memory, and cannot interrupt one long operation:
    `\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}` stops a training. Where they do
    work, `\boxed{9^{9^{9^9}}}` costs five seconds or more. Here math-verify runs in worker processes, which are killed.
    Pairs of plain numbers, most of a GSM8K training, are decided without any worker, where math-verify's verdict can be
    proved (`trl_grpo_ext.rewards._math.plain_answers`).

    The outcomes and what they become unless `outcomes` says otherwise: `right` 1.0; `wrong`, `no_answer` 0.0;
    `unparseable_reference` None (the reference parses to nothing, is too large, or cannot even be compared with a plain
    number in time); `timeout`, `died` (twice, or out of memory) and `refused` (too large) 0.0; `error` raises.
    When a pair comes to no verdict, the reference is tried alone, once; so neither is blamed for the other.

    Args:
        timeout: Seconds for one completion, parsing and comparing.
        budget: Seconds for 64 completions, and in proportion for larger batches. When they are spent, completions that
            have had a try get `timeout`; each gets at least a first try of a tenth of a second. This counts where many
            are hostile, and a slow but honest answer among them can then have `timeout` as well.
        workers: Number of processes; None is the number of cores, shared with the other ranks of this machine, at
            most 8. They start with the first completion that needs one.
        memory_mb: What a worker may use, in MiB, beside what it starts with; None is no limit.
        max_characters: Longer completions are `refused`, longer references unparseable. So are boxes with more than
            20,000 characters, more than 2000 digits in a row or brackets more than 100 deep.
        outcomes: What outcomes become, by name: a number, None, or "raise".
        cache: Number of verdicts kept over batches; timeouts and deaths are not kept.

    Raises:
        ConfigurationError: A parameter cannot work.

    Departures from TRL's `accuracy_reward`:

    - Of several messages the last assistant message with text counts, not the first message, and completions may also
      be strings.
    - A reference that never comes to an end gives None, not 0.0.
    - Exact fractions that differ are not equal. To math-verify they are where the difference vanishes in floating
      point: `\frac{1}{2004!}` for `\frac{1}{2006!}`, `10^{-31}` for `10^{-30}`.
    - "gold_parsed" and "answer_parsed" are the LaTeX that was read, not sympy's spelling of it.

    Math-Verify's rules for decimals and percent are kept, because other ones would be another reward: numbers are
    rounded to 6 places where one is a decimal (`\boxed{0.0000001}` is right for the reference `0.0`), and a percent
    sign is ignored where both are integers (`\boxed{50\%}` is right for `50`).
    """

    __name__ = "math_accuracy"


math_accuracy = MathAccuracy()
"""`MathAccuracy` with its defaults, for `--reward_funcs` and other places that take a function by its path."""
