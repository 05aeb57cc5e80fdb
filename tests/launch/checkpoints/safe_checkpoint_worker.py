"""Trainings that are killed while they save, each in a child forked off one process: `... SCENARIO MODEL FOLDER`."""

import faulthandler
import functools
import gc
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar

from tests.support import arguments, length_reward, prompts, scripted_rollout
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.launch.checkpoints import SafeCheckpoints, last_complete_checkpoint
from trl_grpo_ext.records.checkpoint_state import UNFINISHED

STEPS = 3
SETTINGS: dict[str, Any] = {
    "optim": "adamw_torch",
    "learning_rate": 0.01,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 1,
}


class SafeTrainer(SafeCheckpoints, GRPOExtTrainer):
    """The trainer under test."""


def make(model: Path, output: Path, trainer_class: type = SafeTrainer, **settings: Any) -> Any:
    torch.manual_seed(0)
    data = {"train_dataset": prompts(4), "eval_dataset": prompts(4), "rollout_func": scripted_rollout}
    return trainer_class(str(model), length_reward, arguments(output, **{**SETTINGS, **settings}), **data)


def forked(act: Callable[[], None]) -> int:
    """Run something in a child; its status, negative for the signal that ended it."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        faulthandler.dump_traceback_later(30, exit=True)  # a child that hangs says where
        try:
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_event(folder: Path, number: int) -> None:
    """End this process before its `number`-th operation on something in a folder that Python knows of."""
    seen = itertools.count(1)

    def hook(event: str, values: tuple[Any, ...]) -> None:
        there = any(isinstance(v, (str, os.PathLike)) and str(folder) in str(v) for v in values)
        if there and next(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_at_byte(size: int) -> None:
    """End this process when it writes more than that into any file, whatever language does it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def state_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every number of a checkpoint that a resumed run starts from."""
    weights = {file.name: load_file(file) for file in sorted(checkpoint.glob("*.safetensors"))}
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    rng = torch.load(checkpoint / "rng_state.pth", weights_only=False)["cpu"]
    step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
    flat = {f"{file}/{name}": t for file, tensors in weights.items() for name, t in tensors.items()}
    flat |= {f"{i}/{n}": torch.as_tensor(v) for i, s in optimizer["state"].items() for n, v in s.items()}
    return {**flat, "rng": rng, "step": torch.tensor(step)}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


class Attempts:
    """The place from which every attempt at the second save starts, and judgement of what it leaves."""

    def __init__(self, trainer: Any, save: Callable[[], None], folder: Path, replaces: Path | None) -> None:
        self.save = save
        self.output = Path(trainer.args.output_dir)
        if replaces is not None:
            shutil.copytree(replaces, self.output / "checkpoint-2", copy_function=shutil.copy)  # the one saved last
        self.at_first = folder / "at_first"
        shutil.copytree(self.output, self.at_first)
        self.known = {"old": state_of(max(self.output.glob("checkpoint-*")))}
        assert self.attempt(lambda number: None, 0) == 0
        self.known["new"] = state_of(self.output / "checkpoint-2")
        assert not same(self.known["old"], self.known["new"])
        self.largest = max(f.stat().st_size for f in (self.output / "checkpoint-2").rglob("*") if f.is_file())

    def attempt(self, first: Callable[[int], None], number: int) -> int:
        """Save in a child that begins with something, from the state before."""
        shutil.rmtree(self.output)
        shutil.copytree(self.at_first, self.output)

        def act() -> None:
            first(number)
            self.save()

        return forked(act)

    def which(self, checkpoint: str | None) -> str:
        if checkpoint is None:
            return "none"
        try:
            state = state_of(Path(checkpoint))
        except Exception as error:  # whatever a broken one brings about
            return f"broken: {type(error).__name__}"
        return next((name for name, known in self.known.items() if same(state, known)), "other")

    def resumed(self, model: Path) -> dict[str, Any]:
        """Go on to the last step from what there is; the final state, and whether rubbish is gone."""
        status = forked(lambda: make(model, self.output).train(resume_from_checkpoint=True))
        equal = status == 0 and same(state_of(self.output / f"checkpoint-{STEPS}"), self.known["final"])
        return {"status": status, "equal": equal, "rubbish": (self.output / UNFINISHED).exists()}


def kills(model: Path, folder: Path, *, replaces: bool, events: range) -> list[dict[str, Any]]:
    """Kill the second save at every operation in turn, and in the middle of files; it may replace one of its name."""
    rows: list[dict[str, Any]] = []
    other = {"max_steps": 2, "learning_rate": 0.03} if replaces else {}
    make(model, folder / "other", **other).train()

    def sweep(trainer: Any, save: Callable[[], None]) -> None:
        attempts = Attempts(trainer, save, folder, folder / "other" / "checkpoint-2" if replaces else None)
        if not replaces:
            attempts.known["final"] = state_of(folder / "other" / f"checkpoint-{STEPS}")
        sizes = [1, 100, 5000, *range(20000, attempts.largest, attempts.largest // 4)]
        for number, kind in [*((size, "byte") for size in sizes), *((event, "event") for event in events)]:
            ending = kill_at_byte if kind == "byte" else functools.partial(kill_at_event, attempts.output)
            status = attempts.attempt(ending, number)
            theirs = attempts.which(get_last_checkpoint(str(attempts.output)))  # first: ours may put one back
            ours = attempts.which(last_complete_checkpoint(attempts.output))
            rows.append({"kind": kind, "number": number, "status": status, "theirs": theirs, "ours": ours})
            if status == 0:  # it was over before that moment
                break
            if not replaces and len(rows) % 10 == 0:
                rows[-1]["resumed"] = attempts.resumed(model)

    class Trainer(SafeTrainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            save = super()._save_checkpoint
            if self.state.global_step == 1:
                save(model, trial)
            else:
                sweep(self, lambda: save(model, trial))
                self.control.should_training_stop = True

    make(model, folder / "output", Trainer).train()
    return rows


SCENARIOS: dict[str, dict[str, Any]] = {
    "sweep_full": {"replaces": False, "events": range(1, 1000, 2)},
    "sweep_replaces": {"replaces": True, "events": range(48, 1000)},
}


def main() -> None:
    names, model, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    for name in names.split(","):
        (place := folder / name).mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(kills(model, place, **SCENARIOS[name])))


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bar()  # a thread of theirs may hold a lock while a child is forked
    gc.freeze()
    main()
