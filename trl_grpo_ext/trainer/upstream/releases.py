"""What differs between the supported releases of TRL and transformers: each difference once, with the release."""

from typing import Any

from ...credit.turns import Parsing

try:  # TRL 1.16 gives every model a head that projects logits in tiles
    from trl.trainer.utils import add_fused_lm_head as add_fused_lm_head  # again, since others import it from here
except ImportError:
    add_fused_lm_head = None
try:  # TRL 1.16
    from trl.kernels import chunked_logprob as chunked_logprob
except ImportError:
    chunked_logprob = None


def end_ids_of(trainer: Any) -> list[int]:
    """The tokens that end a completion; before TRL 1.15 there is one."""
    found: list[int] = getattr(trainer, "eos_token_ids", [trainer._tokenizer.eos_token_id])
    return found


def parsing_of(tokenizer: Any) -> Parsing | None:
    """By what TRL parses the messages of a conversation; None without a template, or before transformers 5.13."""
    template = getattr(tokenizer, "response_template", None)
    if template is None:
        return None
    try:
        from transformers.utils.chat_parsing.content_parsers import process_field
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError:
        return None
    return Parsing(load_response_template(template), process_field)


LOGPS_ARGUMENTS = ("input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy")
"""The arguments after `model` of `_get_per_token_logps_and_entropies`; TRL 1.14 names fewer of them."""
