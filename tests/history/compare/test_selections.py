"""What a selection that says nothing gets is TRL's."""

from trl_grpo_ext.history.compare.selections import load_selection


def test_load_selection_says_what_it_leaves_out() -> None:
    given = {"beta": 0.1, "entropy_coef": 0.0, "token_losses": ["squared_log_ratio"], "learning_rate": 1.0}
    loaded = load_selection("a", given)
    assert loaded.left_out == {"beta": 0.1, "token_losses": ["squared_log_ratio"]}
    assert loaded.settings["scale_rewards"] == "group"  # as in TRL
