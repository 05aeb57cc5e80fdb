"""The package as it would be published, and the files around it that a forge reads."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import trl_grpo_ext
from docs.site import directory
from tests.package import release
from trl_grpo_ext.trainer.upstream import contract

ROOT = release.ROOT
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(name: str) -> dict[str, Any]:
    """A workflow's jobs. YAML reads the key `on` as true, so the jobs are all that is asked for here."""
    jobs: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))["jobs"]
    return jobs


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
def test_wheel_has_the_packages_version_address_and_extras(built: tuple[Path, Path]) -> None:
    about = release.metadata(built[1])
    assert about["Version"] == trl_grpo_ext.__version__
    assert about["Requires-Python"] == PROJECT["requires-python"]
    found = release.extras(built[1])
    assert set(found) == {name.replace("_", "-") for name in PROJECT["optional-dependencies"]}
    (vllm,) = found["vllm"]
    assert vllm.name == "trl"
    assert vllm.extras == {"vllm"}


def test_version_stands_in_one_place() -> None:
    assert PROJECT["dynamic"] == ["version"]
    said = [
        name
        for name in ("pyproject.toml", "CITATION.cff", "Makefile", "trl_grpo_ext/__init__.py")
        if re.search(rf"version_*\W+{re.escape(trl_grpo_ext.__version__)}\b", (ROOT / name).read_text(encoding="utf-8"))
    ]
    assert said == ["trl_grpo_ext/__init__.py"]


def test_address_of_the_repository_stands_in_one_place() -> None:
    (address,) = PROJECT["urls"].values()
    suffixes = {".md", ".toml", ".yml", ".yaml", ".cff", ".jinja"}
    files = [file for top in (".github", "docs", "trl_grpo_ext") for file in (ROOT / top).rglob("*")]
    found = [
        file.name
        for file in [*files, *ROOT.iterdir()]
        if file.suffix in suffixes and address in file.read_text("utf-8")
    ]
    assert found == ["pyproject.toml"]


def test_pythons_of_ci_begin_where_the_range_does() -> None:
    jobs = workflow("ci.yml")
    pythons = jobs["quick"]["strategy"]["matrix"]["python"]
    assert pythons == jobs["package"]["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    minors = [int(one.removeprefix("3.")) for one in pythons]
    assert minors == list(range(minors[0], minors[-1] + 1))
    classified = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert classified <= set(pythons)


def test_ends_of_ci_are_the_ends_of_the_ranges() -> None:
    ranges = {one.name: one.specifier for one in map(Requirement, PROJECT["dependencies"])}
    cells = {
        cell["end"]: cell["packages"].split() for cell in workflow("ci.yml")["ends"]["strategy"]["matrix"]["include"]
    }
    for name in ("trl", "transformers"):
        bounds = {one.operator: one.version for one in ranges[name]}
        assert f"{name}=={bounds['>=']}.0" in cells["oldest"]
        assert f"{name}<{bounds['<']}" in cells["newest"]
    assert f"trl=={contract.OLDEST_TESTED}.0" in cells["oldest"]


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
        assert {needed} <= set(jobs) if isinstance(needed, str) else set(needed) <= set(jobs)
        assert job["timeout-minutes"] if any("run" in step for step in job["steps"]) else True


def test_release_publishes_what_was_tested_and_holds_no_password() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    publish = workflow("release.yml")["publish"]
    assert set(publish["needs"]) == {"build", "test", "directory"}
    assert publish["permissions"] == {"id-token": "write", "attestations": "write"}
    assert "secrets." not in text
    assert not commands({"publish": publish}), "the job that may publish runs no code of ours"


def test_pre_commit_runs_what_make_lint_runs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^lint: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    linted = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert local["repo"] == "local"
    assert [hook["entry"] for hook in local["hooks"]] == linted


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


@pytest.mark.parametrize(
    "text",
    [
        entry(about="<script>alert(1)</script>"),
        entry(about="a | b"),
        entry(about="two\nlines"),
        entry(source="--index-url=http://example.org x"),
        entry(name="../x"),
        entry(homepage="x"),
        entry() + entry(),
    ],
)
def test_directory_refuses_what_would_not_be_a_row(text: str) -> None:
    with pytest.raises(ValueError, match="got"):
        directory.entries(text)


def test_directory_says_which_rules_are_broken_and_what_got_worse() -> None:
    kept = {"subject": "a", "ok": True, "violations": []}
    broken = {"subject": "b", "ok": False, "violations": [{"rule": "reward.pickle"}, {"rule": "reward.formats"}]}
    unloadable = {"subject": "c", "ok": False, "error": "no module"}
    assert directory.verdict([kept]) == directory.PASSED
    assert directory.verdict([kept, broken, unloadable]) == "b: reward.pickle, reward.formats; c: cannot be loaded"
    assert directory.verdict([]) == "offers no plugin"
    passed = {"verdict": directory.PASSED, "trl_grpo_ext": "0.1.0"}
    failed = {"verdict": "cannot be installed", "trl_grpo_ext": "0.2.0"}
    before = {"x": passed, "y": failed}
    now = {"x": failed, "y": failed, "z": failed}
    assert directory.worse(before, now) == ["x passed with trl-grpo-ext 0.1.0; now: cannot be installed."]
