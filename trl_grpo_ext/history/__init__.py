"""Looking back at runs: the report page and the replay of saved completions."""
