"""The kinds of plugin, by any form of their names."""

import pytest

from trl_grpo_ext.plugins.kinds import kind_of


@pytest.mark.parametrize("word", ["token-losses", "Hook", "prompt_sampler"])
def test_a_kind_is_known_by_any_form_of_its_name(word: str) -> None:
    assert kind_of(word) in ("token_loss", "advantage_hook", "prompt_sampler")
