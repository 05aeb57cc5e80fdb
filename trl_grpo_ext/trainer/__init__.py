"""The adapter to TRL's trainer; the only room that knows its private names."""
