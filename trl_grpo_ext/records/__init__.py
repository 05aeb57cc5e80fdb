"""What a run leaves on disk: token records, the manifest of its plugins, its log."""
