"""Which pages the site has, in which order, and which of them stand in the root of the repository."""

FROM_THE_ROOT = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""By file in the root of the repository, its page."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Use it": (
        "start",
        "plugins",
        "rewards",
        "writing_plugins",
        "pipelines",
        "async",
        "recipes",
        "launching",
        "report",
    ),
    "Look it up": ("metrics", "troubleshooting", "reference", "catalogue/index", "examples/README"),
    "Understand it": ("how_it_works", "evidence", "comparison", "compatibility"),
    "Project": ("readme", "contributing", "changelog"),
}
"""By caption in the side bar, pages without their ending."""

PAGES = tuple(page for pages in SECTIONS.values() for page in pages)


def toctrees(there: set[str]) -> str:
    """The tables of contents that the front page ends with, of the pages that are there."""
    parts = []
    for caption, pages in SECTIONS.items():
        listed = "\n".join(page for page in pages if page in there)
        parts.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n")
    return "\n".join(parts)
