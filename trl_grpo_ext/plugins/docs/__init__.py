"""What a plugin says of itself, read from its metadata and its source text: nothing of it is imported."""
