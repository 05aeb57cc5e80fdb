"""The command as a person starts it: what it prints, at any width, and how it ends."""

import re
import sys
from pathlib import Path

import pytest
from click.testing import Result
from trl_grpo_ext.launch.doctor.examine import examine
from typer.testing import CliRunner

from tests.first_plugin_walk import differences
from trl_grpo_ext.cli.main import app
from trl_grpo_ext.errors import ConfigurationError

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"
MODEL = RECIPES / "embedded" / "model"
HOSTILE = "\\e[31mred\\e[0m [bold]loud[/bold] \\u202e[link=x]"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def doctor(*words: str, width: int = 100) -> Result:
    return CliRunner(env={"COLUMNS": str(width)}).invoke(app, ["doctor", *words])


def test_a_shipped_run_is_fine_on_the_machine_that_it_names() -> None:
    words = ["--config_file", "recipes/accelerate/one_process.yaml", "--config", "recipes/configs/qwen2.5_0.5b.yaml"]
    words += ["--script", "recipes/gsm8k_grpo.py", "--gpu-memory", "24", "--", "--model_name_or_path", str(MODEL)]
    words += ["--max_completion_length", "64"]
    said = doctor(*words)
    assert said.exit_code == 0, said.output
    plain = " ".join(said.stdout.split())
    assert "878,720 parameters" in plain
    assert "one_process, 1 process (one_process.yaml)" in plain
    assert "memory: about" in plain


def test_the_page_s_example_is_what_the_command_prints() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8").partition("## An example")[2]
    command, shown = re.findall(r"^```(?:sh\ntrl-grpo-ext doctor )?\n?(.*?)```", page, re.DOTALL | re.MULTILINE)
    said = doctor(*command.replace("\\\n", "").split())
    assert said.exit_code == 1
    assert differences(shown, said.stdout) == [], said.stdout


def test_several_mistakes_of_several_kinds_are_found_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 3\nuse_cpu: true\nnum_machines: 1\nmachine_rank: 0\n"
        "deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 2}\n"
    )
    (tmp_path / "run.yaml").write_text(
        f"model_name_or_path: {RECIPES / 'embedded' / 'model'}\nnum_generations: 7\nlerning_rate: 1\ndtype: bf16\n"
        "load_in_4bit: true\nuse_vllm: true\nrewards: [gsm8k_acuracy, length_target]\nloss_aggregation: nothing\n"
        "lora_target_modules: [query]\nuse_peft: true\n"
    )
    found = examine("launch.yaml", ("run.yaml",), ("--top_p", "0.5", "--nonsense"))
    subjects = {problem.subject for problem in found.problems}
    expected = {"launch", "environment", "accumulation", "settings", "command line", "plugins", "qlora+vllm"}
    assert subjects >= expected | {"vllm", "lora"}
    assert all(problem.fix and problem.message for problem in found.problems)
    severities = [problem.severity for problem in found.problems]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert (found.exit_code, found.case.launch.engine, found.memory) == (1, "zero3", None)
    refusals = [problem for problem in found.problems if "divisible by num_generations" in problem.message]
    assert len(refusals) == 1  # TRL's own


def test_hostile_files_end_in_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.yaml").write_bytes(b"\x00\xff" * 100)
    (tmp_path / "run.yaml").write_text(
        f'model_name_or_path: "{HOSTILE}"\noutput_dir: "{HOSTILE}"\n"{HOSTILE}": "{HOSTILE}"\nrewards: ["{HOSTILE}"]\n'
    )
    (tmp_path / "huge.yaml").write_text("a: " + "x" * 2_000_000)
    words = ("--config_file", "launch.yaml", "--config", "run.yaml", "--config", "huge.yaml")
    said = doctor(*words, width=60)
    assert said.exit_code == 1
    for words_of_it in ("no text file", "too many for", "[bold]loud[/bold]"):
        assert words_of_it in " ".join(said.stdout.split()), said.stdout
    assert "\x1b" not in said.stdout
    assert "\u202e" not in said.stdout
    lines = said.stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert re.fullmatch(r"This run will fail: \d+ errors(, \d+ (warning|note)s?)+", lines[0]), lines[0]


def test_plugins_beside_the_script_are_found_as_when_it_runs(tmp_path: Path) -> None:
    (tmp_path / "my_reward_of_doctor.py").write_text("def points(completions, **columns):\n    return [1.0]\n")
    (tmp_path / "train.py").write_text("")
    words = ("--rewards", "my_reward_of_doctor:points")
    beside = examine(overrides=words, script=str(tmp_path / "train.py"), gpu_memory=24)
    assert beside.case.plugins.problems == ()
    assert str(tmp_path) not in sys.path


def test_files_that_cannot_be_read_are_problems_beside_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("launch.yaml", "distributed_type: NO\n"), ("bad.yaml", "a: ["), ("script.py", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "run.yaml").write_text("optim: paged_adamw_8bit\nlerning_rate: 1\n")
    found = examine("launch.yaml", ("bad.yaml", "run.yaml"), script="script.py", num_processes=2, gpu_memory=24)
    errors = [problem.subject for problem in found.problems if problem.severity == "error"]
    assert errors == ["launch file", "settings", "settings", "launch"]
    assert found.model_source == "no model is named"
    assert found.case.launch.processes == 2
    for named in ({"config_file": "gone.yaml"}, {"configs": ("a\0b",)}, {"script": "x" * 5000}):
        with pytest.raises(ConfigurationError, match="There is no file"):
            examine(**named)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "severity"),
    [(None, "warning"), ("{", "warning"), ('{"model_type": "llama", "num_hidden_layers": 5000}', "error")],
)
def test_a_model_whose_sizes_are_not_known_is_a_problem(tmp_path: Path, config: str | None, severity: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    if config is not None:
        (model / "config.json").write_text(config)
    found = examine(overrides=("--model_name_or_path", str(model)), gpu_memory=24)
    assert [p.severity for p in found.problems if p.subject == "model" and "config" in p.message] == [severity]
    assert found.memory is found.case.sizes is None


def test_the_targets_of_a_recipe_and_of_any_other_script_are_peft_s(tmp_path: Path) -> None:
    words = ("--model_name_or_path", str(RECIPES / "embedded" / "model"), "--use_peft", "true")
    one = (*words, "--lora_target_modules", "q_proj")
    recipe = examine(overrides=one, script=str(RECIPES / "gsm8k_grpo.py"), gpu_memory=24)
    assert recipe.case.adapters is not None
    assert recipe.case.adapters.trainable > 0
    assert "lora" not in {problem.subject for problem in recipe.problems}
    plain = examine(overrides=one, gpu_memory=24)
    (problem,) = [problem for problem in plain.problems if problem.subject == "lora"]
    assert "regular expression" in problem.message
    assert plain.memory is None
