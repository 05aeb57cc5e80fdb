"""Real engines on two CPU processes: every launch file, times full, LoRA and QLoRA, through the shipped recipe.

What is asserted about an engine comes from `on_cpu.Probe`, which reads DeepSpeed's and PyTorch's own objects. Measured
on the steps below: metrics and weights of a resumed run are those of the uninterrupted one to the last digit; what the
engines have trained agrees with DDP to 1.1e-6 relative (QLoRA's adapters are in float32 like LoRA's); and two
steps on scripted rollouts with those of one process to 3e-6, which is the rounding of the weights.
"""

import json
import math
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.engines.gradients import run_case
from tests.recipes.engines.launched import Run, finished, launch, metrics, probe, read, said
from tests.recipes.launching import SMALL, options
from tests.support import relative_gap, save_tiny_model

pytestmark = pytest.mark.slow

SIZES = SMALL | {"max_steps": 3, "save_steps": 2, "learning_rate": 0.01, "max_completion_length": 12}
SIZES |= {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "eval_problems": 8}
SIZES |= {"num_generations_eval": 1, "rewards": "tests.support:length_reward"}  # the model never has a right answer
LORA = ["--use_peft", "--lora_target_modules", "all-linear", "--lora_r", "4"]
# FSDP2 divides 4-bit weights only if their storage type is that of the other weights.
QLORA = [*LORA, "--load_in_4bit", "--bnb_4bit_quant_storage", "float32"]
KINDS = {"full": [], "lora": LORA, "qlora": QLORA}
TRAINED_BY = {file: ["full", "lora", "qlora"] for file in ("ddp.yaml", "zero2.yaml", "zero3.yaml")}
TRAINED_BY |= {"fsdp2.yaml": ["full", "lora"], "fsdp2_qlora.yaml": ["qlora"]}
ENGINES = {file: file.removesuffix(".yaml").removesuffix("_qlora") for file in TRAINED_BY}
NIGHTLY = pytest.mark.nightly
CELLS = [
    pytest.param(file, kind, marks=[] if kind == "full" and file != "zero2.yaml" else NIGHTLY, id=f"{file}-{kind}")
    for file, kinds in TRAINED_BY.items()
    for kind in kinds
]
"""One of each engine by day; the others are for the night."""
Launches = Callable[[str], Path]
CASES: dict[str, dict[str, Any]] = {
    "trl": {},
    "hooks": {"loss_aggregation": "token_mean", "hooks": ["leave_one_out", "entropy_shaping"]},
    "prompts": {"loss_aggregation": "prompt_mean", "gradient_accumulation_steps": 2, "steps_per_generation": 2},
    "compact": {"loss_aggregation": "seq_mean_token_mean", "compact_updates": "exact"},
    "shared": {
        "loss_aggregation": {"name": "length_power", "alpha": 0.5},
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
        "compact_updates": "exact",
        "share_prompts": True,
    },
}
"""Settings of `tests.support.train`; their updates differ from each other."""
GRADIENTS = Path(__file__).with_name("gradients.py")


def arguments(name: str, kind: str) -> list[str]:
    places = {"output_dir": f"{{folder}}/{name}", "model_name_or_path": "{folder}/../tiny"}
    return ["--embedded", *options(**places, **SIZES), *KINDS[kind]]


def runs_of(file: str, kinds: Iterable[str]) -> list[Run]:
    runs = []
    for kind in kinds:
        claims = ["--engine", ENGINES[file], "--processes", "2"]
        resume = ["--resume_from_checkpoint", f"{{folder}}/{kind}/checkpoint-2"]
        runs.append(Run(kind, [*arguments(kind, kind), *claims]))
        runs.append(Run(f"{kind}_resumed", [*arguments(f"{kind}_resumed", kind), *claims, *resume]))
    if file != "fsdp2_qlora.yaml":
        words = ["{folder}/../cases.json", "{folder}/../tiny", "{folder}/gradients", "8"]
        runs.append(Run("gradients", words, GRADIENTS))
    if file == "zero3.yaml":
        runs.append(Run("persistent", arguments("persistent", "full"), trap=True))
    if file == "fsdp2_qlora.yaml":
        runs.append(Run("replicated", [*arguments("replicated", "qlora")[:-1], "uint8"]))
    return runs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    save_tiny_model(folder / "tiny")
    (folder / "cases.json").write_text(json.dumps(CASES))
    return folder


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest, place: Path) -> Launches:
    """The folder of a launch file's runs: of the cells that this session's tests are about."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    chosen = [item.callspec.params for item in items if hasattr(item, "callspec")]
    asked = {(one.get("file"), one.get("kind")) for one in chosen}

    @cache
    def launched(file: str) -> Path:
        folder = place / file.removesuffix(".yaml")
        folder.mkdir()
        of_others = {kind for _, kind in asked} if file == "ddp.yaml" else set()  # what the others are compared with
        kinds = [kind for kind in TRAINED_BY[file] if (file, kind) in asked or kind in of_others]
        launch(file, runs_of(file, kinds), folder)
        return folder

    return launched


@pytest.fixture(scope="module")
def one_process(place: Path) -> Path:
    """The same updates in one process, whose micro-batch is the two ranks' together."""
    for name, case in CASES.items():
        reference = {k: v for k, v in case.items() if not k.startswith(("compact", "share"))}
        run_case(place / "tiny", place / "one_process" / name, 16, reference)
    return place / "one_process"


@pytest.mark.parametrize(("file", "kind"), CELLS)
class TestCell:
    def test_the_engine_is_the_one_that_the_file_asks_for(self, launches: Launches, file: str, kind: str) -> None:
        folder = launches(file)
        finished(folder, kind)
        facts = metrics(folder, kind)["run"]
        zero = {"zero2": ("DeepSpeedEngine", 2), "zero3": ("DeepSpeedEngine", 3)}
        others = {"ddp": ("DistributedDataParallel", None), "fsdp2": ("FSDPModule", None)}
        wrapper, stage = {**zero, **others}[ENGINES[file]]
        for rank in (0, 1):
            seen = probe(folder, kind, rank)
            assert (seen["world"], seen["rank"], seen["backend"]) == (2, rank, "gloo")
            assert wrapper in seen["classes"]
            assert seen["stage"] == stage
            assert facts["wrapper"] in seen["classes"]
        assert (facts["engine"], facts["processes"], facts["backend"]) == (ENGINES[file], 2, "gloo")

        # What is trained and quantised is what was asked for.
        adapters = [name for name in seen["trained"] if "lora_" in name]
        assert (len(adapters) == len(seen["trained"])) == (kind != "full")
        assert len(adapters) == (0 if kind == "full" else 2 * 7 * 2)  # A and B of seven projections in two layers
        assert len(seen["linear4bit"]) == facts["quantised_layers"] == (14 if kind == "qlora" else 0)
        assert facts["bits"] == (4 if kind == "qlora" else 0)
        assert facts["dtype"] == "float32"

    def test_engines_divide_parameters_and_optimizer(self, launches: Launches, file: str, kind: str) -> None:
        folder = launches(file)
        facts = metrics(folder, kind)["run"]
        seen = [probe(folder, kind, rank)["shapes"] for rank in (0, 1)]
        trained = probe(folder, kind, 0)["trained"]
        assert seen[0].keys() == seen[1].keys()
        for name, whole in ((n, math.prod(s["whole"])) for n, s in seen[0].items()):
            here = [shapes[name]["elements"] for shapes in seen]
            if ENGINES[file] in ("ddp", "zero2"):
                assert here == [whole, whole], name
            elif ENGINES[file] == "zero3":
                assert [s[name]["here"] for s in seen] == [[0], [0]], name
                assert here == [math.ceil(whole / 2)] * 2, name  # padded to even parts
            else:
                assert sum(here) == whole, name
                assert max(here) < whole, name
        moments = [probe(folder, kind, rank)["optimizer_elements"] for rank in (0, 1)]
        elements = sum(math.prod(seen[0][name]["whole"]) for name in trained)
        if ENGINES[file] == "ddp":
            assert moments == [elements, elements]
        else:
            assert elements <= sum(moments) <= elements * 1.02  # DeepSpeed pads
            assert max(moments) < 0.6 * elements
        assert facts["trained"] == elements
        assert facts["parameters_here"] == sum(shapes["elements"] for shapes in seen[0].values())

    def test_engines_resume_exactly(self, launches: Launches, file: str, kind: str) -> None:
        folder = launches(file)
        finished(folder, f"{kind}_resumed")
        whole, resumed = metrics(folder, kind), metrics(folder, f"{kind}_resumed")
        assert probe(folder, f"{kind}_resumed", 0)["shapes"] == probe(folder, kind, 0)["shapes"]
        timings = ("time", "seconds", "per_second", "flos", "num_tokens")

        def steps(run: dict[str, Any]) -> list[dict[str, Any]]:
            logs = [log for log in run["history"] if "reward" in log]
            return [{k: v for k, v in log.items() if not k.endswith(timings) and "time/" not in k} for log in logs]

        assert [log["step"] for log in steps(whole)] == [1, 2, 3]
        assert steps(resumed) == steps(whole)
        assert resumed["before"] == whole["before"]
        assert resumed["after"] == whole["after"]
        assert relative_gap(weights(folder / f"{kind}_resumed"), weights(folder / kind)) == 0.0

    def test_engines_give_ddps_weights(self, launches: Launches, place: Path, file: str, kind: str) -> None:
        folder = launches(file) / kind
        # bfloat16 rounds on each processor in its own way, and at the third step may sample another token for it.
        when = "checkpoint-2" if kind == "qlora" else "."
        moved, expected = weights(folder / when), weights(launches("ddp.yaml") / kind / when)
        if kind == "full":
            start = weights(place / "tiny")
            moved, expected = ({name: w[name] - start[name] for name in w} for w in (moved, expected))
        # Where `lora_B` is still 0 `lora_A` has no gradient, and Adam makes the rounding of the first ones large:
        # 8e-5 of it for 1e-6 of `lora_B`, on processors with bfloat16. A step moves the weights by 9e-2.
        first = {name for name in moved if kind == "qlora" and "lora_A" in name}
        for names, bound in ((moved.keys() - first, 1e-5), (first, 5e-4)):
            assert relative_gap({n: moved[n] for n in names}, {n: expected[n] for n in names}) < bound


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("file", ["ddp.yaml", pytest.param("zero2.yaml", marks=NIGHTLY), "zero3.yaml", "fsdp2.yaml"])
def test_gradients_are_those_of_one_process(
    launches: Launches, one_process: Path, place: Path, file: str, case: str
) -> None:
    folder = launches(file)
    finished(folder, "gradients")
    start = weights(place / "tiny")

    def moved(where: Path) -> dict[str, torch.Tensor]:
        return {name: tensor - start[name] for name, tensor in weights(where).items()}

    theirs = moved(one_process / case)
    assert relative_gap(moved(folder / "gradients" / case), theirs) < 2e-5  # of the change of two steps, in float32
    assert all(relative_gap(moved(one_process / other), theirs) > 1e-2 for other in CASES if other != case)


@pytest.mark.parametrize(
    ("file", "run"), [("zero3.yaml", "persistent"), pytest.param("fsdp2_qlora.yaml", "replicated", marks=NIGHTLY)]
)
def test_an_engine_that_would_divide_nothing_stops(launches: Launches, file: str, run: str) -> None:
    folder = launches(file)
    assert read(folder / f"{run}.status0.json") == 2
    assert f"{ENGINES[file]} was to shard the parameters over 2 processes" in said(folder, run)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    adapter = folder / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else folder / "model.safetensors")
