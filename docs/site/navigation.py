"""Which pages the site has, in which order, and which of them stand in the root of the repository."""

FROM_THE_ROOT = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""By file in the root of the repository, its page."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": ("start", "first_plugin", "concepts", "glossary"),
    "Guides": (
        *(
            "writing_plugins",
            "rewards",
            "parts",
            "pipelines",
            "agents",
            "recipes",
            "launching",
            "vllm",
            "doctor",
            "report",
            "compare",
        ),
        *("troubleshooting", "examples/README"),
    ),
    "Reference": (
        *(
            "catalogue/index",
            "plugins",
            "metrics",
            "command_line",
            "conformance",
            "manifest",
            "api",
        ),
        *("compatibility", "stability", "changelog", "contributing", "readme"),
    ),
    "Explanations": ("how_it_works", "parity", "study", "experiments", "gpu", "comparison"),
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
