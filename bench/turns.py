"""Several trainings that take turns, update by update, so that a machine that slows down slows all of them alike."""

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says when it starts and stops

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback

from tests.support import save_tiny_model


class Meter:
    """Time and memory. Time is CPU time with one thread, else wall-clock time."""

    def now(self) -> float:
        return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()

    @property
    def time_is(self) -> str:
        return "the processor's" if torch.get_num_threads() == 1 else "the clock's"


class Peak:
    """Peak bytes of torch's allocator inside, above those at the start."""

    bytes = 0

    def __enter__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        held = [
            (event["ts"], event["args"]["Total Allocated"], event["args"]["Bytes"])
            for event in events
            if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
        ]
        _, total, size = min(held, key=lambda event: event[0])
        self.bytes = max(total for _, total, _ in held) - (total - size)


class Enough(Exception):  # noqa: N818 (not an error)
    """Ends a training that waits for its turn."""


class Turns(TrainerCallback):
    """Lets one training make its next update in turn, and measures it; wants `logging_steps` 1.

    A trainer with `rollout_seconds` says what of an update is no update: the generation and scoring of completions.
    """

    def __init__(self, meter: Meter, conductor: threading.Semaphore) -> None:
        self.meter = meter
        self.conductor = conductor
        self.own = threading.Semaphore(0)
        self.trainer: Any = None
        self.enough = False
        self.around: AbstractContextManager[Any] = nullcontext()
        self.seconds = 0.0
        self.logs: dict[str, float] = {}
        self._start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.own.acquire()
        if self.enough:
            raise Enough
        self.trainer.rollout_seconds = 0.0
        self.around.__enter__()
        self._start = self.meter.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.seconds = self.meter.now() - self._start - self.trainer.rollout_seconds
        self.around.__exit__(None, None, None)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **keywords: Any) -> None:
        self.logs = dict(logs)
        self.conductor.release()


class TakingTurns:
    """Trainings in threads of their own, one for each arm, which `build` makes of its name and its callback."""

    def __init__(self, arms: Iterable[str], build: Callable[[str, Turns], Any]) -> None:
        self.meter = Meter()
        self.conductor = threading.Semaphore(0)
        self.turns = {arm: Turns(self.meter, self.conductor) for arm in arms}
        self.failed: list[BaseException] = []
        for arm, turns in self.turns.items():
            turns.trainer = build(arm, turns)
            turns.trainer.remove_callback(PrinterCallback)
        self.threads = [threading.Thread(target=self._train, args=(each,), daemon=True) for each in self.turns.values()]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            pass  # it has to begin on this thread
        for thread in self.threads:
            thread.start()

    def _train(self, turns: Turns) -> None:
        try:
            turns.trainer.train()
        except Enough:
            pass
        except BaseException as error:
            self.failed.append(error)
            self.conductor.release()

    def turn(self, arm: str, around: AbstractContextManager[Any] | None = None) -> Turns:
        """One update of an arm, inside `around` on the training's own thread, which is what torch's profiler sees."""
        turns = self.turns[arm]
        turns.around = around or nullcontext()
        turns.own.release()
        self.conductor.acquire()
        if self.failed:
            raise RuntimeError(f"The training of {arm!r} failed; its error is above.") from self.failed[0]
        return turns

    def close(self) -> None:
        """End the trainings."""
        for turns in self.turns.values():
            turns.enough = True
            turns.own.release()
        for thread in self.threads:
            thread.join()


def save_llama(folder: Path, **shape: int) -> Path:
    """A random Llama of four layers and four heads with the tests' character tokenizer."""
    save_tiny_model(folder)
    torch.manual_seed(0)
    usual = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    usual |= {"vocab_size": len(AutoTokenizer.from_pretrained(folder)), "pad_token_id": 0}
    config = LlamaConfig(**{**usual, "eos_token_id": 1, "bos_token_id": 1, **shape})
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
