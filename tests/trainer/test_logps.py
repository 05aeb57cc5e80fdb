"""What hooks need and TRL has not computed is computed once more; what cannot be had is refused at construction."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl.trainer.utils import add_fused_lm_head

from tests.support import Recorder, arguments, length_reward, prompts, save_tiny_model, scripted_rollout, train
from tests.trainer.support import Watch
from trl_grpo_ext import GRPOExtTrainer, Rollout
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.trainer.logps import LogpsForHooks, tiled_logps
from trl_grpo_ext.types import AggregationDeclaration


def rollout_of(hook: Watch, model: Path, folder: Path, **settings: Any) -> Rollout:
    train(model, folder, hooks=[hook], **{"max_steps": 1, **settings})
    return hook.rollouts[-1]


def slowly(model: Any, rollout: Rollout, temperature: float = 1.0, entropies: bool = False) -> list[list[float]]:
    """Log-probabilities of every live token, or entropies, one sequence without padding at a time."""
    result = []
    for row in range(len(rollout.texts)):
        prompt = rollout.prompt_ids_B_P[row][rollout.prompt_mask_B_P[row] > 0]
        completion = rollout.completion_ids_B_T[row][rollout.completion_mask_B_T[row] > 0]
        with torch.no_grad():
            logits = model(torch.cat([prompt, completion]).unsqueeze(0)).logits[0].double() / temperature
        logps = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        if entropies:
            result.append([float(-(at_place.exp() * at_place).sum()) for at_place in logps])
        else:
            result.append([float(at_place[token]) for at_place, token in zip(logps, completion, strict=True)])
    return result


def assert_equal_on_the_mask(logps_B_T: torch.Tensor | None, rows: list[list[float]], rollout: Rollout) -> None:
    assert logps_B_T is not None
    assert logps_B_T.shape == rollout.mask_B_T.shape
    expected = torch.tensor([logp for row in rows for logp in row], dtype=torch.float64)
    torch.testing.assert_close(logps_B_T[rollout.mask_B_T > 0].double(), expected, rtol=0, atol=2e-5)


def test_the_old_policys_where_trl_has_none(tiny_model: Path, tmp_path: Path) -> None:
    rollout = rollout_of(Watch("old_logps"), tiny_model, tmp_path, temperature=0.7)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert_equal_on_the_mask(rollout.old_logps_B_T, slowly(model, rollout, 0.7), rollout)
    seen: list[Rollout] = []
    declares = AggregationDeclaration(needs=("old_logps",))  # an aggregation's needs count as well
    weighs = SimpleNamespace(declares=declares, weights=lambda rollout: seen.append(rollout) or rollout.mask_B_T)
    given = {"loss_aggregation": weighs}
    train(tiny_model, tmp_path / "weighs", trainer_arguments=given, max_steps=1, temperature=0.7)
    assert_equal_on_the_mask(seen[0].old_logps_B_T, slowly(model, seen[0], 0.7), seen[0])


@pytest.fixture
def adapter() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)


@pytest.mark.slow
def test_reference_of_an_adapter(tiny_model: Path, tmp_path: Path, adapter: LoraConfig) -> None:
    hook = Watch("old_logps", "ref_logps")
    rollout = rollout_of(hook, tiny_model, tmp_path, peft_config=adapter, beta=0.0)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert_equal_on_the_mask(rollout.ref_logps_B_T, slowly(base, rollout), rollout)
    assert rollout.old_logps_B_T is not None
    assert rollout.ref_logps_B_T is not None
    assert float((rollout.old_logps_B_T - rollout.ref_logps_B_T).abs().max()) > 0.01  # the adapter does something


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 1e-9])
def test_reference_trained_further(tiny_model: Path, tmp_path: Path, adapter: LoraConfig, beta: float) -> None:
    hook, recorder = Watch("old_logps", "ref_logps"), Recorder()
    torch.manual_seed(3)  # the adapter's numbers are drawn
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), adapter)
    given: dict[str, Any] = {"train_dataset": prompts(4), "rollout_func": scripted_rollout, "callbacks": [recorder]}
    given["processing_class"] = AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    args = arguments(tmp_path, beta=beta)
    GRPOExtTrainer(adapted, length_reward, args, advantage_hooks=[hook], **given).train()
    first, second = hook.rollouts
    live = first.mask_B_T > 0
    assert first.old_logps_B_T is not None
    assert first.ref_logps_B_T is not None
    torch.testing.assert_close(first.old_logps_B_T[live], first.ref_logps_B_T[live])  # no penalty before any update
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with pytest.raises(AssertionError):  # which the bare model is not
        assert_equal_on_the_mask(first.ref_logps_B_T, slowly(base, first), first)
    assert second.old_logps_B_T is not None
    assert second.ref_logps_B_T is not None
    assert float((second.old_logps_B_T - second.ref_logps_B_T)[second.mask_B_T > 0].abs().max()) > 0.01
    assert not any(".ref." in name for name in recorder.gradients[0])  # it stays as it was


@pytest.mark.slow
def test_the_old_policys_entropies(tiny_model: Path, tmp_path: Path) -> None:
    hook = Watch("old_entropies")
    for number, settings in enumerate(({}, {"num_iterations": 2})):
        hook.seen.clear()
        rollout = rollout_of(hook, tiny_model, tmp_path / str(number), max_steps=1, **settings)
        assert rollout.old_entropies_B_T is not None
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        assert_equal_on_the_mask(rollout.old_entropies_B_T, slowly(model, rollout, entropies=True), rollout)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("teacher"), seed=7)


def test_a_teachers_log_probabilities(tiny_model: Path, tmp_path: Path, teacher: Path) -> None:
    hook = Watch(teachers=(str(teacher),))
    rollout = rollout_of(hook, tiny_model, tmp_path, temperature=0.7)
    assert rollout.old_logps_B_T is None  # which no hook has asked for
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    rows = slowly(model, rollout, 0.7)
    assert_equal_on_the_mask(rollout.teacher_logps_B_T[str(teacher)], rows, rollout)


@pytest.mark.slow
def test_a_teacher_after_another_prompt(tiny_model: Path, tmp_path: Path, teacher: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    other = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    hook = Watch(teachers=tuple(f"{name} given hint" for name in ("policy", "reference", str(teacher))))
    dataset = prompts().map(lambda row, number: {"hint": "b c " * (number % 3) + row["prompt"]}, with_indices=True)
    rollout_of(hook, tiny_model, tmp_path, train_dataset=dataset, beta=0.1, max_steps=2, learning_rate=0.1)
    for step, rollout in enumerate(hook.rollouts):
        hinted = tokenizer(rollout.columns["hint"], padding=True, padding_side="left", return_tensors="pt")
        assert hinted["input_ids"].shape != rollout.prompt_ids_B_P.shape
        after = replace(rollout, prompt_ids_B_P=hinted["input_ids"], prompt_mask_B_P=hinted["attention_mask"])
        found = {name.removesuffix(" given hint"): logps_B_T for name, logps_B_T in rollout.teacher_logps_B_T.items()}
        assert_equal_on_the_mask(found["reference"], slowly(policy, after), rollout)  # also after an update
        assert_equal_on_the_mask(found[str(teacher)], slowly(other, after), rollout)
        live = rollout.mask_B_T > 0
        moved = float((found["policy"] - found["reference"])[live].abs().max())
        assert moved > 0.01 if step else moved < 2e-5


@pytest.mark.slow
def test_a_column_of_prompts_that_a_row_lacks_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'self_distilled' .*'teacher_prompt'"):
        train(tiny_model, tmp_path, hooks=["self_distilled"], max_steps=1)


@pytest.mark.parametrize("absolute", [False, True])
def test_positions_do_not_count_the_padding(teacher: Path, absolute: bool) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 16, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "initializer_range": 0.5}
    model: Any = GPT2LMHeadModel(GPT2Config(**shape)).eval()
    if not absolute:
        model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    plain = model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0].detach()
    add_fused_lm_head(model)
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.long)
    padded_ids, padded_mask = torch.tensor([[0, 0, 5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        expected = plain.log_softmax(-1)[[1, 2], [7, 8]]
        for found in (tiled_logps(model, ids, mask, 2), tiled_logps(model, padded_ids, padded_mask, 2)):
            torch.testing.assert_close(found[0], expected)


def test_tiled_logps_read_each_prompt_once(teacher: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    add_fused_lm_head(model)
    ids = torch.tensor([[0, 5, 6, 7, 8, 0], [3, 4, 6, 8, 9, 5], [0, 5, 6, 9, 5, 7], [3, 4, 6, 7, 0, 0]])
    mask = (ids > 0).long()
    read: list[tuple[int, ...]] = []
    model.get_decoder().register_forward_hook(lambda *called: read.append((*called[-1][0].shape[:2],)))
    with torch.no_grad():
        expected, found = (tiled_logps(model, ids, mask, 3, shares) for shares in (False, True))
    assert read == [(4, 6), (2, 2), (4, 4)]
    live = mask[:, -3:] > 0
    torch.testing.assert_close(found[live], expected[live])


@pytest.mark.slow
def test_a_teacher_with_another_vocabulary_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    vocabulary = {**AutoTokenizer.from_pretrained(tiny_model).get_vocab(), "a": 4, "b": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="'Watch' has a different vocabulary: 2 "):
        train(tiny_model, tmp_path, hooks=[Watch(teachers=(str(tmp_path),))])


LACKING: dict[str, Any] = {
    "'kl_in_reward'.*beta": "kl_in_reward",
    "'teacher_log_ratio'.*beta": {"name": "teacher_log_ratio", "teacher": "reference"},
    "old_entropies": Watch("entropies"),
    "rollout_func": Watch("sampling_logps"),
    "'future_kl'.*num_iterations=": "future_kl",
}


@pytest.mark.parametrize("says", LACKING)
def test_what_is_not_there_is_said_at_construction(tiny_model: Path, tmp_path: Path, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        train(tiny_model, tmp_path, hooks=[LACKING[says]], scripted=False)


def test_a_loaded_teacher_sees_no_images() -> None:
    hooks = LogpsForHooks([], cast(Any, None), SimpleNamespace(pad_token_id=0))
    hooks._loaded["a/teacher"] = object()
    assert hooks.with_prompts({"prompt_ids": torch.ones(1, 2)}, []) == {}
    with pytest.raises(ConfigurationError, match="'a/teacher'"):
        hooks.with_prompts({"pixel_values": torch.ones(1, 3, 2, 2)}, [])
