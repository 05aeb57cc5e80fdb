"""The package as it would be published, and the files around it that a forge reads."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import trl_grpo_ext
from docs.site import directory
from tests.package import release

ROOT = release.ROOT
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(name: str) -> dict[str, Any]:
    """A workflow's jobs. YAML reads the key `on` as true, so the jobs are all that is asked for here."""
    return dict(yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))["jobs"])


def commands(jobs: dict[str, Any]) -> list[str]:
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return release.build(tmp_path_factory.mktemp("dist"))


@pytest.mark.slow
def test_sdist_is_the_repository_and_nothing_else(built: tuple[Path, Path]) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone, so nobody knows which files are meant to be there")
    meant = release.tracked("--cached", "--others", "--exclude-standard")
    assert release.files_of(built[0]) == meant | {"PKG-INFO"}


@pytest.mark.slow
def test_wheel_has_the_packages_version_and_extras(built: tuple[Path, Path]) -> None:
    assert release.metadata(built[1])["Version"] == trl_grpo_ext.__version__
    found = release.extras(built[1])
    assert set(found) == {name.replace("_", "-") for name in PROJECT["optional-dependencies"]}
    assert [(one.name, one.extras) for one in found["vllm"]] == [("trl", {"vllm"})]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflow_names_targets_and_files_that_are_there(file: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    jobs = workflow(file.name)
    for text in commands(jobs):
        for target in re.findall(r"\bmake (\w+)", text):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        for path in re.findall(r"\btests/[\w/.]+", text):
            assert (ROOT / path).exists(), path
        for module in re.findall(r"-m ((?:tests|docs)[\w.]+)", text):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
        assert "${{ github.event" not in text, "what others may write reaches a shell"
    for job in jobs.values():
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= set(jobs)
        assert "timeout-minutes" in job or not any("run" in step for step in job["steps"])


def test_release_publishes_what_was_tested_and_holds_no_password() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    publish = workflow("release.yml")["publish"]
    assert set(publish["needs"]) == {"build", "test", "directory"}
    assert publish["permissions"] == {"id-token": "write", "attestations": "write"}
    assert "secrets." not in text
    assert not commands({"publish": publish}), "the job that may publish runs no code of ours"


def entry(**changes: str) -> str:
    values = {"name": "grpo-x", "source": "grpo-x==1.0", "by": "somebody", "about": "a reward"} | changes
    return "[[distribution]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def test_directory_page_is_what_its_files_say() -> None:
    listed = directory.entries(directory.ENTRIES.read_text(encoding="utf-8"))
    results = json.loads(directory.RESULTS.read_text(encoding="utf-8"))
    assert [one["name"] for one in listed] == list(results)
    page = directory.PAGE.read_text(encoding="utf-8")
    assert directory.renewed(page, listed, results) == page, "run: python -m docs.site.directory"
    examples = {place.parent.name for place in (ROOT / "docs" / "examples").glob("*/pyproject.toml")}
    assert examples <= set(results)
    assert all(result["verdict"] == directory.PASSED and result["plugins"] for result in results.values())


def test_directory_refuses_what_would_not_be_a_row() -> None:
    source = "--index-url=http://example.org x"
    for text in (entry(about="<script>alert(1)</script>"), entry(source=source), entry() + entry()):
        with pytest.raises(ValueError, match="got"):
            directory.entries(text)
