"""What `bench.gpu` measures, one function for each kind of run; each runs in a process of its own.

    python bench/gpu_runs.py FUNCTION KEYWORDS --folder FOLDER --device cuda [--tiny]

Figures go to FOLDER/answer.json as they come, an error too. Trainings of run files go through the recipe's own flow,
from the parsed settings to the trainer; left out are its evaluations and what it saves.
"""

import argparse
import contextlib
import gc
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.compact_rollouts import PROFILES, Cell, Script, Size
from bench.gpu_plan import DIFFER, EQUAL, OURS, PLAIN, ROOT
from tests.support import CHARACTERS, arguments, relative_gap, save_tiny_model, train
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer, load_rewards
from trl_grpo_ext.launch.checkpoints import SafeCheckpoints
from trl_grpo_ext.launch.doctor.command import examine
from trl_grpo_ext.trainer import upstream
from trl_grpo_ext.trainer.logps import completion_logps, tiled_logps

RECIPES = ROOT / "recipes"
GB = 1e9

QWEN = {
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}
SHAPES["two layers"] = {**SHAPES["0.5B"], "num_hidden_layers": 2}
TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass
class Job:
    """One run: its folder, its sizes, and its figures so far."""

    folder: Path
    device: str
    tiny: bool
    rows: tuple[str, ...]
    said: dict[str, Any] = field(default_factory=lambda: {"rows": {}})

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def say(self, row: str, figures: Mapping[str, Any]) -> None:
        """Report figures of a row at once."""
        assert row in self.rows, row
        self.said["rows"].setdefault(row, {}).update(figures)
        self.put()

    def put(self) -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            draft = self.folder / "answer.draft"
            draft.write_text(json.dumps(self.said), encoding="utf-8")
            draft.replace(self.folder / "answer.json")

    def size(self, real: int, tiny: int) -> int:
        return tiny if self.tiny else real

    def model(self, shape: str) -> Path:
        """A folder with random weights of this shape in bfloat16 and the tests' tokenizer; made once in a call."""
        folder = self.folder / f"model {shape}".replace(" ", "_")
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            save_tiny_model(folder)
            self.build(shape).save_pretrained(folder)
            (folder / "whole").touch()
            free()
        return folder

    def build(self, shape: str) -> Any:
        torch.manual_seed(0)
        with torch.device(self.device):
            config = Qwen2Config(**{**QWEN, **SHAPES[shape], **(TINY if self.tiny else {})})
            return Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)

    def out(self, name: str) -> Path:
        folder = self.folder / "out" / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------- seconds and peaks by stage


class Watch:
    """Seconds and peaks of a training by stage; the device has done its work before each reading."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.stage: str | None = None
        self.seconds: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []
        self.peaks: dict[str, tuple[int, int]] = {}
        self.tokens = self.longest_prompt = 0
        self._since = 0.0

    def turn_to(self, stage: str | None) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.stage is not None:
            self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + now - self._since
            if self.cuda:
                seen = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
                before = self.peaks.get(self.stage, (0, 0))
                self.peaks[self.stage] = (max(seen[0], before[0]), max(seen[1], before[1]))
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.stage, self._since = stage, time.perf_counter()

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        outer = self.stage
        self.turn_to(stage)
        try:
            yield
        finally:
            self.turn_to(outer)

    def end_step(self) -> None:
        self.turn_to(None)
        self.steps.append(self.seconds)
        self.seconds = {}

    def memory(self, *stages: str) -> dict[str, float | None]:
        """Peaks over some stages, as columns of a table; None without a GPU."""
        if not self.cuda:
            return {"allocated, GB": None, "reserved, GB": None}
        allocated, reserved = (max(self.peaks[stage][place] for stage in stages) for place in (0, 1))
        return {"allocated, GB": allocated / GB, "reserved, GB": reserved / GB}


def beside_torch() -> float:
    """Bytes that this process holds on the device outside of torch's allocator, if no other does."""
    unused, whole = torch.cuda.mem_get_info()
    return float(whole - unused - torch.cuda.memory_reserved())


WATCH = Watch(False)
SCRIPT: Script | None = None
AFTER_STEP: list[Callable[[int], None]] = []


class Steps(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        WATCH.turn_to("update")

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        WATCH.end_step()
        for function in AFTER_STEP:
            function(len(WATCH.steps))


class Timed:
    """Around a whole trainer, so that whatever it adds anywhere is in the figures."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        with WATCH.during("load"):
            super().__init__(*arguments, rollout_func=SCRIPT and SCRIPT.rollout, **keywords)  # type: ignore[call-arg]
        self.add_callback(Steps())  # type: ignore[attr-defined]

    def _generate(self, prompts: Any) -> Any:
        with WATCH.during("generation"):
            generated = super()._generate(prompts)  # type: ignore[misc]
        WATCH.longest_prompt = max(WATCH.longest_prompt, *map(len, generated[0]))
        WATCH.tokens = sum(map(len, generated[1]))
        return generated

    def _calculate_rewards(self, *arguments: Any) -> Any:
        with WATCH.during("rewards"):
            return super()._calculate_rewards(*arguments)  # type: ignore[misc]

    def evaluate(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
        return {}

    def save_model(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def save_state(self) -> None:
        pass


class TimedOurs(Timed, SafeCheckpoints, GRPOExtTrainer):
    """The recipe's trainer."""


class TimedPlain(Timed, SafeCheckpoints, GRPOTrainer):
    """TRL's, with the rewards that the recipe's settings name."""

    def __init__(self, *arguments: Any, args: Any, **keywords: Any) -> None:
        rewards = load_rewards(args.rewards)
        args.reward_weights = list(rewards.weights)
        super().__init__(*arguments, reward_funcs=list(rewards), args=args, **keywords)


def even_share(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The share of even token ids: nearly never the same in a whole group, however the tokens were drawn."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def scripted_reward(completions: list[Any], **columns: Any) -> list[float]:
    assert SCRIPT is not None
    return SCRIPT.reward(completions)


def recipe_words(job: Job, config: str, shape: str, more: Mapping[str, Any]) -> list[str]:
    """The command line of gsm8k_grpo.py for a run file."""
    rows = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
    tiny = {**rows, "max_completion_length": 8, "per_device_eval_batch_size": 4} if job.tiny else {}
    on_cpu = {} if job.cuda else {"use_cpu": True, "bf16": False}
    words: dict[str, Any] = {
        "config": RECIPES / "configs" / config,
        "model_name_or_path": job.model(shape),
        "output_dir": job.out(shape.replace(" ", "_")),
        "train_problems": 64,
        "eval_problems": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "rewards": "bench.gpu_runs:even_share",
        "embedded": False,
        **tiny,
        **on_cpu,
        **more,
    }
    return [word for name, value in words.items() for word in (f"--{name}", str(value))]


def run_recipe(words: Sequence[str], arm: str) -> None:
    """What gsm8k_grpo.py does with this command line, on its embedded problems and with a trainer that is watched."""
    sys.path[:0] = [str(RECIPES)]
    import gsm8k_grpo as recipe
    from common.flow import train_and_report
    from common.problems import as_dataset, embedded_problems
    from common.settings import asked_for, check_setup, measure

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


def estimate(words: Sequence[str], stage: str) -> float:
    """Bytes that the doctor expects in `load`, `generation` or `update`. Don't call it while a trainer runs."""
    launcher = ("accelerate", "launch", "--config_file", str(RECIPES / "accelerate" / "one_process.yaml"))
    examined = examine([*launcher, str(RECIPES / "gsm8k_grpo.py"), *words], prompt_length=WATCH.longest_prompt)
    memory = examined.memory
    assert memory is not None, "the doctor knows no sizes"
    return float(memory.device_bytes[stage])  # type: ignore[index]


def estimate_beside(words: Sequence[str], stage: str, reserved: float | None) -> dict[str, float | None]:
    expected = estimate(words, stage) / GB
    ratio = None if reserved is None else expected / (reserved + beside_torch() / GB)
    return {"doctor's estimate, GB": expected, "estimate / measured": ratio}


# --------------------------------------------------------------------------------------------------------- the runs


def gpu_tests(job: Job) -> None:
    """The tests marked gpu; on the CPU they skip."""
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *map(str, sorted(marked))]
    begun = time.perf_counter()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    last = (done.stdout.strip().splitlines() or ["it said nothing"])[-1]
    outcome = re.sub(r" in [\d.]+s.*|=+ ?", "", last)
    outcome = re.sub(r", \d+ (deselected|warnings?)", "", outcome)
    failed = [line.split(" - ")[0].removeprefix("FAILED ") for line in done.stdout.splitlines() if "FAILED" in line]
    job.say(job.rows[0], {"outcome": "; ".join([outcome, *failed[:5]]), "seconds": time.perf_counter() - begun})


class KeepTrainable(TrainerCallback):
    """4-bit layers on the CPU, see `recipes/common/quantised.py`."""

    trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        sys.path[:0] = [str(RECIPES)]
        from common.quantised import keep_4_bit_trainable

        keep_4_bit_trainable(model)


def compact_against_off(job: Job) -> None:
    """The gradient of an optimizer step with and without compact updates, in three precisions."""
    model = save_tiny_model(job.folder / "tiny")
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_generations": 4,
        "max_completion_length": 48,
        "max_steps": 1,
        "prompt_count": 4,
        "use_cpu": not job.cuda,
    }

    def gradient(updates: str, more: Mapping[str, Any], quantised: torch.dtype | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        trainer: dict[str, Any] = {"callbacks": [KeepTrainable()]}
        if quantised is not None:
            trainer["peft_config"] = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
            trainer["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=quantised
            )
        run = train(
            model, job.out("compact"), trainer_arguments=trainer, compact_updates=updates, **{**settings, **more}
        )
        return run.gradients[0]

    half = {"bf16": True, "gradient_checkpointing": True}
    for row, more, quantised in (
        (job.rows[0], {}, None),
        (job.rows[1], half, None),
        (job.rows[2], {**half, "dtype": "bfloat16"}, torch.bfloat16),
    ):
        off = gradient("off", more, quantised)
        gap = relative_gap(gradient("exact", more, quantised), off)
        assert any(bool(values.any()) for values in off.values()), "the gradient is zero"
        own = None
        if more:
            own = relative_gap(off, gradient("off", {}, None if quantised is None else torch.float32))
        job.say(row, {"gradient gap": gap, "gap of the precision itself": own})


def scripted_updates(job: Job, arm: str) -> None:
    """Updates of the shipped file for 0.5B on scripted rollouts of two profiles."""
    global SCRIPT
    SCRIPT = Script(Size(2, 4, 16) if job.tiny else Size(16, 8, 512))
    cells = {f"{arm}, {DIFFER}": Cell(PROFILES[2], 40), f"{arm}, {EQUAL}": Cell(PROFILES[0], 0)}
    assert tuple(cells) == job.rows
    each = job.size(4, 2)  # the first of each profile is not counted
    words = recipe_words(
        job,
        "qwen2.5_0.5b.yaml",
        "0.5B",
        {
            "rewards": "bench.gpu_runs:scripted_reward",
            "max_steps": 2 * each,
            **({"max_completion_length": 16} if job.tiny else {}),
        },
    )
    SCRIPT.cell = cells[job.rows[0]]

    def after(step: int) -> None:
        assert SCRIPT is not None
        if step % each:
            return
        row = job.rows[step // each - 1]
        updates = [sum(seconds.values()) - seconds.get("generation", 0.0) for seconds in WATCH.steps[-each + 1 :]]
        job.say(row, {"update, s": min(updates), **WATCH.memory("update")})
        WATCH.peaks.clear()
        free()
        SCRIPT.cell = cells[job.rows[-1]]

    AFTER_STEP.append(after)
    run_recipe(words, arm)
    for row in job.rows:
        job.say(row, estimate_beside(words, "update", job.said["rows"][row]["reserved, GB"]))


def with_generation(job: Job, arm: str) -> None:
    """Two steps of the shipped file for 0.5B, and what the second took."""
    words = recipe_words(job, "qwen2.5_0.5b.yaml", "0.5B", {"max_steps": 2})
    run_recipe(words, arm)
    seconds = WATCH.steps[1]
    whole = sum(seconds.values())
    figures = {
        "step, s": whole,
        "generation, s": seconds["generation"],
        "update, s": seconds["update"],
        "tokens/s": WATCH.tokens / whole,
    }
    job.say(job.rows[0], {**figures, **WATCH.memory("generation", "update")})


def stages(job: Job, config: str, shape: str, gigabytes: float | None = None, lora: bool = False) -> None:
    """Load, one generation, two updates; each stage's seconds and peaks, and what the doctor expected."""
    adapters = {"use_peft": True, "lora_target_modules": "all-linear", "lora_r": 16, "lora_alpha": 32}
    more = {**(adapters if lora else {}), "max_steps": 2, "num_iterations": 2, "max_grad_norm": 1.0}
    words = recipe_words(job, config, shape, more)
    if gigabytes is not None and job.cuda:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 2**30 / whole))
    put = WATCH.turn_to

    def after_stage(stage: str | None) -> None:
        """Report a stage as soon as it ends."""
        ended = WATCH.stage
        put(stage)
        if ended == "load" and "load" not in job.said["rows"]:
            job.say("load", {"seconds": WATCH.seconds.pop("load"), **WATCH.memory("load")})
        elif ended == "generation" and "generation" not in job.said["rows"]:
            job.say("generation", {"seconds": WATCH.seconds["generation"], **WATCH.memory("generation")})

    WATCH.turn_to = after_stage  # type: ignore[method-assign]
    run_recipe(words, OURS)
    job.say("update", {"seconds": WATCH.steps[-1]["update"], **WATCH.memory("update")})
    for stage in ("load", "generation", "update"):
        job.say(stage, estimate_beside(words, stage, WATCH.memory(stage)["reserved, GB"]))


def scripted_rollout(lengths: Callable[[], list[int]], prompt: int = 32) -> Callable[..., dict[str, Any]]:
    """A `rollout_func` that makes completions of these lengths."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        completions = [random.choices(range(3, 3 + len(CHARACTERS)), k=length) for length in lengths()]
        assert len(completions) == len(prompts), (len(completions), len(prompts))
        return {
            "prompt_ids": [random.choices(range(3, 3 + len(CHARACTERS)), k=prompt) for _ in prompts],
            "completion_ids": completions,
            "logprobs": [[-1.0] * len(ids) for ids in completions],
        }

    return rollout


def make_trainer(job: Job, model: Path, arm: str, rollout: Any, name: str, **settings: Any) -> Any:
    """A trainer of one process, with a reward that always has a signal."""
    plain = arm == PLAIN
    shared = {
        "dtype": "float32",
        "use_cpu": not job.cuda,
        "bf16": job.cuda,
        "gradient_checkpointing": True,
        "optim": "adamw_torch",
        "learning_rate": 1e-6,
        "max_grad_norm": 1.0,
        "logging_steps": 1000,
        "num_generations": 4,
    }
    loading = {"model_init_kwargs": {"dtype": shared.pop("dtype")}}
    return (GRPOTrainer if plain else GRPOExtTrainer)(
        str(model),
        even_share,
        arguments(job.out(name), GRPOConfig if plain else GRPOExtConfig, **{**shared, **loading, **settings}),
        train_dataset=Dataset.from_dict({"prompt": [f"{number} " for number in range(64)]}),
        rollout_func=rollout,
    )


ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "ours, nothing selected": {},
    "ours, `prompt_mean`": {"loss_aggregation": "prompt_mean"},
    "ours, three hooks": {"advantage_hooks": ["leave_one_out", "repetition_penalty", "entropy_shaping"]},
}


class Synchronisations(TrainerCallback):
    """How many times a step after the timed ones made Python wait for the device."""

    def __init__(self, timed: int) -> None:
        self.timed, self.count = timed, 0
        self._recorded: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step == self.timed and torch.cuda.is_available():
            self._caught = warnings.catch_warnings(record=True)
            self._recorded = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if self._recorded is not None:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            self.count = sum("synchronizing" in str(warning.message) for warning in self._recorded)
            self._recorded = None


def overhead(job: Job) -> None:
    """The same steps with nothing, with an aggregation and with hooks, one arm after another."""
    rows, tokens, timed = job.size(64, 8), job.size(4096, 16), job.size(4, 2)
    model = job.model("two layers")
    for arm in job.rows:
        global WATCH
        WATCH = Watch(job.cuda)
        trainer = make_trainer(
            job,
            model,
            arm,
            scripted_rollout(lambda: [tokens] * rows),
            "overhead",
            per_device_train_batch_size=rows // 4,
            gradient_accumulation_steps=4,
            max_completion_length=tokens,
            max_steps=timed + 1,
            **ARMS[arm],
        )
        counting = Synchronisations(timed)
        trainer.add_callback(Steps())
        trainer.add_callback(counting)
        trainer.train()
        memory = WATCH.memory("update")
        job.say(
            arm,
            {
                "step, s": min(seconds["update"] for seconds in WATCH.steps[1:timed]),
                "synchronisations": counting.count if job.cuda else None,
                "allocated, GB": memory["allocated, GB"],
            },
        )
        del trainer
        free()


def shapes(job: Job) -> None:
    """Generation batches of other lengths each; how much the allocator keeps beside what it gives out."""
    drawn = random.Random(0)
    rows, most, batches = job.size(16, 8), job.size(1024, 16), job.size(30, 3)

    def lengths() -> list[int]:
        longest = drawn.randint(max(1, most // 16), most)
        return [drawn.randint(1, longest) for _ in range(rows)]

    trainer = make_trainer(
        job,
        job.model("0.5B"),
        OURS,
        scripted_rollout(lengths),
        "shapes",
        per_device_train_batch_size=rows // 2,
        gradient_accumulation_steps=2,
        max_completion_length=most,
        max_steps=batches,
        compact_updates="exact",
    )
    trainer.add_callback(Steps())
    trainer.train()
    memory = WATCH.memory("update")
    allocated, reserved = memory["allocated, GB"], memory["reserved, GB"]
    ratio = None if allocated is None or reserved is None else reserved / allocated
    seconds = sum(step["update"] for step in WATCH.steps[1:])
    job.say(job.rows[0], {"seconds": seconds, **memory, "reserved / allocated": ratio})


def teacher(job: Job) -> None:
    """Scoring of one generation batch by a teacher, as `Scorer` does it."""
    accelerator = Accelerator(mixed_precision="bf16" if job.cuda else "no", cpu=not job.cuda)
    prompt = job.size(64, 4)
    for head in ("in tiles", "all logits"):
        model = job.build("0.5B").requires_grad_(False)
        vocabulary = model.config.vocab_size
        if head == "in tiles":
            assert upstream.add_fused_lm_head is not None, "this TRL has no such head"
            upstream.add_fused_lm_head(model, temperature=1.0)
        model = accelerator.prepare_model(model, evaluation_mode=True).eval()
        for row in (name for name in job.rows if name.endswith(head)):
            rows, length = (int(number.replace(",", "")) for number in row.rsplit(",", 1)[0].split(" x "))
            length = job.size(length, length // 128)
            ids = torch.randint(3, 41, (rows, prompt + length), device=job.device)
            mask = torch.ones_like(ids)
            score = tiled_logps if head == "in tiles" else completion_logps
            job.say(row, {"all logits in float32 would be, GB": rows * (length + 1) * vocabulary * 4 / GB})
            try:
                for _ in range(2):  # the first warms up
                    free()
                    watch = Watch(job.cuda)
                    before = torch.cuda.memory_allocated() if job.cuda else 0
                    with watch.during("scoring"), torch.no_grad(), accelerator.autocast():
                        logps = score(model, ids, mask, length)
                    assert logps.shape == (rows, length)
                    del logps
            except torch.OutOfMemoryError:  # a figure too
                job.say(row, dict.fromkeys(("seconds", "allocated, GB"), "out of memory"))
                continue
            allocated = watch.memory("scoring")["allocated, GB"]
            above = None if allocated is None else allocated - before / GB
            job.say(row, {"seconds": watch.seconds["scoring"], "allocated, GB": above})
        del model
        free()


def resume(job: Job) -> None:
    """Uninterrupted, the same again, and resumed from a checkpoint in the middle."""
    model = job.model("two layers")
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "max_completion_length": job.size(64, 8),
        "max_steps": 4,
        "learning_rate": 1e-4,
        "save_strategy": "steps",
        "save_steps": 2,
        "compact_updates": "exact",
    }

    def trained(name: str, checkpoint: Path | None = None) -> tuple[dict[str, torch.Tensor], Path]:
        trainer = make_trainer(job, model, OURS, None, name, **settings)
        trainer.train(None if checkpoint is None else str(checkpoint))
        weights = {n: p.detach().cpu().clone() for n, p in trainer.model.named_parameters()}
        folder = Path(trainer.args.output_dir)
        del trainer
        free()
        return weights, folder

    first, folder = trained("first")
    job.say("repeated", {"gap of the weights": relative_gap(trained("again")[0], first)})
    gap = relative_gap(trained("resumed", folder / "checkpoint-2")[0], first)
    job.say("resumed", {"gap of the weights": gap})


def learn(job: Job, task: str, where: str) -> None:
    """A whole recipe, launched as a user would; before, after, seconds and the curve."""
    folder, sorting = job.out("learn"), task.startswith("sorting")
    words = [sys.executable, "-m", "accelerate.commands.launch"]
    words += ["--config_file", str(RECIPES / "accelerate" / "one_process.yaml")]
    if where == "CPU":
        words += ["--num_cpu_threads_per_process", str(min(os.cpu_count() or 1, 8))]
    script = "sort_grpo.py" if sorting else "gsm8k_grpo.py"
    on_cpu = where == "CPU" or not job.cuda
    words += [str(RECIPES / script), "--output_dir", str(folder), "--use_cpu", str(on_cpu).lower()]
    words += [] if sorting else ["--embedded"]
    if job.tiny:
        words += ["--max_steps", "2", "--per_device_train_batch_size", "16", "--per_device_eval_batch_size", "16"]
        words += ["--logging_steps", "1", *(["--train_prompts", "64", "--eval_prompts", "16"] if sorting else [])]
        words += [] if sorting else ["--train_problems", "64", "--eval_problems", "16"]
    subprocess.run(words, cwd=job.folder, check=True)
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    device = metrics["run"]["device"]
    assert device.startswith("cpu" if on_cpu else "cuda"), f"it trained on {device}"
    accuracy = "exactly_sorted" if sorting else "gsm8k_accuracy"
    mean = f"rewards/{accuracy}/mean"
    curve = [(log["step"], log[mean]) for log in metrics["history"] if log.get(mean) is not None]
    job.say(
        job.rows[0],
        {
            "before": metrics["before"][accuracy],
            "after": metrics["after"][accuracy],
            "training, s": metrics["run"]["training_seconds"],
            "curve": curve,
        },
    )


RUNS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        *(gpu_tests, compact_against_off, scripted_updates, with_generation, stages, overhead, shapes, teacher),
        *(resume, learn),
    )
}


def main() -> None:
    global WATCH
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("function", choices=RUNS)
    parser.add_argument("keywords", type=json.loads)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    keywords = dict(options.keywords)
    job = Job(options.folder, options.device, options.tiny, tuple(keywords.pop("rows")))
    WATCH = Watch(job.cuda)
    try:
        RUNS[options.function](job, **keywords)
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        job.said["failed"] = f"{type(error).__name__}: {' '.join(lines[-1].split())}".replace("|", "/")[:300]
        with contextlib.suppress(OSError):
            job.put()
        raise


if __name__ == "__main__":
    from bench.gpu_runs import main as run  # the module whose state the rewards see

    run()
