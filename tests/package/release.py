"""Build what a tag would publish, try it outside the clone, and show it; nothing is published.

    python -m tests.package.release

The wheel is built from the source archive, so the archive is complete. It is installed into an environment of its own.
That one sees the packages of the interpreter that runs this, without its editable installs; with `--download` it is
empty, and pip fetches every dependency. With `--tag`, what stands in the way of a release is an error.

Only hatchling is needed, and git.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PLACEHOLDER = "OWNER"
"""Stands in pyproject.toml's address of the repository until there is one."""


def run(*words: str | Path, folder: Path = ROOT) -> str:
    """What a command printed; its output is the error if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(out: Path) -> tuple[Path, Path]:
    """The source archive and the wheel made from it, as the only files of `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("*.whl"), *out.glob("*.tar.gz")]:
        old.unlink()
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out)
    (archive,) = out.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        (source,) = Path(scratch).iterdir()
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, folder=source)
    (wheel,) = out.glob("*.whl")
    return archive, wheel


def files_of(archive: Path) -> set[str]:
    """The files of a source archive, without its top folder."""
    with tarfile.open(archive) as packed:
        return {member.name.partition("/")[2] for member in packed.getmembers() if member.isfile()}


def tracked(*options: str) -> set[str]:
    """The files that git knows and that are there; `options` are those of `git ls-files`."""
    names = run("git", "ls-files", "-z", *options).split("\0")
    return {name for name in names if name and (ROOT / name).is_file()}


def metadata(wheel: Path) -> Message:
    """What an index shows of the wheel and pip resolves from."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(packed.read(name))


def extras(wheel: Path) -> dict[str, list[Requirement]]:
    """By extra, what it asks for; it ends if one names another extra that the wheel does not have."""
    about = metadata(wheel)
    names = about.get_all("Provides-Extra") or []
    wanted = [Requirement(line) for line in about.get_all("Requires-Dist") or []]
    by_extra = {name: [one for one in wanted if f'extra == "{name}"' in str(one.marker)] for name in names}
    for name, asked in by_extra.items():
        unknown = {extra for one in asked if one.name == about["Name"] for extra in one.extras} - set(names)
        if unknown or not asked:
            raise SystemExit(f"The extra {name!r} asks for nothing, or for unknown extras of ours: {sorted(unknown)}.")
    return by_extra


def environment(folder: Path, download: bool) -> Path:
    """A new environment's interpreter."""
    venv.EnvBuilder(with_pip=download, symlinks=True).create(folder)
    if not download:
        # Bare paths: an editable install of this clone needs its own .pth file to be read, and it is not.
        (place,) = (folder / "lib").glob("python*/site-packages")
        parents = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (place / "parent.pth").write_text("".join(f"{path}\n" for path in parents), encoding="utf-8")
    return folder / "bin" / "python"


def try_out(wheel: Path, download: bool) -> None:
    """Install the wheel outside the clone, and use it there."""
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        python = environment(here / "venv", download)
        pip = [python, "-m", "pip", "install", "--quiet", *([] if download else ["--no-index"])]
        run(*pip, wheel, folder=here)
        run(*pip, "--dry-run", f"{wheel}[dev]", folder=here)
        print(run(python, "-m", "pip", "check", folder=here).strip())
        smoke = Path(__file__).with_name("smoke.py")
        printed = run(python, smoke, ROOT / "recipes" / "embedded" / "model", ROOT, folder=here)
        print("\n".join(line for line in printed.splitlines() if line.startswith(("list:", "check:", "train:"))))


def obstacles(version: str, archive: Path, tag: str | None) -> list[str]:
    """What stands between this tree and a release, one sentence each."""
    found = []
    if tag is not None and tag != f"v{version}":
        found.append(f"The tag is {tag}, and the version {version}.")
    if stray := sorted(files_of(archive) - tracked() - {"PKG-INFO"}):
        found.append(f"The source archive has files that git does not know: {', '.join(stray)}.")
    if run("git", "status", "--porcelain", "--untracked-files=no"):
        found.append("There are changes that are not committed.")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(version)}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None or "Not released yet" in section[1]:
        found.append(f"CHANGELOG.md has no section '## {version}' without the words 'Not released yet'.")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    if any(PLACEHOLDER in address for address in urls.values()):
        found.append(f"pyproject.toml's [project.urls] has {PLACEHOLDER} in place of the repository's owner.")
    return found


def main() -> None:
    """Build, try, show."""
    options = argparse.ArgumentParser(prog="python -m tests.package.release", description=__doc__)
    options.add_argument("--out", type=Path, default=ROOT / "dist", help="where the files go")
    options.add_argument("--download", action="store_true", help="try the wheel in an empty environment")
    options.add_argument("--tag", help="fail unless this tag could be published")
    given = options.parse_args()
    archive, wheel = build(given.out)
    about = metadata(wheel)
    version = about["Version"]
    of_extras = extras(wheel)
    try_out(wheel, given.download)

    print(f"\nThe tag v{version} would publish {about['Name']} {version}, for Python {about['Requires-Python']}:")
    for file in (archive, wheel):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        print(f"  {file.name}  {file.stat().st_size / 1e6:.1f} MB  sha256 {digest}")
    print(f"  extras: {', '.join(sorted(of_extras))}")
    in_the_way = obstacles(version, archive, given.tag)
    for sentence in in_the_way:
        print(f"In the way of a release: {sentence}")
    print("Nothing was published.")
    if given.tag and in_the_way:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
