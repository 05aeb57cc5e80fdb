"""Every shipped launch and run file is what the doctor calls sound, on a GPU of the size that its header names."""

import re
from pathlib import Path

import pytest
import yaml
from trl_grpo_ext.launch.doctor.examine import examine

from tests.recipes.config_objects import LAUNCH_FILES, RUN_FILES, header, launches, option

COMMANDS = [(path, number) for path in [*LAUNCH_FILES, *RUN_FILES] for number in range(len(launches(path)))]


def named(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=named)
def test_the_doctor_finds_no_error_in_a_shipped_command_line(path: Path, command: int) -> None:
    words = launches(path)[command]
    script = next(place for place, word in enumerate(words) if word.endswith(".py"))
    front, after = words[:script], words[script + 1 :]
    config = option(after, "--config")
    if config is not None:
        place = after.index("--config")
        after = after[:place] + after[place + 2 :]
    gigabytes = re.search(r"Hardware:.*?(\d+) GB", " ".join(header(path)))
    found = examine(
        config_file=option(front, "--config_file"),
        configs=() if config is None else (config,),
        overrides=tuple(after),
        script=words[script],
        gpu_memory=float(gigabytes[1]) if gigabytes else 80,
        num_processes=int(option(front, "--num_processes") or 0) or None,
        rdzv_backend=option(front, "--rdzv_backend"),
    )
    assert [problem for problem in found.problems if problem.severity == "error"] == []


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)
def test_the_header_names_every_extra(path: Path) -> None:
    (named,) = re.findall(r"^# Needs: pip install 'trl-grpo-ext\[(.*)\]'\.$", path.read_text(), re.MULTILINE)
    chosen = yaml.safe_load(path.read_text())
    wanted = {"deepspeed": str(chosen.get("engine")).startswith("zero"), "vllm": chosen.get("use_vllm", False)}
    wanted |= {"real": chosen.get("model_name_or_path") == "smollm2", "reasoning_gym": "tasks" in chosen}
    assert named.split(",") == ["recipes", *(extra for extra, needed in wanted.items() if needed)]
