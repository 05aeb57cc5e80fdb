"""TRL's real worker process with our loop, against an HTTP server that stands for vLLM; and what may go wrong there."""

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM
from trl.experimental import async_grpo

from tests.asynchronous.support import SETTINGS, NoTransfer, letters, messages, tokenizer_of, train, without_cuda
from tests.cli.terminal import invoke
from tests.test_docs import ROOT, blocks
from trl_grpo_ext import load_rewards
from trl_grpo_ext.asynchronous import trainer as ours

pytest.importorskip("aiohttp", reason="TRL's rollout worker needs aiohttp")
pytestmark = pytest.mark.slow


class Server:
    """`/health` and `/v1/completions`: a completion per request, from the weights that were sent last."""

    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa").eval()
        self.lock = threading.Lock()
        self.requests = 0
        self.last = 10**9
        self.answers: list[list[int]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: Any) -> None: ...

            def answer(self, said: Any) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(said).encode())

            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    self.answer({"choices": [server.sample(asked)]})

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @torch.no_grad()
    def sample(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What the model says, or one of `answers`."""
        self.requests += 1
        if self.requests == self.last:
            threading.Thread(target=self.close).start()
        generator, ids = torch.Generator().manual_seed(asked["seed"] % 2**63), asked["prompt"]
        said = self.answers[asked["seed"] % len(self.answers)] if self.answers else None
        out, logps = list[int](), list[float]()
        while len(out) < asked["max_tokens"] and out[-1:] != [1]:
            logp = self.model(input_ids=torch.tensor([ids + out])).logits[0, -1].log_softmax(-1)
            out.append(said[len(out)] if said else int(torch.multinomial(logp.exp(), 1, generator=generator)))
            logps.append(float(logp[out[-1]]))
        return {"token_ids": out, "logprobs": {"token_logprobs": logps}}

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class ToServer(NoTransfer):
    """Copies the weights into the server's model."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def send_weights(self, iterator: Any) -> None:
        named = dict(self.server.model.named_parameters())
        with self.server.lock, torch.no_grad():
            for name, value in iterator:
                named[name].copy_(value)
        self.sent += 1


@pytest.fixture
def server(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    without_cuda(monkeypatch)
    found = Server(tiny_model)
    yield found
    found.close()


def run(model: Path, folder: Path, server: Server, **settings: Any) -> Any:
    small = {"max_completion_length": 8, "learning_rate": 0.05, "max_inflight_tasks": 8, "vllm_server_timeout": 2.0}
    own = {"worker_class": None, "weight_transfer": ToServer(server), "vllm_server_base_url": server.url}
    return train(model, folder, **{**small, **own, **settings})


class Here:
    """A reward that notes where it runs, and has nothing to say of every third prompt."""

    def __call__(self, completions: Any, answer: Any, log_extra: Any, log_metric: Any, **columns: Any) -> list[float]:
        log_extra("Here_outcome", ["scored"] * len(completions))
        log_metric("process", os.getpid())
        return letters(completions) if answer[0] % 3 else [0.0] * len(completions)


def test_a_training(tiny_model: Path, tmp_path: Path, server: Server) -> None:
    rewards = load_rewards([{"name": "regex_match", "pattern": "^", "weight": 0.25, "guard": {"timeout": 20}}])
    given = {
        "rewards": [{"name": f"{__name__}:Here"}],
        "advantage_hooks": [{"name": "prefix_tree", "mode": "add"}, "entropy_shaping"],
        "loss_aggregation": "seq_mean_token_mean",
        "group_filter": "signal",
        "token_records": 8,
    }
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3, "learning_rate": 0.02}
    found = run(tiny_model, tmp_path, server, reward_funcs=rewards, given=given, **settings)
    logs = [log for log in found.logs if "loss" in log]
    assert len(logs) == 3
    assert found.trainer.weight_transfer.sent == 4  # before the first step, and after each
    assert {log["process"] for log in logs}.isdisjoint({float(os.getpid())})
    means = [0.25 * log["rewards/regex_match"] + log["rewards/Here"] for log in logs]
    assert [log["reward"] for log in logs] == pytest.approx(means)
    assert all(abs(log["kl"]) < 0.2 for log in logs)  # the server has the weights
    # Dropped groups are done with, so a resumed run goes on behind them.
    trained = found.trainer._trained_groups
    dropped = sum(log.get("groups/dropped/equal_rewards_total", 0) for log in logs)
    assert dropped > 0
    assert sum(log["batch/groups_per_step"] for log in logs) == len(trained) - dropped
    folder = tmp_path / "checkpoint-3"
    state = json.loads((folder / "rollout_state.json").read_text())
    assert trained >= {*range(state["prompt_index"])}
    assert state["prompt_index"] > dropped
    manifest = json.loads((folder / "trl_grpo_ext_plugins.json").read_text())
    names = [(record["name"], record["weight"]) for record in manifest["plugins"] if record["kind"] == "reward"]
    assert names == [("regex_match", 0.25), ("Here", 1.0)]
    rows = pyarrow.parquet.read_table(tmp_path / "token_records" / "step_00003.parquet").to_pylist()
    assert len(rows) >= 8
    for row in rows:
        assert row["stages"] == ["trl", "prefix_tree", "entropy_shaping"]
        assert dict(row["outcomes"]) == {"Here": "scored", "regex_match": "scored"}
        assert row["advantage"] == pytest.approx(row["advantages"][-1])
        assert sum(row["weight"]) == pytest.approx(1 / 16)
        assert max(row["logp"]) <= 0.0 < min(row["entropy"])
        assert row["parts"] == ["regex_match/match"]


def test_the_pages_example(tiny_model: Path, tmp_path: Path, server: Server, monkeypatch: Any) -> None:
    (code,) = blocks((ROOT / "docs" / "async.md").read_text(encoding="utf-8"), "python")
    assert 'model="Qwen/Qwen2.5-0.5B-Instruct"' in code
    code = code.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tiny_model))
    tokenizer = tokenizer_of(tiny_model)
    server.answers = [[*tokenizer.convert_tokens_to_ids([*text]), 1] for text in ("#### 4", "#### 5", "4 or 5.")]
    small = {**SETTINGS, "max_steps": 2, "logging_steps": 1, "vllm_server_base_url": server.url}
    monkeypatch.setattr(async_grpo, "AsyncGRPOConfig", functools.partial(async_grpo.AsyncGRPOConfig, **small))
    own = {"weight_transfer": ToServer(server), "processing_class": tokenizer}
    monkeypatch.setattr(ours, "AsyncGRPOExtTrainer", functools.partial(ours.AsyncGRPOExtTrainer, **own))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"dataset": messages(8).map(lambda row: {"answer": "#### 4"})}
    exec(code, names)
    logs = [log for log in names["trainer"].state.log_history if "loss" in log]
    assert len(logs) == 2
    assert 0.1 < logs[0]["rewards/gsm8k_accuracy"] < 0.7
    assert logs[0]["reward"] == pytest.approx(logs[0]["rewards/gsm8k_accuracy"] + 0.2 * logs[0]["rewards/think_format"])
    assert invoke("report", tmp_path / "out").status == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for hook in ("leave_one_out", "entropy_shaping"):
        assert all(log[f"advantage/{hook}/mass_moved"] > 0 for log in logs)
        assert hook in page


def kills(completions: list[Any], answer: list[int], **columns: Any) -> list[float]:
    if answer[0] == 4:
        time.sleep(3)  # the pipe is full by now, with half of a sample at its end
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(said[0]["content"]) % 2) for said in completions]


def fails(completions: list[Any], answer: list[int], **columns: Any) -> list[float]:
    return [1 / (len(said[0]["content"]) * (answer[0] != 2)) for said in completions]


def hangs(completions: list[Any], answer: list[int], **columns: Any) -> list[float]:
    while answer[0] == 2:
        time.sleep(1)
    return letters(completions)


def chain(error: BaseException | None) -> str:
    return "" if error is None else f"{error} {chain(error.__cause__ or error.__context__)}"


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (kills, "ended with exit code -9"),
        (fails, "The reward 'fails' raised ZeroDivisionError"),
        (hangs, "The reward hangs did not finish within 2 s"),
        (letters, "waiting for vLLM server"),
    ],
)
def test_what_goes_wrong_is_said(reward: Any, said: str, tiny_model: Path, tmp_path: Path, server: Server) -> None:
    data = messages(8).map(lambda row: {"text": "x" * 200_000})  # no sample fits the pipe
    if reward is letters:
        server.last = 20
    given = {"advantage_hooks": ["centred"], "reward_timeout": 2.0 if reward is hangs else None}
    with pytest.raises((RuntimeError, TimeoutError)) as raised:
        run(tiny_model, tmp_path, server, reward_funcs=reward, given=given, data=data, max_steps=100)
    assert said in chain(raised.value)
