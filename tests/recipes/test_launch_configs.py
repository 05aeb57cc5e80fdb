"""`recipes/accelerate/*.yaml` and `recipes/deepspeed/*.json`: what Accelerate, DeepSpeed and FSDP2 really make of them.

Each file's own command line is resolved, and each file once more with other settings in the script, to see that they
arrive: accumulation, clipping and precision come from there alone. What a header says to be an error is one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.recipes.config_objects import (
    DEEPSPEED_FILES,
    LAUNCH_FILES,
    ROOT,
    resolve,
)

pytestmark = pytest.mark.slow

ENGINES = {  # engine, processes and machines that the file alone asks for
    "one_process.yaml": ("NO", 1, 1),
    "cpu_2_processes.yaml": ("MULTI_CPU", 2, 1),
    "ddp.yaml": ("MULTI_CPU", 8, 1),  # what becomes of MULTI_GPU where there is no GPU
    "zero2.yaml": ("DEEPSPEED", 8, 1),
    "zero3.yaml": ("DEEPSPEED", 8, 1),
    "zero3_offload.yaml": ("DEEPSPEED", 8, 1),
    "fsdp2.yaml": ("FSDP", 8, 1),
    "fsdp2_qlora.yaml": ("FSDP", 8, 1),
    "nodes_zero3.yaml": ("DEEPSPEED", 16, 2),
    "nodes_zero3_hpz.yaml": ("DEEPSPEED", 16, 2),
    "nodes_fsdp2.yaml": ("FSDP", 16, 2),
}
BY_NAME = {path.name: path for path in LAUNCH_FILES}
ZERO = [name for name, (engine, _, _) in ENGINES.items() if engine == "DEEPSPEED"]
FSDP = [name for name, (engine, _, _) in ENGINES.items() if engine == "FSDP"]
SCRIPT = "recipes/gsm8k_grpo.py"
OTHER = ["--embedded", "--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "3"]
OTHER += ["--max_grad_norm", "0.25", "--num_generations", "4"]

CHANGED = {  # a copy of a shipped file with this in it, and what the script is told: what the headers warn of
    "bf16 here, ZeRO": ("zero3.yaml", {"mixed_precision": "bf16"}, ["--bf16", "false"]),
    "bf16 here, DDP": ("ddp.yaml", {"mixed_precision": "bf16"}, ["--bf16", "false"]),
    "bf16 here, FSDP2": ("fsdp2.yaml", {"mixed_precision": "bf16"}, ["--bf16", "false"]),
    "accumulation here": ("zero2.yaml", {"deepspeed_config.gradient_accumulation_steps": 4}, []),
    "clipping here": ("zero2.yaml", {"deepspeed_config.gradient_clipping": 0.5}, []),
    "precision beside JSON": ("nodes_zero3_hpz.yaml", {"mixed_precision": "no"}, []),
    "stage beside JSON": ("nodes_zero3_hpz.yaml", {"deepspeed_config.zero_stage": 3}, []),
    "number to reshard": ("fsdp2.yaml", {"fsdp_config.fsdp_reshard_after_forward": 4}, []),
    "misspelt": ("fsdp2.yaml", {"fsdp_konfig": {}}, []),
    "more machines": ("nodes_fsdp2.yaml", {"num_machines": 3, "num_processes": 24}, []),
}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = {
        path.name: ["--config_file", str(path.relative_to(ROOT)), SCRIPT, *OTHER, "--bf16", "true"]
        for path in LAUNCH_FILES
    }
    folder = tmp_path_factory.mktemp("changed")
    for number, (name, (file, changes, words)) in enumerate(CHANGED.items()):
        copy = folder / f"{number}.yaml"
        copy.write_text(yaml.safe_dump(changed(BY_NAME[file], changes)))
        cases[name] = ["--config_file", str(copy), SCRIPT, *OTHER, *words]
    for name in ("zero3.yaml", "ddp.yaml"):
        file = str(BY_NAME[name].relative_to(ROOT))
        cases[f"CPU by environment, {name}"] = ["ACCELERATE_USE_CPU=true", "--config_file", file, SCRIPT, *OTHER]
    return resolve(cases)


def changed(path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load(path.read_text())
    for name, value in changes.items():
        *outer, last = name.split(".")
        inner = settings[outer[0]] if outer else settings
        inner[last] = value
    return settings


def of_each(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names or list(ENGINES))


def without_error(facts: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in facts, facts["traceback"]
    return facts


# ----------------------------------------------------------------------------------------------------------- the files


def test_no_file_is_left_out() -> None:
    assert {path.name for path in LAUNCH_FILES} == set(ENGINES)
    assert [path.name for path in DEEPSPEED_FILES] == ["zero3_hpz.json"]
    named = [yaml.safe_load(path.read_text()).get("deepspeed_config", {}) for path in LAUNCH_FILES]
    assert {ROOT / used["deepspeed_config_file"] for used in named if "deepspeed_config_file" in used} == set(
        DEEPSPEED_FILES
    )


# ------------------------------------------------------------------------------------------------ what becomes of them


@of_each()
def test_precision_is_the_script_s(name: str, resolved: dict[str, dict[str, Any]]) -> None:
    facts = without_error(resolved[name])
    assert facts["mixed_precision"] == "bf16"
    if name in ZERO:
        assert (facts["resolved"]["bf16"], facts["resolved"]["fp16"]) == (True, False)
    if name in FSDP:
        assert facts["fsdp"]["param_dtype"] == "torch.bfloat16"
        assert facts["weight"]["dtype"] == "torch.float32"  # loaded in bf16


@of_each()
def test_accumulation_clipping_and_batch_are_the_script_s(name: str, resolved: dict[str, dict[str, Any]]) -> None:
    facts = without_error(resolved[name])
    _, processes, _ = ENGINES[name]
    assert facts["world"] == processes
    assert not {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING"} & set(facts["environment"])
    assert facts["training"]["generation_batch_size"] == 16 * 3 * processes
    if name in ZERO:
        result = facts["resolved"]
        assert (result["accumulation"], result["clipping"], result["micro_batch"]) == (3, 0.25, 16)
        assert (result["batch"], result["world"]) == (16 * 3 * processes, processes)
        assert "auto" not in json.dumps(facts["deepspeed"])


@of_each(*ZERO)
def test_deepspeed_gets_the_stage_and_the_offload(name: str, resolved: dict[str, dict[str, Any]]) -> None:
    result = resolved[name]["resolved"]
    assert result["stage"] == (2 if name == "zero2.yaml" else 3)
    assert result["gather_on_save"] is result["init"] is (name != "zero2.yaml")
    offload = "cpu" if name == "zero3_offload.yaml" else None
    assert [result[what] not in (None, "none") and result[what] for what in ("offload_optimizer", "offload_param")] == [
        offload or False
    ] * 2
    assert result["hpz"] == (8 if name == "nodes_zero3_hpz.yaml" else 1)


@of_each(*FSDP)
def test_fsdp2_shards_and_saves_whole_weights(name: str, resolved: dict[str, dict[str, Any]]) -> None:
    facts = resolved[name]
    fsdp = facts["fsdp"]
    assert (fsdp["version"], fsdp["wrap"], fsdp["reshard_after_forward"]) == (2, "transformer_auto_wrap_policy", True)
    assert fsdp["state_dict"] == "FULL_STATE_DICT"
    assert fsdp["activation_checkpointing"] is False  # with the script's gradient_checkpointing it would be an error
    assert fsdp["efficient_loading"] is (name != "fsdp2_qlora.yaml")
    assert facts["training"]["gradient_checkpointing"] is False  # of the embedded default; other run configs say true
    hybrid = name == "nodes_fsdp2.yaml"
    assert facts["weight"]["placements"] == (["R", "S(0)"] if hybrid else ["S(0)"])
    assert facts["weight"]["whole"] == [64, 64]
    assert facts["weight"]["here"] == [8, 64]  # an eighth, on one machine or two


# -------------------------------------------------------------------------------------------- what the headers warn of


@pytest.mark.parametrize("name", ["bf16 here, DDP", "bf16 here, FSDP2"])
def test_bf16_in_the_file_would_win_over_the_script(name: str, resolved: dict[str, dict[str, Any]]) -> None:
    facts = without_error(resolved[name])
    assert facts["training"]["bf16"] is False
    assert facts["mixed_precision"] == "bf16"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bf16 here, ZeRO", "bf16.enabled=True vs hf bf16|bf16_full_eval=False"),
        ("accumulation here", "gradient_accumulation_steps=4"),
        ("clipping here", "gradient_clipping=0.5"),
        ("precision beside JSON", "mixed_precision"),
        ("stage beside JSON", "zero_stage"),
        ("number to reshard", "invalid truth value 4"),
        ("misspelt", "fsdp_konfig"),
        ("more machines", "does not match num_processes (24)"),
    ],
)
def test_what_would_fight_the_script_stops(name: str, says: str, resolved: dict[str, dict[str, Any]]) -> None:
    assert says in resolved[name].get("error", "")


def test_a_cpu_flag_in_the_environment_makes_ddp_of_deepspeed_and_the_recipe_stops(
    resolved: dict[str, dict[str, Any]],
) -> None:
    assert "makes Accelerate run DDP on the CPU" in resolved["CPU by environment, zero3.yaml"]["error"]
    without_error(resolved["CPU by environment, ddp.yaml"])
