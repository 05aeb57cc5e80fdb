"""What only a GPU can show: an update against TRL's, a step with generation, memory of QLoRA with 7B.

    make gpu                          # the tests marked gpu, and then all of this: about eight minutes
    python -m bench.gpu --only memory # one of the three again
    python -m bench.gpu --tiny --device cpu --page copy_of_evidence.md

Each run is a process of its own, so that its peaks are its own and its crash ends nothing else. Nothing is downloaded:
models have the shapes of Qwen2.5 and random weights. Trainings go through the recipe's own flow, from the parsed
settings to the trainer; left out are its evaluations and what it saves. The tables go into docs/evidence.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOTrainer

from bench.compact_rollouts import PROFILES, Cell, Script, Size
from bench.tables import markdown, versions, write_block
from tests.support import save_tiny_model
from trl_grpo_ext import GRPOExtTrainer, load_rewards
from trl_grpo_ext.launch.checkpoints import SafeCheckpoints
from trl_grpo_ext.launch.doctor.command import examine

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
PAGE = ROOT / "docs" / "evidence.md"
GB = 1e9

PLAIN = "plain TRL"
OURS = "ours"
DIFFER = "lengths differ, 40 % without signal"
EQUAL = "lengths equal, all with signal"
SMALL = "qwen2.5_0.5b.yaml"
LARGE = "qwen2.5_7b_qlora_24gb.yaml"
ESTIMATES = ("doctor's estimate, GB", "estimate / measured")
PEAKS = ("allocated, GB", "reserved, GB")


@dataclass(frozen=True)
class Section:
    """A table of the page."""

    columns: tuple[str, ...]
    runs: Mapping[str, tuple[str, ...]]  # the rows of each process, by the arm that it measures
    seconds: float  # that a process may take


SECTIONS = {
    "update": Section(
        ("update, s", *PEAKS, *ESTIMATES), {arm: (f"{arm}, {DIFFER}", f"{arm}, {EQUAL}") for arm in (PLAIN, OURS)}, 180
    ),
    "generation": Section(
        ("step, s", "generation, s", "update, s", "tokens/s", *PEAKS), {arm: (arm,) for arm in (PLAIN, OURS)}, 200
    ),
    "memory": Section(("seconds", *PEAKS, *ESTIMATES), {OURS: ("load", "generation", "update")}, 500),
}

SHAPES = {  # width, width inside, layers, heads, heads for keys and values, tokens, whether the head is the embedding
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "tiny": (64, 128, 2, 4, 2, 128, True),
}


def save_model(folder: Path, shape: str, device: str) -> Path:
    """Random weights of a shape in bfloat16, and the tests' tokenizer."""
    save_tiny_model(folder)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes: dict[str, Any] = dict(zip((*names, "vocab_size", "tie_word_embeddings"), SHAPES[shape], strict=True))
    torch.manual_seed(0)
    with torch.device(device):
        config = Qwen2Config(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=1)
        Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()
    return folder


@dataclass
class Job:
    """One process: its sizes, its stage, and its figures so far."""

    folder: Path
    device: str
    tiny: bool
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    stage: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    peaks: dict[str, tuple[int, int]] = field(default_factory=dict)
    tokens: int = 0
    longest_prompt: int = 0
    script: Script | None = None
    after_stage: Callable[[str], None] = lambda stage: None
    after_step: Callable[[int], None] = lambda step: None
    since: float = 0.0

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def say(self, row: str, figures: Mapping[str, Any]) -> None:
        """Report figures of a row at once."""
        self.rows.setdefault(row, {}).update(figures)
        where = torch.cuda.get_device_name() if self.cuda else f"{platform.machine()} CPU"
        answer = json.dumps({"rows": self.rows, "device": where})
        (self.folder / "answer.json").write_text(answer, encoding="utf-8")

    def turn_to(self, stage: str | None) -> None:
        """End a stage, with its seconds and peaks; the device has done its work before the clock is read."""
        if self.cuda:
            torch.cuda.synchronize()
        ended = self.stage
        now = time.perf_counter()
        if ended is not None:
            self.seconds[ended] = self.seconds.get(ended, 0.0) + now - self.since
            if self.cuda:
                allocated, reserved = self.peaks.get(ended, (0, 0))
                allocated = max(allocated, torch.cuda.max_memory_allocated())
                self.peaks[ended] = (allocated, max(reserved, torch.cuda.max_memory_reserved()))
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.stage = stage
        self.since = time.perf_counter()
        if ended is not None:
            self.after_stage(ended)

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        outer = self.stage
        self.turn_to(stage)
        try:
            yield
        finally:
            self.turn_to(outer)

    def memory(self, *stages: str) -> dict[str, float | None]:
        """Peaks over some stages, as columns of a table; None without a GPU."""
        if not self.cuda:
            return dict.fromkeys(PEAKS)
        allocated, reserved = (max(self.peaks[stage][place] for stage in stages) for place in (0, 1))
        return {"allocated, GB": allocated / GB, "reserved, GB": reserved / GB}


JOB = Job(Path(), "cpu", tiny=True)
"""The one of this process, which rewards and trainers of the recipe see."""


class Steps(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        JOB.turn_to("update")

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        JOB.turn_to(None)
        JOB.steps.append(JOB.seconds)
        JOB.seconds = {}
        JOB.after_step(len(JOB.steps))


class Timed:
    """Around a whole trainer, so that whatever it adds anywhere is in the figures."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        rollout = None if JOB.script is None else JOB.script.rollout
        with JOB.during("load"):
            super().__init__(*arguments, rollout_func=rollout, **keywords)  # type: ignore[call-arg]
        self.add_callback(Steps())  # type: ignore[attr-defined]

    def _generate(self, prompts: Any) -> Any:
        with JOB.during("generation"):
            generated = super()._generate(prompts)  # type: ignore[misc]
        JOB.longest_prompt = max(JOB.longest_prompt, *map(len, generated[0]))
        JOB.tokens = sum(map(len, generated[1]))
        return generated

    def evaluate(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
        return {}

    def save_model(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def save_state(self) -> None:
        pass


class TimedOurs(Timed, SafeCheckpoints, GRPOExtTrainer):
    """The recipe's trainer."""


class TimedPlain(Timed, SafeCheckpoints, GRPOTrainer):
    """TRL's, with the rewards that the recipe's settings name and nothing else of them."""

    def __init__(self, *arguments: Any, args: Any, **keywords: Any) -> None:
        rewards = load_rewards(args.rewards)
        args.reward_weights = list(rewards.weights)
        args.rewards = None
        args.compact_updates = "off"
        args.share_prompts = False
        super().__init__(*arguments, reward_funcs=list(rewards), args=args, **keywords)


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """What the script says; without one half of every group is right."""
    return [float(row % 2) for row in range(len(completions))] if JOB.script is None else JOB.script.reward(completions)


def recipe_words(config: str, shape: str, more: Mapping[str, Any]) -> list[str]:
    """The command line of gsm8k_grpo.py for a run file."""
    words: dict[str, Any] = {
        "config": RECIPES / "configs" / config,
        "model_name_or_path": save_model(JOB.folder / "model", "tiny" if JOB.tiny else shape, JOB.device),
        "output_dir": JOB.folder / "out",
        "train_problems": 64,
        "eval_problems": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "rewards": "bench.gpu:reward",
        "embedded": False,
    }
    if JOB.tiny:
        words |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
        words |= {"max_completion_length": 8, "per_device_eval_batch_size": 4}
    if not JOB.cuda:
        words |= {"use_cpu": True, "bf16": False}
    return [word for name, value in {**words, **more}.items() for word in (f"--{name}", str(value))]


def run_recipe(words: Sequence[str], arm: str) -> None:
    """What gsm8k_grpo.py does with this command line, on its embedded problems and with a trainer that is watched."""
    sys.path[:0] = [str(RECIPES)]
    from common.flow import train_and_report
    from common.problems import as_dataset, embedded_problems
    from common.settings import asked_for, check_setup, measure

    import gsm8k_grpo as recipe

    sys.argv = ["gsm8k_grpo.py", *words]
    own, args, model_args = recipe.parse()
    asked = asked_for(model_args, own.engine, own.processes)
    check_setup(args, model_args, PartialState(), asked)
    measure(args, recipe.ACCURACY)
    train_and_report(
        args,
        model_args,
        asked,
        embedded_problems(own.train_problems, own.eval_problems, args.seed),
        what="problems",
        dataset=lambda problems: as_dataset(problems, None),
        curve=lambda folder, *_: folder,
        trainer_class=TimedOurs if arm == OURS else TimedPlain,  # type: ignore[arg-type]
        table=lambda metrics: {},
    )


def estimate(words: Sequence[str], stage: str, reserved: float | None) -> dict[str, float | None]:
    """What the doctor expects of `load`, `generation` or `update`, beside what was measured."""
    launcher = ("accelerate", "launch", "--config_file", str(RECIPES / "accelerate" / "one_process.yaml"))
    examined = examine([*launcher, str(RECIPES / "gsm8k_grpo.py"), *words], prompt_length=JOB.longest_prompt)
    assert examined.memory is not None, "the doctor knows no sizes"
    expected = float(examined.memory.device_bytes[stage]) / GB  # type: ignore[index]
    if reserved is None:  # a CPU has no peaks
        return {ESTIMATES[0]: expected, ESTIMATES[1]: None}
    unused, whole = torch.cuda.mem_get_info()
    beside_torch = (whole - unused - torch.cuda.memory_reserved()) / GB
    return {ESTIMATES[0]: expected, ESTIMATES[1]: expected / (reserved + beside_torch)}


def update(arm: str) -> None:
    """Updates of the shipped file for 0.5B on scripted rollouts of two profiles; the first of each is not counted."""
    rows = SECTIONS["update"].runs[arm]
    cells = (Cell(PROFILES[2], 40), Cell(PROFILES[0], 0))
    each, size = (2, Size(2, 4, 16)) if JOB.tiny else (4, Size(16, 8, 512))
    script = JOB.script = Script(size)
    script.cell = cells[0]
    more = {"max_steps": 2 * each, "max_completion_length": size.limit}
    words = recipe_words(SMALL, "0.5B", more)

    def after_step(step: int) -> None:
        if step % each == 0:
            best = min(sum(taken.values()) - taken.get("generation", 0.0) for taken in JOB.steps[-each + 1 :])
            JOB.say(rows[step // each - 1], {"update, s": best, **JOB.memory("update")})
            JOB.peaks.clear()
            script.cell = cells[1]

    JOB.after_step = after_step
    run_recipe(words, arm)
    for row in rows:
        JOB.say(row, estimate(words, "update", JOB.rows[row]["reserved, GB"]))


def generation(arm: str) -> None:
    """Two steps of the shipped file for 0.5B, and what the second took."""
    run_recipe(recipe_words(SMALL, "0.5B", {"max_steps": 2}), arm)
    taken = JOB.steps[1]
    whole = sum(taken.values())
    figures = {"step, s": whole, "generation, s": taken["generation"], "update, s": taken["update"]}
    JOB.say(arm, {**figures, "tokens/s": JOB.tokens / whole, **JOB.memory("generation", "update")})


def memory(arm: str) -> None:
    """Load, one generation and two updates of 7B; each stage's seconds and peaks, and what the doctor expected."""
    if JOB.cuda:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 24 * 2**30 / whole))

    def after_stage(stage: str) -> None:
        if stage == "update" or stage not in JOB.rows:
            JOB.say(stage, {"seconds": JOB.seconds[stage], **JOB.memory(stage)})

    JOB.after_stage = after_stage
    words = recipe_words(LARGE, "7B", {"max_steps": 2, "num_iterations": 2, "max_grad_norm": 1.0})
    run_recipe(words, arm)
    for stage in SECTIONS["memory"].runs[arm]:
        JOB.say(stage, estimate(words, stage, JOB.rows[stage]["reserved, GB"]))


# ---------------------------------------------------------------------------------------------------------- the page


def measure_run(name: str, arm: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run, in a process: its rows, where it ran, and how it failed if it did."""
    answer = folder / "answer.json"
    log = folder / "log.txt"
    failed = None
    answer.write_text('{"rows": {}, "device": "unknown device"}', encoding="utf-8")
    words = [sys.executable, "-m", "bench.gpu", "--only", name, "--arm", arm, "--folder", str(folder)]
    words += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    # TRL spreads a model over all GPUs that one process sees.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if options.device == "cuda" else ""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": first}
    limit = SECTIONS[name].seconds
    with log.open("wb") as file:
        try:
            subprocess.run(words, cwd=ROOT, env=environment, stdout=file, stderr=file, check=True, timeout=limit)
        except subprocess.TimeoutExpired:
            failed = f"it took longer than {limit:.0f} s"
        except subprocess.CalledProcessError:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
            failed = " ".join(lines[-1].split()).replace("|", "/")[:300]
    return {**json.loads(answer.read_text(encoding="utf-8")), "failed": failed}


def block(name: str, runs: Mapping[str, Mapping[str, Any]]) -> str:
    """A section's table and where it was measured, of its runs by arm."""
    columns = SECTIONS[name].columns
    lines = []
    for arm, run in runs.items():
        for row in SECTIONS[name].runs[arm]:
            lines.append([row, *(shown(run["rows"].get(row, {}).get(column, "not measured")) for column in columns)])
        if run["failed"]:
            lines[-1][-1] = f"failed: {run['failed']}"
    devices = ", ".join(sorted({run["device"] for run in runs.values()}))
    packages = versions("torch", "transformers", "trl", "accelerate", "peft", "bitsandbytes")
    return f"{markdown(['', *columns], lines)}\n\n{devices}; {packages}; {time.strftime('%Y-%m-%d', time.gmtime())}."


def shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value or "–")
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> None:
    global JOB
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS], help="which, in place of all")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write the tables into")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that the script works")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # of a process that measures
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm is not None:
        JOB = Job(options.folder, options.device, options.tiny)
        {"update": update, "generation": generation, "memory": memory}[options.only[0]](options.arm)
        return
    if options.page == PAGE and (options.device == "cpu" or options.tiny):
        parser.error("docs/evidence.md is for GPUs and whole shapes: give another --page")
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="gpu_") as folder:
            runs = {arm: measure_run(name, arm, Path(folder), options) for arm in SECTIONS[name].runs}
        print(f"{name}\n{block(name, runs)}", flush=True)
        write_block(options.page, name, block(name, runs))


if __name__ == "__main__":
    from bench.gpu import main as run  # the module whose state the recipe's rewards see

    run()
