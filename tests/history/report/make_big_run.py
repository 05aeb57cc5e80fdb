"""Runs for the page, made through the real recorder."""

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from tests.history.report.trained import write_history
from tests.trained_tokenizers import byte_level
from trl_grpo_ext.credit.alignment import token_offsets
from trl_grpo_ext.records.manifest import FILE, Manifest, PluginRecord
from trl_grpo_ext.records.settings import FILE as SETTINGS
from trl_grpo_ext.records.token_records import TokenRecorder, write_records
from trl_grpo_ext.testing.builders import make_rollout
from trl_grpo_ext.types import Parts, Rollout

NAN = float("nan")

REWARDS = ("right_answer", "think_format", "language")
STAGES = ("trl", "centred", "entropy_shaping")
_TEXT = (
    "the a of to and we so add 12 30 7 then divide by sum is = + * / ( ) answer first second step check again wait "
    "therefore number remains apples cost each total half \n . , 3 18 42 naïve café 你好 👩‍👩‍👧 é \\frac{1}{2} "
)
WORDS = _TEXT.split(" ")


def rollout_of(
    prompts: Sequence[str],
    completions: Sequence[Sequence[int]],
    tokenizer: Any,
    rewards: torch.Tensor,
    names: Sequence[str] = REWARDS,
    limit: int = 500,
) -> Rollout:
    """A generation batch of these tokens, `len(completions) / len(prompts)` for each prompt; rewards are `(B, K)`."""
    size = len(completions) // len(prompts)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
    width = max(map(len, completions))
    return make_rollout(
        [len(ids) for ids in completions],
        rewards=rewards.nansum(1).tolist(),
        groups=[row // size for row in range(len(completions))],
        limit=limit,
        prompts=[prompts[row // size] for row in range(len(completions))],
        completions=texts,
        texts=texts,
        completion_ids_B_T=torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in completions]),
        truncated_B=torch.tensor([len(ids) == limit for ids in completions]),
        rewards_B_K=rewards,
        reward_names=tuple(names),
        reward_weights_K=torch.ones(len(names)),
        tokenizer=tokenizer,
        offsets=lambda row: token_offsets(tokenizer, completions[row], texts[row]),
        parts={names[0]: [Parts({"half": (0.5, (0, len(text) // 2)), "tone": 1.0}, 0.5) for text in texts]},
    )


def write_step(
    folder: Path, step: int, rollout: Rollout, *, right: Sequence[str] | None = None, trained: bool = True
) -> Path:
    """One file of token records of all rows of a generation batch, with made-up numbers for the forward."""
    torch.manual_seed(step)
    mask_B_T = rollout.mask_B_T.clone()
    mask_B_T[:, 3] = 0.0  # as if a tool had written it
    shape = mask_B_T.shape
    advantages_B = torch.nan_to_num(rollout.rewards_B - rollout.group_baselines_B)
    whole_B_T = advantages_B[:, None] * mask_B_T
    shaped_B_T = whole_B_T * (1 + 0.4 * torch.rand(shape)) + 0.02 * torch.randn(shape) * mask_B_T
    recorder = TokenRecorder(len(mask_B_T), seed=0)
    places_B = torch.arange(len(mask_B_T))
    stages = [(STAGES[0], whole_B_T), (STAGES[1], 0.9 * whole_B_T)]
    recorder.start(dataclasses.replace(rollout, mask_B_T=mask_B_T), places_B, stages, right and {REWARDS[0]: right})
    if trained:
        weights_B_T = mask_B_T / mask_B_T.sum()
        used = {"advantage": shaped_B_T, "weight": weights_B_T}
        used |= {"logp": -torch.empty(shape).exponential_(1.3), "entropy": 3 * torch.rand(shape)}
        recorder.add_trained(places_B, [(STAGES[2], shaped_B_T)], used)
    written = write_records(recorder.records(), str(folder), step)
    assert written is not None
    return written


def write_table(folder: Path, step: int, rollout: Rollout, **columns: Sequence[Any]) -> Path:
    """TRL's table of a generation batch."""
    path = folder / "completions" / f"completions_{step:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    rewards = {name: rollout.rewards_B_K[:, place].tolist() for place, name in enumerate(rollout.reward_names)}
    advantages = (rollout.rewards_B - rollout.group_baselines_B).tolist()
    texts = {"prompt": rollout.prompts, "completion": rollout.completions}
    pd.DataFrame({"step": step, **texts, **rewards, **columns, "advantage": advantages}).to_parquet(path)
    return path


def write_around(
    folder: Path, steps: int, names: Sequence[str] = REWARDS, seed: int = 0, settings: dict[str, Any] | None = None
) -> None:
    """The log, the settings and the manifest of a run."""
    history: list[dict[str, Any]] = [{"step": steps, "eval_reward": 0.8}]
    for step in range(1, steps + 1):
        means = {f"rewards/{name}/mean": 0.2 + 0.6 * step / steps for name in names}
        stds = {f"rewards/{name}/std": 0.3 for name in names}
        others = {"completions/mean_length": 400.0 + step, "loss": 0.02 * (-1) ** step, "entropy": 1.5}
        history.append({"step": step, "reward": step / steps, **means, **stds, **others})
    write_history(folder, history)
    chosen = {"learning_rate": 1e-5, "num_generations": 10, "max_completion_length": 500, "beta": 0.01 * seed}
    (folder / SETTINGS).write_text(json.dumps({"format": 1, "settings": {**chosen, **(settings or {})}}))
    ours = ("trl-grpo-ext", "0.1.0")
    rewards = [
        PluginRecord("reward", name, *ours, f"rewards:{name}", {"tolerance": seed}, weight=1.0) for name in names
    ]
    hook = PluginRecord("advantage_hook", STAGES[2], *ours, "advantages:EntropyShaping", {"alpha": 0.4})
    Manifest((*rewards, hook), {"trl": "1.16.0", "torch": "2.13.0"}).write(folder / FILE)


def write_big_run(
    folder: Path, *, steps: int = 5, groups: int = 10, size: int = 10, tokens: int = 500, seed: int = 0
) -> Path:
    """A run with `steps * groups * size` completions of up to `tokens` tokens; the second step was not trained on."""
    generator = random.Random(seed)
    tokenizer = byte_level()
    torch.manual_seed(seed)
    write_around(folder, 20 * steps, seed=seed)
    rows = groups * size
    for number in range(1, steps + 1):
        step = 20 * number
        prompts = [f"Problem {step}/{group}: " + " ".join(generator.choices(WORDS, k=12)) for group in range(groups)]
        # Most run into the limit, so the page is as large as it gets; some end by themselves.
        lengths = [tokens if generator.random() < 0.8 else tokens - 1 - generator.randrange(9) for _ in range(rows)]
        words = [" " + " ".join(generator.choices(WORDS, k=length)) for length in lengths]
        # Characters of several bytes are cut over tokens at times.
        completions = [ids[:length] for ids, length in zip(tokenizer(words)["input_ids"], lengths, strict=True)]
        rewards = torch.stack([torch.randint(0, 2, (rows,)), torch.rand(rows), torch.rand(rows) - 0.5], dim=1).double()
        rewards[generator.sample(range(rows), 3), 0] = NAN
        rollout = rollout_of(prompts, completions, tokenizer, rewards, limit=tokens)
        words = {0.0: ("wrong", "wrong", "wrong", "no_answer"), 1.0: ("right",)}
        right = [generator.choice(words.get(value, ("unparseable_reference",))) for value in rewards[:, 0].tolist()]
        write_step(folder, step, rollout, right=right, trained=number != 2)
        write_table(folder, step, rollout, right_answer_outcome=right, note=["logged by the reward"] * rows)
    return folder


HOSTILE = (
    "<script>window.pwned = 'script'</script>",
    '<img src=x onerror="window.pwned=1"><svg onload=window.pwned=2><iframe src="javascript:window.parent.pwned=3">',
    "</script><script>window.pwned=4</script><!--<script>]]> \u2028 \u2029 {{ 7 * 7 }} {% raw %} ${window.pwned=5}",
    '" autofocus onfocus="window.pwned=6" x="\' onmouseover=\'window.pwned=7',
    "null \x00 bell \x07 escape \x1b[31mred\x1b[0m return \r\n delete \x7f c1 \x85 \x9b tab\there",
    "left \u202e desrever \u202c \u2066isolated\u2069 \u200f \ufeff zero\u200bwidth \u00ad soft \U000e0041\U000e0042",
    "שלום עולם 123 مرحبا بالعالم (قوس) English שוב",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 e\u0301 ﷽ Z\u0335\u0321\u0322\u0327\u0328\u031b\u0353\u0354\u0355 𝔘𝔫𝔦 \U0001f9d1\u200d\U0001f680",
    "a" * 3000 + " " + "W" * 3000 + "\u200d" * 300 + "https://" + "x/" * 500,
    "Z" + "\u0300\u0316\u0489" * 200 + " after many marks",
    "long " * 20_000,
    "",
)
"""What a model may write to harm who reads it. One has 100,000 characters."""

HOSTILE_NAMES = (
    "right_answer",
    "<img src=x onerror=window.pwned=8>",
    "__proto__",
    "constructor",
    "$\\frac{$ \u202e \x00",
)


def write_hostile_run(folder: Path) -> Path:
    """Two steps of hostile completions with hostile prompts, names, settings and plugins."""
    tokenizer = byte_level()
    names = HOSTILE_NAMES
    write_around(folder, 20, names=names, settings={HOSTILE[0]: HOSTILE[1], "run_name": HOSTILE[2]})
    half = tokenizer.encode("👩", add_special_tokens=False)[:-1]  # bytes that make no character
    completions = [
        [*tokenizer.encode(text, add_special_tokens=False), *half, tokenizer.eos_token_id] for text in HOSTILE
    ]
    torch.manual_seed(0)
    for step in (10, 20):
        rewards = torch.rand(len(HOSTILE), len(names)).double()
        prompt = HOSTILE[3] + HOSTILE[5] + HOSTILE[0]
        rollout = rollout_of([prompt], completions, tokenizer, rewards, names, limit=10**6)
        write_step(folder, step, rollout, right=HOSTILE)
        write_table(folder, step, rollout, **{HOSTILE[1]: list(HOSTILE), "right_answer_outcome": list(HOSTILE)})
    return folder
