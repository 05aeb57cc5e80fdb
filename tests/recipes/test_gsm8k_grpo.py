"""`recipes/gsm8k_grpo.py` as a person starts it: real processes, real files, and what they print and leave behind.

Every launch is listed in `launches`. Those that the selected tests need are started at the first use; a test names its
launch by parametrising the fixture `run`. Most of the time of a launch would be for importing PyTorch: nearly all are
forked off one process that has made the imports of the script.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl import ModelConfig

from tests.recipes.launches import FAILURES, LAUNCHES
from tests.recipes.launching import GSM8K, HAS_GSM8K, MODEL, RECIPES, Finished, start, start_forked
from tests.support import arguments
from trl_grpo_ext.rewards.gsm8k_accuracy import gsm8k_accuracy

pytestmark = pytest.mark.slow

WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
DAILY = (
    *("unknown key", "answer without reference", "not JSON", "unknown reward", "too few problems"),
    *("model neither here nor cached", "nothing to resume", "an adapter as the model", "made for another engine"),
)
"""Mistakes of each part that reads or checks; the others are tried at night."""


@pytest.fixture(scope="module")
def launches(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Finished]]:
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    asked = {item.callspec.params.get("run") for item in items if hasattr(item, "callspec")}
    asked |= {"default"} if any(str(name).startswith("resumed") for name in asked) else set()
    asked -= set() if HAS_GSM8K else {"gsm8k"}
    selected = {name: launch for name, launch in {**LAUNCHES, **FAILURES}.items() if name in asked}
    folders = {name: tmp_path_factory.mktemp(re.sub(r"\W+", "_", name)) for name in selected}
    futures: dict[str, Future[Finished]] = {}
    together: list[Future[dict[str, Finished]]] = []

    def finished(name: str) -> Finished:
        return together[0].result()[name] if selected[name].forked else futures[name].result()

    with ThreadPoolExecutor(2) as pool:
        forked = {name: launch for name, launch in selected.items() if launch.forked}
        for name, launch in selected.items():  # "default" is first: others wait for it
            if not launch.forked:
                futures[name] = pool.submit(start, launch, folders[name], finished)
            if forked and not together:
                together.append(pool.submit(start_forked, forked, {name: folders[name] for name in forked}, finished))
        yield finished
        for future in futures.values():
            future.cancel()


@pytest.fixture
def run(request: pytest.FixtureRequest, launches: Callable[[str], Finished]) -> Finished:
    finished = launches(request.param)
    if request.param in LAUNCHES:
        assert finished.status == 0, finished.err[-3000:]
    return finished


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("run", names, indirect=True)


# ------------------------------------------------------------------------------------------------------- what succeeds


@of("default")
def test_the_default_is_named_trained_saved_and_recorded(run: Finished) -> None:
    assert run.out.splitlines()[0] == "The embedded tiny model on generated word problems (no CUDA device is here)"
    assert "16 held-out problems, 4 sample(s) each" in run.out
    metrics = run.metrics
    row = next(line for line in run.out.splitlines() if "gsm8k_accuracy" in line and "│" in line)
    before, after = (metrics[when]["gsm8k_accuracy"] for when in ("before", "after"))
    assert [float(cell) for cell in row.split("│")[2:5]] == pytest.approx([before, after, after - before], abs=6e-4)
    noise = [line for line in run.err.splitlines() if not line.startswith("trl-grpo-ext: reward gsm8k_accuracy")]
    assert [line for line in noise if "mtime may not be reliable" not in line] == []
    assert (metrics["run"]["processes"], metrics["run"]["backend"]) == (1, None)
    assert [line["step"] for line in run.training] == [1, 2, 3, 4]
    for line in run.training:
        assert line["reward"] == pytest.approx(line["rewards/gsm8k_accuracy/mean"])
    saved = AutoModelForCausalLM.from_pretrained(run.output, local_files_only=True).state_dict()
    base = AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True).state_dict()
    assert saved.keys() == base.keys()
    assert any(not torch.equal(saved[name], base[name]) for name in base)
    assert (run.output / "reward_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.nightly
@of("overridden")
def test_the_command_line_beats_yaml(run: Finished) -> None:
    args = run.args
    assert args.rewards == ["gsm8k_accuracy", {"name": "think_format", "weight": 0.2}]
    assert args.advantage_hooks == [{"name": "entropy_shaping", "alpha": 0.3, "kappa": 3}]
    assert args.loss_aggregation == "seq_mean_token_mean"
    assert (args.learning_rate, args.max_steps) == (3e-4, 1)  # what the command line leaves alone is the YAML's
    (line,) = run.training
    assert {key for key in line if key.startswith("rewards/") and key.endswith("/mean")} == {
        "rewards/gsm8k_accuracy/mean",
        "rewards/think_format/mean",
    }
    total = line["rewards/gsm8k_accuracy/mean"] + 0.2 * line["rewards/think_format/mean"]
    assert line["reward"] == pytest.approx(total, abs=1e-6)


UNTIMED = ("reward", "reward_std", "loss", "grad_norm", "entropy", "completions/mean_length", "num_tokens")


@pytest.mark.nightly
@of("resumed")
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(run: Finished, launches: Callable[[str], Finished]) -> None:
    whole = launches("default")
    state = json.loads((run.output / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert [line["step"] for line in run.training] == [1, 2, 3, 4]
    for line, other in zip(run.training, whole.training, strict=True):
        for key in UNTIMED:
            assert line[key] == other[key], (line["step"], key)
    ours, theirs = (load_file(finished.output / "model.safetensors") for finished in (run, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert " 3/4 " in run.out
    assert " 2/4 " not in run.out


def check_adapter(run: Finished, modules: set[str]) -> None:
    assert not (run.output / "model.safetensors").exists()
    adapter = load_file(run.output / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in adapter} == modules
    assert all("lora_A" in name or "lora_B" in name for name in adapter)
    b = {name: tensor for name, tensor in adapter.items() if "lora_B" in name}
    assert all(tensor.abs().max() > 0 for tensor in b.values()), "lora_B starts at zero"
    # The base is frozen: what the optimizer knew are the adapter's tensors, no other.
    optimizer = torch.load(run.output / "checkpoint-1" / "optimizer.pt", weights_only=True)
    assert len(optimizer["state"]) == len(adapter)
    model = AutoModelForCausalLM.from_pretrained(run.output, local_files_only=True)  # the base with the adapter
    base = AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True)
    ids = torch.arange(10, 20)[None]
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, base(ids).logits)
        model.disable_adapters()
        torch.testing.assert_close(model(ids).logits, base(ids).logits)


@pytest.mark.nightly
@of("chat")
def test_a_chat_model_gets_conversations_and_accuracy_is_measured_where_it_is_not_trained_on(run: Finished) -> None:
    assert run.args.rewards == ["tag_format", "gsm8k_accuracy"]
    assert run.args.reward_weights == [2.0, 0.0]
    (line,) = run.training
    assert line["reward"] == pytest.approx(2.0 * line["rewards/tag_format/mean"])
    for row in run.completions():
        system, user = row["prompt"]
        assert system == {"role": "system", "content": "Do sums."}
        assert (user["role"], "Question:" in user["content"]) == ("user", False)


@pytest.mark.nightly
@of("qlora")
def test_4_bit_trains_and_saves_an_adapter(run: Finished) -> None:
    check_adapter(run, {"q_proj"})
    adapter = load_file(run.output / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}  # TRL casts to bfloat16
    assert run.err == ""  # PyTorch warns where the gradient stops at an operator without a backward pass
    assert run.args.model_init_kwargs["dtype"] == "bfloat16"


@pytest.mark.skipif(
    not HAS_GSM8K,
    reason="TRL_GRPO_EXT_GSM8K does not name a folder with GSM8K's train.jsonl",
)
@of("gsm8k")
@pytest.mark.nightly
def test_on_the_real_gsm8k_prompts_references_and_rewards_are_the_real_ones(run: Finished) -> None:
    rows = [json.loads(line) for line in Path(str(GSM8K), "train.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = {f"Question: {row['question']}\nAnswer:": row["answer"] for row in rows}
    assert "7457 training problems, 16 held out; 1 process(es)" in run.out
    logged = run.completions()
    assert {row["step"] for row in logged} >= {0, 1}
    assert len({row["prompt"] for row in logged}) >= 8
    recomputed = gsm8k_accuracy(
        prompts=[row["prompt"] for row in logged],
        completions=[row["completion"] for row in logged],
        answer=[answers[row["prompt"]] for row in logged],
    )
    assert [row["gsm8k_accuracy"] for row in logged] == recomputed


# --------------------------------------------------------------------------------------------------------- what fails


@pytest.mark.parametrize(
    "run",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name not in DAILY)) for name in FAILURES],
    indirect=True,
)
def test_a_mistake_is_told_in_one_sentence(run: Finished, request: pytest.FixtureRequest) -> None:
    launch = FAILURES[request.node.callspec.params["run"]]
    assert len(run.errors) == 1, run.err
    for words in launch.says:
        assert words in run.errors[0]
    if launch.launcher is None:
        assert run.status == 2
        assert run.err.splitlines() == run.errors
    else:  # the launcher has its own say, after ours
        assert run.status == 1
        assert "Traceback" not in run.err[: run.err.index(run.errors[0])]
    assert len(run.out.splitlines()) <= 1
    assert " on " in (run.out or " on ")
    assert not any(file.name in WEIGHTS for file in run.output.rglob("*"))


def test_a_history_without_a_first_evaluation_leaves_a_gap_and_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    from common.results import first_evaluation, held_out, print_table, save_curve

    first = {"step": 0, "eval_runtime": 1.0, "eval_rewards/a/mean": 0.25}
    later = [{"step": 3, "reward": 1.0, "rewards/a/mean": 0.5}, {"step": 3, "eval_runtime": 2.0}]
    assert first_evaluation([first, *later]) == first
    assert first_evaluation(later) == {}
    assert held_out(first_evaluation([first, *later])) == {"a": 0.25}
    assert held_out({**first, "eval_pass@8": 0.5, "eval_pass@4": None}) == {"a": 0.25, "pass@8": 0.5}
    print_table({}, {"a": 0.5}, "title")
    assert [cell.strip() for cell in capsys.readouterr().out.split("│")[1:5]] == ["a", "nan", "0.500", "+nan"]
    for before in ({}, {"a": 0.25}):
        assert save_curve(tmp_path, later, before, {"a": 0.5}, "a").stat().st_size > 1000


@pytest.mark.parametrize(
    ("device", "processes", "given", "places"),
    [
        ("cuda:0", 1, {}, {"": "cuda:0"}),
        ("cuda:0", 1, {"device_map": "auto"}, "auto"),  # as somebody says: `EngineCheck` has its say later
        ("cuda:0", 2, {}, None),  # TRL leaves it to the engine
        ("cpu", 1, {}, None),
    ],
)
def test_one_process_keeps_to_one_of_the_gpus_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, processes: int, given: dict[str, str], places: object
) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    from common.settings import check_setup

    args = arguments(tmp_path / "out", model_init_kwargs=given, num_generations=2)
    args.__dict__["_setup_devices"] = torch.device(device)  # what `args.device` is on such a machine
    args._n_gpu = 8
    state = SimpleNamespace(num_processes=processes, distributed_type="NO")
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    check_setup(args, ModelConfig("model"), state)  # type: ignore[arg-type]
    assert args.model_init_kwargs.get("device_map") == places
    assert args.n_gpu == (1 if (device, processes) == ("cuda:0", 1) else 8)  # above 1, TRL refuses


@pytest.mark.parametrize(
    ("cuda", "other", "embedded", "on_cpu"),
    [
        (False, False, False, True),
        (False, False, True, True),
        (False, True, True, True),  # chosen for lack of CUDA
        (False, True, False, False),
        (True, True, True, False),  # asked for
        (True, True, False, False),
    ],
)
def test_only_a_machine_without_gpu_and_the_default_made_for_it_are_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, other: bool, embedded: bool, on_cpu: bool
) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    from common.settings import machine_defaults

    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: other)
    assert machine_defaults(embedded) == ({"use_cpu": True, "bf16": False} if on_cpu else {})


def test_an_evaluation_has_whole_batches_so_that_every_problem_counts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    from common.problems import whole_batches

    rows = [{"question": str(number), "answer": "1"} for number in range(10)]
    assert whole_batches(rows, rows, train_batch=10, eval_batch=4) == rows[:8]
    assert whole_batches(rows, rows, train_batch=1, eval_batch=5) == rows
    assert whole_batches(rows, rows[:3], train_batch=1, eval_batch=4) == rows[:3]
