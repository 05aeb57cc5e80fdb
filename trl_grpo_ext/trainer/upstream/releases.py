"""What differs between the supported releases of TRL and transformers: each difference once, with the release."""

from typing import Any

from ...credit.turns import Parsing


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
