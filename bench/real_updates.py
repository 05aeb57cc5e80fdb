"""An update of a real model on its own completions of GSM8K: plain TRL, compact, and shared prompts.

    python -m bench.real_updates --model FOLDER --problems gsm8k/train.jsonl [--limits 160 512] [--docs PAGE]

FOLDER holds SmolLM2-135M-Instruct (`python -m recipes.common.models smollm2 FOLDER`). It answers the first problems of
the file, eight times each at temperature 0.6, and the completions are kept in `--kept`, so that a second run measures
the same ones. Four problems make an update of 32 completions: with the real reward the first two that have right and
wrong answers (fewer, if there are fewer), and the first that have not, so that half of the groups have no signal; with
signal everywhere all even rows are right.

The arms are trainings of all weights in float32, and take turns; few machines hold three of them at once, so each turn
loads the model. Memory is the most that the process held in an update (`VmHWM`), above what it held before the model:
weights, gradients, the optimizer's state, and what the update takes. Beside it stands what doctor expects of plain TRL.
The share of the head is that of the update's matrix products and log-softmax over the vocabulary in the time of all
operators, by torch's profiler.
"""

import argparse
import ctypes
import functools
import gc
import itertools
import json
import math
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from bench.compact_rollouts import Size
from bench.compact_updates import EXACT, PLAIN, SHARED, Match
from bench.tables import machine, show, versions
from bench.turns import Meter
from trl_grpo_ext import load_rewards
from trl_grpo_ext.launch.doctor.command import examine

GROUPS = 4
MEMBERS = 8
ALONE = ("python", "-m", "trl_grpo_ext.launch.doctor.settings_alone")
TEMPERATURE = 0.6  # at 1.0 hardly any of 200 answers of SmolLM2-135M is right
WIDE = 8192
PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_"}
ARMS = (PLAIN, EXACT, SHARED)
REWARDS = ("real", "signal everywhere")
TITLES = (
    *("completions, reward", "update, s: plain TRL", "compact", "shared", "times faster"),
    *("peak memory, GB: plain TRL", "shared", "doctor's estimate"),
)
HEAD = ("head, %: plain TRL", "compact", "shared")


@dataclass(frozen=True)
class Group:
    """A question, its tokens in the chat template, the tokens of its completions, and which of them are right."""

    question: str
    prompt: list[int]
    completions: list[list[int]]
    right: list[float]


def sample(model: Path, problems: Sequence[dict[str, str]], limit: int) -> list[Group]:
    """What the model answers to some problems, all members of a few groups at once."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    (accuracy,) = load_rewards(["gsm8k_accuracy"])
    set_seed(1)
    groups = []
    for first in range(0, len(problems), GROUPS):
        some = problems[first : first + GROUPS]
        asked = [[{"role": "user", "content": row["question"]}] for row in some for _ in range(MEMBERS)]
        given = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        made = policy.generate(**given, do_sample=True, temperature=TEMPERATURE, top_k=0, max_new_tokens=limit)
        completions = [upto_end(ids, tokenizer.eos_token_id) for ids in made[:, given["input_ids"].size(1) :].tolist()]
        texts = [[{"role": "assistant", "content": text}] for text in tokenizer.batch_decode(completions, True)]
        answers = [row["answer"] for row in some for _ in range(MEMBERS)]
        scores = accuracy(prompts=asked, completions=texts, completion_ids=completions, answer=answers)
        for row, problem in zip(range(0, len(asked), MEMBERS), some, strict=True):
            prompt = given["input_ids"][row][given["attention_mask"][row] != 0].tolist()
            members = slice(row, row + MEMBERS)
            right = [float(score or 0.0) for score in scores[members]]
            groups.append(Group(problem["question"], prompt, completions[members], right))
    return groups


def upto_end(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


class Recorded:
    """Rollouts and rewards of recorded groups."""

    def __init__(self, size: Size, groups: Sequence[Group]) -> None:
        self.size = size
        self.groups = groups

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = [group.prompt for group in self.groups for _ in group.completions]
        completion_ids = [ids for group in self.groups for ids in group.completions]
        logprobs = [[-1.0] * len(ids) for ids in completion_ids]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def reward(self, completions: list[Any], **columns: Any) -> list[float]:
        return [score for group in self.groups for score in group.right]


def head_share(match: Match, arm: str) -> float:
    """The part of the operators' time that is spent on the vocabulary."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=cpu, record_shapes=True)
    match.turn(arm, profile)
    head = whole = 0.0
    for event in profile.key_averages(group_by_input_shape=True):
        whole += event.self_cpu_time_total
        # TRL cuts the vocabulary into pieces; nothing else here is as wide. The embedding's gradient is `(V, hidden)`.
        if any(shape and max(shape[-1:] + shape[:1] * (event.key in PRODUCTS)) >= WIDE for shape in event.input_shapes):
            head += event.self_cpu_time_total
    return head / whole


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def held_now() -> int:
    """Resident memory without what malloc keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident("VmRSS")


def expected_memory(options: argparse.Namespace, limit: int, groups: Sequence[Group]) -> int:
    """What doctor expects of plain TRL, in bytes."""
    passes = GROUPS * MEMBERS // options.rows
    settings = f"""use_cpu=true bf16=false gradient_checkpointing=false beta=0.0 num_generations={MEMBERS}
        max_completion_length={limit} per_device_train_batch_size={options.rows} gradient_accumulation_steps={passes}"""
    words = ["--model_name_or_path", str(options.model), *(f"--{setting}" for setting in settings.split())]
    memory = examine([*ALONE, *words], prompt_length=max(len(group.prompt) for group in groups)).memory
    assert memory is not None
    return memory.peak


def measure(
    match: Match, arm: str, cells: dict[str, Sequence[Group]], found: dict[str, Any], held: int, head: bool
) -> None:
    """One update of an arm in each cell, and with `head` another one that finds its share."""
    for name, groups in cells.items():
        match.script.groups = groups
        cell = found[name]
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts from here
        turn = match.turn(arm)
        cell["peak"][arm] = max(cell["peak"].get(arm, 0), resident("VmHWM") - held)
        cell["seconds"].setdefault(arm, []).append(turn.seconds)
        cell["norm"][arm] = turn.logs["grad_norm"]
        assert math.isfinite(turn.logs["grad_norm"]), turn.logs
        assert (turn.logs["grad_norm"] > 0) == any(0 < sum(group.right) < MEMBERS for group in groups), turn.logs
        if arm == PLAIN:
            prompts, completions = zip(*((g.prompt, ids) for g in groups for ids in g.completions), strict=True)
            cell["tokens"][arm] = len(prompts) * (max(map(len, prompts)) + max(map(len, completions)))
        else:
            cell["tokens"][arm] = turn.logs["compact/computed_tokens"]
            cell["distinct"] = turn.logs.get("compact/computed_to_distinct", math.nan)
        print(f"{name}, {arm}: {turn.seconds:.1f} s", flush=True)
    for name, groups in cells.items() if head else ():  # last, for the profiler takes memory of its own
        match.script.groups = groups
        found[name]["head"][arm] = head_share(match, arm)


def cells_of(name: str, found: dict[str, Any]) -> list[str]:
    best = {arm: min(found["seconds"][arm]) for arm in ARMS}
    return [
        name,
        *(f"{best[arm]:.1f}" for arm in ARMS),
        f"{best[PLAIN] / best[SHARED]:.2f}",
        *(f"{found['peak'][arm] / 1e9:.1f}" for arm in (PLAIN, SHARED)),
        f"{found['expected'] / 1e9:.1f}",
        *(f"{100 * share:.0f}" for share in found["head"].values()),
    ]


def kept_groups(options: argparse.Namespace) -> dict[int, list[Group]]:
    """Groups of each limit, sampled where they are not there yet: all problems at the first, then only those chosen."""
    lines = options.problems.read_text(encoding="utf-8").splitlines()[: options.count]
    problems = [json.loads(line) for line in lines]
    kept = {}
    for limit in options.limits:
        file = options.kept / f"completions_{limit}.json"
        if not file.exists():
            options.kept.mkdir(parents=True, exist_ok=True)
            found = [vars(group) for group in sample(options.model, problems, limit)]
            file.write_text(json.dumps(found), encoding="utf-8")
        kept[limit] = [Group(**group) for group in json.loads(file.read_text(encoding="utf-8"))]
        if len(kept) == 1:
            chosen = {group.question for group in half_silent(kept[limit])}
            problems = [row for row in problems if row["question"] in chosen]
    return kept


def half_silent(groups: Sequence[Group]) -> list[Group]:
    """The first groups that have right and wrong answers, and the first that have not."""
    mixed = [group for group in groups if 0 < sum(group.right) < MEMBERS][: GROUPS // 2]
    silent = [group for group in groups if not 0 < sum(group.right) < MEMBERS]
    return [*mixed, *silent[: GROUPS - len(mixed)]]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.real_updates", description=str(__doc__).split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--problems", type=Path, required=True, help="JSON Lines with GSM8K's columns")
    parser.add_argument("--limits", nargs="+", type=int, default=[160, 512], help="most tokens of a completion")
    parser.add_argument("--count", type=int, default=24, help="problems that are answered")
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--updates", type=int, default=2, help="of each arm in each cell, timed")
    parser.add_argument("--no-head", action="store_true", help="leave out the profile, one more update of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kept", type=Path, default=Path("outputs/real_updates"))
    parser.add_argument("--docs", type=Path, help="write the table into this page, too")
    options = parser.parse_args(given)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    rows = []
    gap = 0.0
    answered = []
    for limit, groups in kept_groups(options).items():
        real = half_silent(groups)
        mixed = sum(0 < sum(group.right) < MEMBERS for group in groups)
        chosen = sum(0 < sum(group.right) < MEMBERS for group in real)
        answered.append(f"{mixed} of {len(groups)} groups with up to {limit} tokens ({chosen} of the {len(real)} here)")
        everywhere = [
            Group(g.question, g.prompt, g.completions, [float(row % 2) for row in range(MEMBERS)]) for g in real
        ]
        short = [Group(g.question, g.prompt[:4], [ids[:4] for ids in g.completions], g.right) for g in everywhere]
        size = Size(groups=GROUPS, members=MEMBERS, limit=limit)
        cells = {f"up to {limit}, {name}": chosen for name, chosen in zip(REWARDS, (real, everywhere), strict=True)}
        found = {name: {key: {} for key in ("seconds", "peak", "tokens", "norm", "head")} for name in cells}
        for cell in found.values():
            cell["expected"] = expected_memory(options, limit, real)
        script = functools.partial(Recorded, groups=short)  # the first update makes the optimizer's state
        last = options.updates - 1
        for number, arm in itertools.product(range(options.updates), ARMS):
            held = held_now()
            with tempfile.TemporaryDirectory() as folder:
                match = Match(options.model, Path(folder), size, arms=(arm,), script=script, rows_per_pass=options.rows)
                measure(match, arm, cells, found, held, number == last and not options.no_head)
                match.close()
                del match
        rows += [cells_of(name, cell) for name, cell in found.items()]
        for cell in found.values():
            least = min(cell["norm"].values())
            most = max(cell["norm"].values())
            gap = max(gap, (most - least) / max(most, 1e-9))
    said = (
        f"{GROUPS * MEMBERS} completions in groups of {MEMBERS}, micro-batches of {options.rows}; best of "
        f"{options.updates} updates, {Meter().time_is} time. {options.model.name}, {options.threads} thread(s), "
        f"{machine()}; {versions('torch', 'transformers', 'trl')}. Of what it answered, {' and '.join(answered)} "
        f"have signal. The gradient norms differ by {gap:.0e} at most, relatively."
    )
    titles = TITLES if options.no_head else (*TITLES, *HEAD)
    show("updates of a real model", titles, rows, said, options.docs)


if __name__ == "__main__":
    main()
