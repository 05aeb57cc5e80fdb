"""What a run leaves behind on disk: token records, the manifest of its plugins, its log."""
