"""The task of `json_fields_grpo.py`: fields out of a short text as JSON."""
