"""Every causal language model of the installed transformers: its compact updates have plain TRL's gradient."""

import pytest

from tests.trainer.compact import architectures

LARGE = {"blt", "dots3_note", "dots3_note_text", "emu3", "git", "mllama", "phi4_multimodal"}
REFUSE_SIZES = {"cohere_compass_text", "dbrx", "falcon_h1", "gemma4_assistant", "musicgen", "musicgen_melody"}
REFUSE_SIZES |= {"nemotron", "qwen4_exp", "qwen4_exp_text", "zamba", "zamba2"}
NOT_IN_TRL = {"gemma3n", "gemma3n_text", "llama4", "llama4_text", "longcat_flash", "reformer", "xmod"}
CANNOT = LARGE | REFUSE_SIZES | NOT_IN_TRL
"""Cannot be built small, or plain TRL does not run them."""

CHOOSE_TOKENS = {"axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4"}
"""Their attention chooses tokens by rank."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in {"deepseek_v32", "deepseek_v4"} else pytest.mark.nightly)
        for name in architectures.NAMES
    ],
)
def test_compact_updates_of_an_architecture(name: str) -> None:
    outcome = architectures.tried(name)
    if name not in CANNOT:
        assert outcome.kind in {"packed and equal", "not packed, equal"}, outcome
        assert outcome.kind == "packed and equal" or outcome.said or not all(outcome.packed.values()), outcome
    if name in CHOOSE_TOKENS:
        assert not any(outcome.packed.values())
        assert any("by rank" in sentence for sentence in outcome.said), outcome
