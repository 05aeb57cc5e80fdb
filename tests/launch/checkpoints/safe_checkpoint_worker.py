"""Trainings that are killed while they save; one process that forks a child for each attempt.

    python -m tests.launch.checkpoints.safe_checkpoint_worker SCENARIO MODEL FOLDER

It trains two steps of the tiny model with a checkpoint after each, and stops before the second is saved. From there
every child does that save, each ended at another moment, and what it left is judged. Results: `FOLDER/SCENARIO.json`.
"""

import faulthandler
import gc
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


class StopError(Exception):
    """The parent has seen enough."""


def at_second_save(model: Path, folder: Path, act: Callable[[Any, Callable[[], None]], None]) -> None:
    """Train until the second save, which `act` gets."""

    class Trainer(SafeTrainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            save = super()._save_checkpoint
            if self.state.global_step == 1:
                save(model, trial)
            else:
                act(self, lambda: save(model, trial))
                raise StopError

    try:
        make(model, folder / "output", Trainer).train()
    except StopError:
        return
    raise AssertionError("there was no second save")


def make(model: Path, output: Path, trainer_class: type = SafeTrainer, **settings: Any) -> Any:
    arguments_ = arguments(output, **{**SETTINGS, **settings})
    torch.manual_seed(0)
    data = {"train_dataset": prompts(4), "rollout_func": scripted_rollout}
    return trainer_class(str(model), length_reward, arguments_, **data)


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
    seen = 0

    def hook(event: str, values: tuple[Any, ...]) -> None:
        nonlocal seen
        if any(isinstance(v, (str, os.PathLike)) and str(folder) in str(v) for v in values):
            seen += 1
            if seen == number:
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
        self.save, self.output = save, Path(trainer.args.output_dir)
        if replaces is not None:
            shutil.copytree(replaces, self.output / "checkpoint-2")
        self.at_first = folder / "at_first"
        shutil.copytree(self.output, self.at_first)
        self.known = {"old": state_of(max(self.output.glob("checkpoint-*")))}
        assert self.attempt(lambda: None) == 0
        self.known["new"] = state_of(self.output / "checkpoint-2")
        assert not same(self.known["old"], self.known["new"])
        self.largest = max(f.stat().st_size for f in (self.output / "checkpoint-2").rglob("*") if f.is_file())

    def attempt(self, first: Callable[[], None]) -> int:
        """Save in a child that begins with something, from the state before."""
        shutil.rmtree(self.output)
        shutil.copytree(self.at_first, self.output)

        def act() -> None:
            first()
            self.save()

        return forked(act)

    def listing(self) -> list[str]:
        return sorted(path.name for path in self.output.iterdir())

    def which(self, checkpoint: str | None) -> str:
        if checkpoint is None:
            return "none"
        try:
            state = state_of(Path(checkpoint))
        except Exception as error:  # whatever a broken one brings about
            return f"broken: {type(error).__name__}"
        return next((name for name, known in self.known.items() if same(state, known)), "other")

    def verdict(self) -> dict[str, Any]:
        """What transformers and what we take for the last checkpoint, in this order: ours may put one back."""
        theirs = self.which(get_last_checkpoint(str(self.output)))
        ours = self.which(last_complete_checkpoint(self.output))
        return {"theirs": theirs, "ours": ours}

    def resumed(self, model: Path) -> dict[str, Any]:
        """Go on to the last step from what there is; the final state, and whether rubbish is gone."""

        def act() -> None:
            make(model, self.output).train(resume_from_checkpoint=True)

        status = forked(act)
        last = self.output / f"checkpoint-{STEPS}"
        return {
            "status": status,
            "equal": status == 0 and same(state_of(last), self.known["final"]),
            "rubbish": [name for name in self.listing() if name == UNFINISHED],
        }


def kills(
    model: Path,
    folder: Path,
    *,
    replaces: bool = False,
    resume_every: int = 0,
    events: range = range(1, 1000),
) -> list[dict[str, Any]]:
    """Kill at every operation in turn, and in the middle of files; one row for each."""
    rows: list[dict[str, Any]] = []
    final = {}
    if resume_every:
        make(model, folder / "straight").train()
        final = state_of(folder / "straight" / f"checkpoint-{STEPS}")
    other = folder / "other"
    if replaces:
        make(model, other, max_steps=2, learning_rate=0.03).train()

    def act(trainer: Any, save: Callable[[], None]) -> None:
        attempts = Attempts(trainer, save, folder, other / "checkpoint-2" if replaces else None)
        attempts.known["final"] = final
        bytes_ = [1, 100, 5000, *range(20000, attempts.largest, attempts.largest // 4)]
        moments = [("byte", size) for size in bytes_] + [("event", n) for n in events]
        for kind, number in moments:
            ending = kill_at_byte if kind == "byte" else lambda n: kill_at_event(attempts.output, n)
            status = attempts.attempt(lambda number=number, ending=ending: ending(number))  # type: ignore[misc]
            rows.append({"kind": kind, "number": number, "status": status, **attempts.verdict()})
            if status == 0:  # it was over before that moment
                break
            if resume_every and (len(rows) % resume_every == 0):
                rows[-1]["resumed"] = attempts.resumed(model)

    at_second_save(model, folder, act)
    return rows


def sweep_full(model: Path, folder: Path) -> Any:
    return kills(model, folder, resume_every=10, events=range(1, 1000, 2))


def sweep_replaces(model: Path, folder: Path) -> Any:
    return kills(model, folder, replaces=True, events=range(48, 1000))


SCENARIOS = {f.__name__: f for f in (sweep_full, sweep_replaces)}


def main() -> None:
    names, model, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    for name in names.split(","):
        (place := folder / name).mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(SCENARIOS[name](model, place)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bar()  # a thread of theirs may hold a lock while a child is forked
    gc.freeze()
    main()
