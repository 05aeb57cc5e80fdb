"""Built-in token losses, by family."""
