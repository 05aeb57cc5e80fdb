"""Worked examples of the advantage hooks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trl_grpo_ext import load_advantage_hooks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.testing.builders import make_forward, make_rollout, mask_of, turns_between
from trl_grpo_ext.types import Part, Parts, Place

from .worked import Worked, completions, tokens


def _rows(ragged: Sequence[Sequence[float]]) -> torch.Tensor:
    width = max(len(row) for row in ragged)
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in ragged], dtype=torch.float64)


def _after_rollout(
    selection: Any, lengths: Sequence[int], incoming: Sequence[float], *args: Any, **overrides: Any
) -> list[list[float]]:
    rollout = make_rollout(lengths, *args, **overrides)
    hooks = load_advantage_hooks([selection])
    given = torch.tensor(incoming, dtype=torch.float64)
    advantages = flow.apply_hooks(given, hooks, rollout)
    return [advantages[row, :length].tolist() for row, length in enumerate(lengths)]


# ------------------------------------------------------------------------------- one number for each completion


def _estimator(
    selection: Any, rewards: Sequence[float], lengths: Sequence[int] | None = None, note: str = ""
) -> Worked:
    """A hook that gives all tokens of a completion the same."""
    long = list(lengths or [1] * len(rewards))

    def run(chosen: Any) -> Mapping[str, Any]:
        rows = _after_rollout(chosen, long, [9.0] * len(rewards), rewards, num_generations=len(rewards))
        assert all(len(set(row)) == 1 for row in rows)
        return {"advantage": [row[0] for row in rows]}

    given: dict[str, Any] = {"reward": list(rewards)}
    if lengths:
        given["tokens"] = long
    return Worked(selection, completions(len(rewards)), given, run, f"One group. {note}".strip())


def _transform(incoming: Sequence[float], **overrides: Any) -> Any:
    """What a transform makes of one advantage for each completion, of one token."""

    def run(selection: Any) -> Mapping[str, Any]:
        rows = _after_rollout(selection, [1] * len(incoming), incoming, **overrides)
        return {"advantage after": [row[0] for row in rows]}

    return run


def _scheduled(selection: Any) -> Mapping[str, Any]:
    """The rewards of two completions after 75 steps."""
    (hook,) = load_advantage_hooks([selection])
    columns = {
        "rewards_B_K": torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64),
        "reward_names": ("right", "form"),
        "reward_weights_K": torch.tensor([1.0, 0.5], dtype=torch.float64),
    }
    rollout = make_rollout([1, 1], (1.5, 0.5), (0, 0), step=75, **columns)
    return {"reward after": flow.shape_rewards(hook, rollout, "shaped").rewards_B.tolist()}


# ------------------------------------------------------------------------------------------------- token by token

LOGPS, REFERENCE = (-1.0, -0.5, -2.0), (-1.5, -0.4, -1.0)
_POLICIES = {"log π_old": LOGPS, "log π of the reference": REFERENCE}
_THREE = ["token 1", "token 2", "token 3"]


def _with_reference(incoming: float) -> Any:
    def run(selection: Any) -> Mapping[str, Any]:
        hinted = {"policy given teacher_prompt": _rows([REFERENCE])}
        policies = {"old_logps_B_T": _rows([LOGPS]), "ref_logps_B_T": _rows([REFERENCE]), "teacher_logps_B_T": hinted}
        return {"advantage after": _after_rollout(selection, [3], [incoming], **policies)[0]}

    return run


def _rejection(selection: Any) -> Mapping[str, Any]:
    sampler = torch.tensor([[-1.05], [-0.5], [-1.8]], dtype=torch.float64)
    old = torch.tensor(LOGPS, dtype=torch.float64).unsqueeze(1)
    rows = _after_rollout(selection, [1, 1, 1], [1.0, 1.0, 1.0], old_logps_B_T=old, sampling_logps_B_T=sampler)
    return {"advantage after": [row[0] for row in rows]}


def _gae(selection: Any) -> Mapping[str, Any]:
    return {"advantages": _after_rollout(selection, [3, 2], [9.0, 9.0], [1.0, 0.0])}


CONVERSATION = [[1.0, 0.0, 1.0]]  # a turn, what the tool answers, a turn; one token each
ANSWERED_BY = (7, 7, 8)


def _turns(rows: int, **overrides: Any) -> Any:
    """What a hook makes of completions of two turns; what the tool wrote is left out."""

    def run(selection: Any) -> Mapping[str, Any]:
        masks = {name: torch.tensor(CONVERSATION * rows, dtype=torch.float64) for name in ("mask_B_T", "tool_mask_B_T")}
        given = {**masks, "completion_mask_B_T": torch.ones(rows, 3, dtype=torch.float64), **overrides}
        after = _after_rollout(selection, [3] * rows, [1.0] * rows, **given)
        return {"advantages of turns 1 and 2": [[first, second] for first, _, second in after]}

    return run


_TURN_REWARDS = {
    "rewards_B_K": torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64),
    "rewards_B": torch.tensor([2.0, 0.0], dtype=torch.float64),
    "reward_names": ("calls", "right"),
    "reward_weights_K": torch.ones(2, dtype=torch.float64),
    "parts": {"calls": [Parts({"turn 0": (1.0, Place(turn=0))}), Parts({"turn 0": (0.0, Place(turn=0))})]},
}


STEPS = (0.8, -0.4, 0.6)


def _process(selection: Any) -> Mapping[str, Any]:
    steps = {f"step {place}": (value, (place, place + 1)) for place, value in enumerate(STEPS)}
    return {"advantage": _after_rollout(selection, [3], [9.0], [sum(STEPS)], parts={"r": [Parts(steps)]})[0]}


TREE, TREE_REWARDS = ("ABC", "ABD", "AEF"), (1.0, 0.0, 0.0)


def _ids(words: Sequence[str]) -> torch.Tensor:
    width = max(map(len, words))
    return torch.tensor([[ord(letter) for letter in word.ljust(width)] for word in words])


def _tree(selection: Any) -> Mapping[str, Any]:
    rows = _after_rollout(selection, [3, 3, 3], [9.0] * 3, TREE_REWARDS, completion_ids_B_T=_ids(TREE))
    return {"advantages": rows}


def _repetition(selection: Any) -> Mapping[str, Any]:
    return {"advantage after": _after_rollout(selection, [8], [1.0], completion_ids_B_T=_ids(["abcxabcy"]))[0]}


def _truncation(selection: Any) -> Mapping[str, Any]:
    truncated = torch.tensor([True, True, False])
    rows = _after_rollout(selection, [1, 1, 1], [1.0, -1.0, 1.0], truncated_B=truncated)
    return {"advantage after": [row[0] for row in rows]}


def _parts(selection: Any) -> Mapping[str, Any]:
    returned = [
        Parts([Part("name", 1.0, places=(0, 1)), Part("age", 0.0, 2.0, (1, 2))]),
        Parts([Part("name", 0.0, places=(0, 2)), Part("age", 1.0, 2.0, (2, 3))]),
    ]
    values = [float(score) for score in returned]
    return {"advantages": _after_rollout(selection, [3, 3], [9.0, 9.0], values, parts={"r": returned})}


# ---------------------------------------------------------------------------------- at the loss forward, per token


def _after_forward(selection: Any, incoming: Sequence[float], logps: Any, entropies: Any, **more: Any) -> Any:
    forward = make_forward(logps, entropies, **more)
    given = torch.tensor(incoming, dtype=torch.float64)
    return flow.apply_hooks(given, load_advantage_hooks([selection]), forward).tolist()


ENTROPIES = (0.1, 1.0, 2.0, 0.5)


def _entropy(selection: Any) -> Mapping[str, Any]:
    entropies = _rows([ENTROPIES] * 2)
    up, down = _after_forward(selection, [1.0, -0.5], -entropies, entropies)
    return {"after, from 1": up, "after, from −0.5": down}


PROBABILITIES = (0.9, 0.5, 0.1)


def _low_probability(selection: Any) -> Mapping[str, Any]:
    logps = _rows([PROBABILITIES]).log()
    return {"advantage after": _after_forward(selection, [1.0], logps, torch.zeros(1, 3))[0]}


def _zero_variance(selection: Any) -> Mapping[str, Any]:
    entropies = _rows([(1.0, 3.0, 2.0)] * 2)
    right, wrong = _after_forward(
        selection,
        [0.0, 0.0],
        -entropies,
        entropies,
        mask=mask_of([3, 3]),
        rewards_B=torch.tensor([1.0, 0.0], dtype=torch.float64),
        zero_variance_B=torch.tensor([True, True]),
    )
    return {"after, all right": right, "after, all wrong": wrong}


MOVED = (0.1, 0.0, 0.1)


def _future(selection: Any) -> Mapping[str, Any]:
    moved = _rows([MOVED])
    zeros = torch.zeros_like(moved)
    return {"advantage after": _after_forward(selection, [1.0], moved, zeros, old_logps_B_T=zeros)[0]}


GENERATED, NOW = (0.6, 0.45, 0.01, 0.7), (0.9, 0.5, 0.05, 0.3)


def _divergence(selection: Any) -> Mapping[str, Any]:
    logps, old = (_rows([probabilities] * 2).log() for probabilities in (NOW, GENERATED))
    up, down = _after_forward(selection, [1.0, -1.0], logps, -logps, old_logps_B_T=old)
    return {"after, from 1": up, "after, from −1": down}


_FOUR = (1.0, 0.0, 0.0, 3.0)


def _running(selection: Any) -> Mapping[str, Any]:
    (hook,) = load_advantage_hooks([selection])
    given, ones = torch.zeros(4, dtype=torch.float64), [1] * 4
    batches = ([1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0])
    first, second = (flow.apply_hooks(given, [hook], make_rollout(ones, rewards)) for rewards in batches)
    return {"advantage at first": first[:, 0].tolist(), "then": second[:, 0].tolist()}


_EIGHT = (1.0, 1.0, *[0.0] * 6)

_TWO_REWARDS = ((1.0, 0.0, 1.0, 1.0), (0.0, 2.0, 1.0, 3.0))


def _decoupled(selection: Any) -> Mapping[str, Any]:
    rewards_B_K = torch.tensor(_TWO_REWARDS, dtype=torch.float64).T
    weights_K = torch.tensor([1.0, 0.5], dtype=torch.float64)
    both = {"rewards_B_K": rewards_B_K, "reward_names": ("first", "second"), "reward_weights_K": weights_K}
    rewards = (rewards_B_K @ weights_K).tolist()
    rows = _after_rollout(selection, [1] * 4, [9.0] * 4, rewards, [0, 0, 1, 1], num_generations=2, **both)
    return {"advantage": [row[0] for row in rows]}


EXAMPLES: dict[str, Worked] = {
    "raw_reward": _estimator("raw_reward", _FOUR),
    "centred": _estimator("centred", _FOUR),
    "normalised": _estimator(
        {"name": "normalised", "epsilon": 1e-9},
        _FOUR,
        note="σ is √2: the squares sum to 6, over three degrees of freedom.",
    ),
    "max_only": _estimator("max_only", _FOUR),
    "leave_one_out": _estimator("leave_one_out", _FOUR),
    "batch_whitening": _estimator("batch_whitening", _FOUR, note="It is all of the batch."),
    "decoupled_normalisation": Worked(
        {"name": "decoupled_normalisation", "epsilon": 1e-9},
        completions(4),
        {"first reward": _TWO_REWARDS[0], "second reward": _TWO_REWARDS[1], "group": (1, 1, 2, 2)},
        _decoupled,
        "The second reward has weight 0.5. Of two completions, one is 1/√2 above and one below; the sums are ±0.5/√2, "
        "and their standard deviation is √(1/6).",
    ),
    "running_baseline": Worked(
        {"name": "running_baseline", "decay": 0.5},
        completions(4),
        {"reward in the first batch": (1.0, 0.0, 1.0, 0.0), "in the second": (1.0, 0.0, 1.0, 1.0)},
        _running,
        "The baseline is 0, then (1 - 0.5⁴)·0.5.",
    ),
    "optimal_baseline": _estimator("optimal_baseline", (1.0, 0.0), (2, 6), note="The baseline is 2/8."),
    "mean_relative": _estimator("mean_relative", _EIGHT, note="Two successes of eight."),
    "pass_at_k": _estimator({"name": "pass_at_k", "k": 4}, _EIGHT, note="Two successes of eight."),
    "sign_scaling": Worked(
        {"name": "sign_scaling", "positive": 0.1, "negative": 1.0},
        completions(3),
        {"advantage before": (2.0, 0.0, -1.0)},
        _transform([2.0, 0.0, -1.0]),
    ),
    "whiten": Worked(
        "whiten", completions(4), {"advantage before": _FOUR}, _transform(_FOUR), "The mean is 1, σ is √2."
    ),
    "clip_advantages": Worked(
        {"name": "clip_advantages", "low": -2.0, "high": 1.5},
        completions(4),
        {"advantage before": (-3.0, -1.0, 0.0, 2.0)},
        _transform((-3.0, -1.0, 0.0, 2.0)),
    ),
    "outcome_filter": Worked(
        {"name": "outcome_filter", "keep": "mixed_groups"},
        completions(4),
        {"prompt": (1, 1, 2, 2), "reward": (1.0, 0.0, 1.0, 1.0), "advantage before": (1.0, -1.0, 1.0, 1.0)},
        _transform((1.0, -1.0, 1.0, 1.0), rewards=(1.0, 0.0, 1.0, 1.0), groups=(0, 0, 1, 1)),
    ),
    "kl_in_reward": Worked(
        {"name": "kl_in_reward", "coefficient": 0.1, "gamma": 1.0, "estimator": "k1"},
        _THREE,
        {**_POLICIES, "advantage before": (1.0,) * 3},
        _with_reference(1.0),
        "k1 is 0.5, −0.1 and −1; each token pays for itself and what follows.",
    ),
    "reward_schedule": Worked(
        {"name": "reward_schedule", "weights": {"form": [[0, 1.0], [100, 0.0]]}},
        completions(2),
        {"`right`": (1.0, 0.0), "`form`": (1.0, 1.0), "reward before": (1.5, 0.5)},
        _scheduled,
        "The run's weights are 1 and 0.5. After 75 steps `form` counts 0.25.",
    ),
    "teacher_log_ratio": Worked(
        {"name": "teacher_log_ratio", "teacher": "reference", "coefficient": 1.0},
        _THREE,
        {**_POLICIES, "advantage before": (9.0,) * 3},
        _with_reference(9.0),
        "What comes in is replaced.",
    ),
    "self_distilled": Worked(
        {"name": "self_distilled", "strength": 0.5, "clip": 0.2},
        _THREE,
        {"log π_old": LOGPS, "log π_old after the teacher's prompt": REFERENCE, "advantage before": (1.0,) * 3},
        _with_reference(1.0),
        "The teacher's log-ratios are −0.5, 0.1 and 1; their exponentials are clipped to 0.8, 1.105 and 1.2.",
    ),
    "group_mean_gae": Worked(
        {"name": "group_mean_gae", "gamma": 1.0, "gae_lambda": 0.5},
        completions(2),
        {"reward": (1.0, 0.0), "tokens": (3, 2)},
        _gae,
        "The group's mean is 0.5, and each token further from the end gets half as much.",
    ),
    "process_rewards": Worked(
        {"name": "process_rewards", "form": "min", "temperature": 1.0, "baseline": "none"},
        ["step 1", "step 2", "step 3"],
        {"reward of the step": STEPS},
        _process,
        "softmax(−r/T) weights the rewards to 0.14436, −0.23965 and 0.13225; each step gets its own and what follows.",
    ),
    "prefix_tree": Worked(
        "prefix_tree",
        completions(3),
        {"tokens": TREE, "reward": TREE_REWARDS},
        _tree,
        "The group's mean is 1/3, that of the two beginning with `AB` is 1/2.",
    ),
    "turn_rewards": Worked(
        {"name": "turn_rewards", "form": "returns", "normalise": False},
        completions(2),
        {"`calls`, by turn": ((1.0, 0.0), (0.0, 0.0)), "`right`": (1.0, 0.0)},
        _turns(2, **_TURN_REWARDS),
        "What turn 1 and all after it earned is 2 and 0, of turn 2 it is 1 and 0; each is held against its mean.",
    ),
    "gigpo": Worked(
        {"name": "gigpo", "gamma": 0.5, "step_weight": 1.0},
        completions(3),
        {"reward": (1.0, 0.0, 0.0), "what the tool answered": ANSWERED_BY},
        _turns(3, rewards=(1.0, 0.0, 0.0), completion_ids_B_T=torch.tensor([[1, answer, 1] for answer in ANSWERED_BY])),
        "The completions have 2/3, −1/3 and −1/3. All first turns begin alike, with 0.5, 0 and 0 to come; so do the "
        "second turns of the first two, with 1 and 0; the third is alone.",
    ),
    "tool_errors": Worked(
        {"name": "tool_errors", "penalty": 0.25},
        completions(1),
        {"advantage before": (1.0,)},
        _turns(1, turns=lambda row: turns_between((1, 0, 1), "caa", failed=[0])),
        "The first turn is a call that raised, the second answers.",
    ),
    "masked_turns": Worked(
        {"name": "masked_turns", "pick": "calls"},
        completions(1),
        {"advantage before": (1.0,)},
        _turns(1, turns=lambda row: turns_between((1, 0, 1), "caa")),
        "The first turn is a call, the second answers.",
    ),
    "repetition_penalty": Worked(
        {"name": "repetition_penalty", "ngram": 3, "penalty": 0.25},
        tokens("abcxabcy"),
        {"advantage before": (1.0,) * 8},
        _repetition,
    ),
    "truncation_masking": Worked(
        {"name": "truncation_masking", "keep": "negative"},
        completions(3),
        {"cut off": (True, True, False), "advantage before": (1.0, -1.0, 1.0)},
        _truncation,
    ),
    "part_credit": Worked(
        "part_credit",
        completions(2),
        {
            "`name`": (1.0, 0.0),
            "its tokens": ["1", "1 and 2"],
            "`age`, weight 2": (0.0, 1.0),
            "tokens of `age`": ["2", "3"],
        },
        _parts,
        "Three tokens each. Centred, `name` pays ±0.5 and `age` ∓0.5, twice; the last token of the first completion is "
        "in no part.",
    ),
    "entropy_shaping": Worked(
        {"name": "entropy_shaping", "alpha": 0.4, "kappa": 2.0},
        [f"token {place}" for place in range(1, 5)],
        {"entropy": ENTROPIES},
        _entropy,
    ),
    "low_probability": Worked(
        {"name": "low_probability", "alpha": 0.3},
        _THREE,
        {"probability": PROBABILITIES, "advantage before": (1.0,) * 3},
        _low_probability,
    ),
    "zero_variance_credit": Worked(
        {"name": "zero_variance_credit", "alpha": 0.1},
        _THREE,
        {"entropy": (1.0, 3.0, 2.0)},
        _zero_variance,
        "Of a group whose completions all got 1, and of one whose completions all got 0.",
    ),
    "future_kl": Worked(
        {"name": "future_kl", "half_life": 1.0, "epsilon_low": 0.0, "epsilon_high": 0.5},
        _THREE,
        {"log π − log π_old": MOVED, "advantage before": (1.0,) * 3},
        _future,
        "A half-life of one token: F is 0.125, 0.05 and 0.1.",
    ),
    "sequence_rejection": Worked(
        {"name": "sequence_rejection", "low": 0.9, "high": 1.1},
        completions(3),
        {"log π_old": LOGPS, "log π of the sampler": (-1.05, -0.5, -1.8)},
        _rejection,
        "Of completions of one token, whose ratios are 1.05, 1 and 0.82.",
    ),
    "divergence_mask": Worked(
        {"name": "divergence_mask", "low": 0.2, "high": 0.2},
        ["token 1", "token 2", "token 3", "token 4"],
        {"μ": GENERATED, "π": NOW},
        _divergence,
        "The third is five times as likely as before, which a ratio clip would drop, and has moved by 0.04.",
    ),
    "ratio_bounds": Worked(
        {"name": "ratio_bounds", "high": 2.0},
        ["token 1", "token 2", "token 3", "token 4"],
        {"μ": GENERATED, "π": NOW},
        _divergence,
        "The third is five times as likely as before, and weighs as if it were twice.",
    ),
}
