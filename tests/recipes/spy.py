"""A reward of nothing that writes down what each rank sees."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def spy(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    seen = {"world": dist.get_world_size(), "sum": total.item(), "prompts": prompts}
    with (Path(os.environ["SPY"]) / f"rank{dist.get_rank()}.jsonl").open("a") as file:
        print(json.dumps(seen), file=file)
    return [0.0] * len(prompts)
