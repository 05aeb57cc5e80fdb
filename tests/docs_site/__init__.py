"""The documentation: its code, its links, its figures, and the site that is made of it."""
