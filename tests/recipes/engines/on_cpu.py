"""Runs scripts one after another in a process launched on the CPU, and notes what each rank really was."""

import gc
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, DistributedType
from bitsandbytes.nn import Linear4bit
from transformers import Trainer, TrainerCallback


def deepspeed_for_tiny_models() -> None:
    """ZeRO-3 keeps small parameters whole, and all of a tiny model's are small: the threshold becomes 0."""
    original = DeepSpeedPlugin.__post_init__

    def changed(self: Any) -> None:
        original(self)
        if self.deepspeed_config["zero_optimization"]["stage"] == 3 and "TESTED_TRAP" not in os.environ:
            self.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0

    DeepSpeedPlugin.__post_init__ = changed


def fsdp_on_the_cpu() -> None:
    """Accelerate 1.15 runs DDP in place of FSDP on the CPU, though PyTorch shards there too: say that it has GPUs."""
    original = PartialState.__init__

    def changed(self: Any, *arguments: Any, **keywords: Any) -> None:
        fresh = PartialState._shared_state == {}
        original(self, *arguments, **keywords)
        if fresh and self.distributed_type == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = changed


class Probe(TrainerCallback):
    """What this rank holds, read off the objects of DeepSpeed and PyTorch and not through this package."""

    def __init__(self, trainer: Any, file: Path) -> None:
        self.trainer = trainer
        self.file = file

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if self.file.exists():
            return
        trainer = self.trainer
        wrapped = trainer.model_wrapped
        found = {
            "world": torch.distributed.get_world_size(),
            "rank": torch.distributed.get_rank(),
            "backend": torch.distributed.get_backend(),
            "classes": [kind.__name__ for kind in type(wrapped).__mro__],
            "stage": wrapped.zero_optimization_stage() if hasattr(wrapped, "zero_optimization_stage") else None,
            "shapes": {name: shapes(parameter) for name, parameter in trainer.model.named_parameters()},
            "trained": [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad],
            "linear4bit": [n for n, module in trainer.model.named_modules() if type(module) is Linear4bit],
            "optimizer_elements": optimizer_elements(trainer.optimizer),
        }
        self.file.write_text(json.dumps(found))


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shapes(parameter: Any) -> dict[str, Any]:
    """The whole shape, what of it is here, and the elements that this rank stores."""
    stored = parameter.ds_tensor if hasattr(parameter, "ds_shape") else local(parameter)
    here = list(local(parameter).shape)
    return {"whole": list(getattr(parameter, "ds_shape", parameter.shape)), "here": here, "elements": stored.numel()}


def optimizer_elements(optimizer: Any) -> int:
    """Elements of Adam's first moments on this rank."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return sum(local(state["exp_avg"]).numel() for state in optimizer.state.values() if "exp_avg" in state)


def main() -> None:
    runs = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[2])
    rank = int(os.environ.get("RANK", "0"))
    deepspeed_for_tiny_models()
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        fsdp_on_the_cpu()
    PartialState.destroy_process_group = lambda self, group=None: None  # the next run needs it
    original = Trainer.train
    for run in runs:
        file = folder / f"{run['name']}.rank{rank}.json"

        def train(self: Any, resume_from_checkpoint: Any = None, *, file: Path = file, **keywords: Any) -> Any:
            self.add_callback(Probe(self, file))
            return original(self, resume_from_checkpoint, **keywords)

        Trainer.train = train
        os.environ.pop("TESTED_TRAP", None)
        if run["trap"]:
            os.environ["TESTED_TRAP"] = "1"  # without the changes
        sys.argv = [run["script"], *run["arguments"]]
        sys.path[0] = str(Path(run["script"]).parent)
        status: int | str | None = 0
        for stream, end in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{run['name']}.{end}{rank}", os.O_WRONLY | os.O_CREAT), stream)
        try:
            runpy.run_path(run["script"], run_name="__main__")
        except SystemExit as error:
            status = error.code
        except BaseException:
            status = traceback.format_exc()
        sys.stdout.flush()
        (folder / f"{run['name']}.status{rank}.json").write_text(json.dumps(status))
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        gc.collect()
        if status not in (0, 2):
            break  # the other rank may be anywhere; 2 is a refusal, which all ranks come to
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        time.sleep(0.2)  # as `leave` of the recipes does: gloo's threads may still hold tensors


if __name__ == "__main__":
    main()
