"""Built-in prompt samplers."""
