"""The distributions of `docs/examples`: built, installed, used and taken away again."""
