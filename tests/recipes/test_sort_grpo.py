"""`recipes/sort_grpo.py` as a person starts it: it learns, what it leaves behind, and what it refuses."""

import itertools
import sys
from pathlib import Path

from common.errors import exit_with_message

import pytest
import sort_grpo
from sorting.rewards import sort_inclusion
from sorting.task import prompts, save_untrained_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipes.launching import RECIPES, trained

SCRIPT = RECIPES / "sort_grpo.py"


# -------------------------------------------------------------------------------------------------------- it learns


@pytest.mark.nightly
def test_recipe_learns_to_sort(tmp_path: Path) -> None:
    rows = prompts("held out", 128, numbers=3, largest=9, seed=42)
    numbers = [row["numbers"] for row in rows]

    def mean(answers: list[str]) -> float:
        scores = sort_inclusion(completions=answers, numbers=numbers, normalise=True)
        return sum(score for score in scores if score is not None) / len(rows)

    blind = max(mean([" ".join(map(str, a))] * 128) for a in itertools.combinations_with_replacement(range(10), 3))
    assert 0.5 < blind < 0.62
    run = trained(SCRIPT, tmp_path, "--max_steps", "200", "--num_iterations", "4")
    metrics = run.metrics
    assert metrics["before"]["sort_inclusion"] < 0.35
    assert metrics["before"]["exactly_sorted"] < 0.02
    assert metrics["after"]["sort_inclusion"] > blind + 0.1
    assert metrics["after"]["exactly_sorted"] > 0.15
    assert metrics["after"]["sort_distance"] > metrics["before"]["sort_distance"] + 0.2

    # The saved model, decoded greedily by other code than the recipe's.
    tokenizer = AutoTokenizer.from_pretrained(run.output)
    model = AutoModelForCausalLM.from_pretrained(run.output)
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**batch, do_sample=False, max_new_tokens=4)[:, batch["input_ids"].shape[1] :]
    assert mean(tokenizer.batch_decode(ids, skip_special_tokens=True)) > blind + 0.1


# -------------------------------------------------------------------------------------------------- what it refuses

WRONG = {
    "no such objective in YAML": (
        ["--config", "{folder}/a.yaml"],
        ("--objective", "clipped, unclipped, naive", "'ppo'"),
    ),
    "epsilon without clipping": (
        ["--objective", "unclipped", "--epsilon", "0.1"],
        ("unclipped", "leave --epsilon away"),
    ),
    "a model that cannot read the numbers": (
        ["--model_name_or_path", "{folder}/model", "--largest", "12"],
        ("tokenizer of", "does not know", "lower --largest"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_told_in_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, says = WRONG[name]
    (tmp_path / "a.yaml").write_text("objective: ppo\n")
    if any("{folder}/model" in word for word in words):
        save_untrained_model(tmp_path / "model", largest=9, seed=0)
    words = [word.replace("{folder}", str(tmp_path)) for word in words]
    monkeypatch.setattr(sys, "argv", ["sort_grpo.py", "--output_dir", str(tmp_path / "output"), *words])
    with pytest.raises(SystemExit) as stopped, exit_with_message():
        sort_grpo.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    for word in says:
        assert word in line
