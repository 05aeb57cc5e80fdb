"""The hyper-parameters that a training leaves beside its manifest."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import length_reward, train
from trl_grpo_ext.errors import ManifestError
from trl_grpo_ext.records.settings import ALWAYS, FILE, NEVER, settings_of


@dataclass
class Arguments:
    learning_rate: float = 1e-6
    output_dir: str = "here"
    hub_token: str | None = None
    wandb_api_key: str = "sk-1"
    url: str = ""
    names: list[str] = field(default_factory=list)
    kwargs: Any = None
    flag: bool = False
    number: float = 0.0


def settings(**values: Any) -> dict[str, Any]:
    trainer = SimpleNamespace(args=Arguments(**values), model=None, accelerator=SimpleNamespace(num_processes=2))
    return settings_of(trainer)


def test_settings_differ_from_defaults() -> None:
    assert settings() == {"processes": 2, "learning_rate": 1e-6}
    assert settings(flag=True, number=1, names=["a"]) == settings() | {"flag": True, "number": 1, "names": ["a"]}
    assert settings(output_dir="elsewhere", kwargs={}, names=[]) == settings()


def test_secrets_are_left_out_wherever_they_stand() -> None:
    secret = "s3cret"
    found = settings(
        hub_token=secret,
        wandb_api_key=secret,
        url=f"https://me:{secret}@host:8000/v1",
        kwargs={"token": secret, "deep": [{"access_token": secret, "password": secret, "max_tokens": 7}], "at": "a@b"},
    )
    assert secret not in json.dumps(found)
    assert found["hub_token"] == "(not recorded)"
    assert found["kwargs"]["deep"][0]["max_tokens"] == 7


def test_everything_becomes_json() -> None:
    class Quantisation:
        def to_dict(self) -> dict[str, Any]:
            return {"bits": 4, "dtype": torch.bfloat16}

    found = settings(kwargs={"dtype": torch.float32, "quantisation": Quantisation(), "nan": float("nan"), 1: (2, 3)})
    assert found["kwargs"] == {
        "dtype": "torch.float32",
        "quantisation": {"bits": 4, "dtype": "torch.bfloat16"},
        "nan": "nan",
        "1": [2, 3],
    }
    assert json.loads(json.dumps(found)) == found


def test_a_training_writes_them_and_one_that_cannot_says_so(tiny_model: Path, tmp_path: Path) -> None:
    run = train(tiny_model, tmp_path / "run", max_steps=1, epsilon=0.1)
    written = json.loads((tmp_path / "run" / FILE).read_text())
    known = vars(run.trainer.args).keys()
    assert set(ALWAYS) <= known
    assert set(NEVER) - {"logging_dir", "local_rank"} <= known  # of other versions of transformers
    assert written == {"format": 1, "settings": settings_of(run.trainer)}
    assert written["settings"]["epsilon"] == 0.1
    assert written["settings"]["model"] == str(tiny_model)
    (tmp_path / "full" / FILE).mkdir(parents=True)
    with pytest.raises(ManifestError, match=FILE):
        train(tiny_model, tmp_path / "full", max_steps=1, reward_funcs=length_reward)
