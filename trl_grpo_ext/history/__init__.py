"""Looking back at runs: the report page, and selections compared on the same completions."""
