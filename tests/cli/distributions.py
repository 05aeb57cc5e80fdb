"""Distributions written straight to a folder for PYTHONPATH: faster than pip, and as broken as a test wants them."""

from collections.abc import Mapping
from pathlib import Path

GROUPS = {
    "reward": "trl_grpo_ext.rewards",
    "hook": "trl_grpo_ext.advantage_hooks",
    "aggregation": "trl_grpo_ext.loss_aggregations",
}
MARKED = 'from pathlib import Path\nPath(__file__).with_suffix(".imported").touch()\n'
"""What a module begins with so that it leaves a trace where it is imported."""


def write_distribution(
    folder: Path,
    name: str,
    entry_points: Mapping[str, Mapping[str, str]] | str | bytes,
    modules: Mapping[str, str | bytes] | None = None,
    version: str = "1.0",
) -> None:
    """Write it with entry points by "reward", "hook" or "aggregation", or by a group, or as the file's text."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\n" + "A readme.\n" * 50)
    if isinstance(entry_points, Mapping):
        sections = []
        for group, points in entry_points.items():
            sections += [f"[{GROUPS.get(group, group)}]", *(f"{name} = {value}" for name, value in points.items())]
        entry_points = "\n".join(sections)
    text = entry_points if isinstance(entry_points, bytes) else entry_points.encode()
    (info / "entry_points.txt").write_bytes(text)
    for path, source in (modules or {}).items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(source if isinstance(source, bytes) else source.encode())
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in modules or {}))


def imported(folder: Path) -> list[str]:
    """The modules with `MARKED` that something has imported."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*.imported"))
