"""What a release is made of agrees: versions, the Python versions of wheels, workflows, forms and CITATION.cff.

`make lint-release` compares the same files with their schemas, which needs packages. Nothing here does, except that
files are read whole by PyYAML.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
FORMS = sorted(set(GITHUB.glob("ISSUE_TEMPLATE/*.yml")) - {GITHUB / "ISSUE_TEMPLATE" / "config.yml"})


def text(place: str) -> str:
    return (ROOT / place).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(path: Path) -> Any:
    return pytest.importorskip("yaml").safe_load(path.read_text(encoding="utf-8"))


def test_every_place_names_one_version(release: ModuleType) -> None:
    versions = release.named_versions(ROOT)
    assert "CITATION.cff" in versions
    assert len(set(versions.values())) == 1, versions


def copy_of_places(release: ModuleType, root: Path) -> None:
    for place in [*release.PLACES, "CHANGELOG.md"]:
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text(text(place), encoding="utf-8")
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3\n\n- New.\n\n## 1.0.0\n\n- First.\n", encoding="utf-8")
    for place in release.PLACES:
        old = release.named_versions(root)[place]
        (root / place).write_text(text(place).replace(old, "1.2.3"), encoding="utf-8")


def test_a_release_is_refused_where_a_place_names_another_version(release: ModuleType, tmp_path: Path) -> None:
    copy_of_places(release, tmp_path)
    assert release.complaints(tmp_path, "v1.2.3") == []
    assert release.complaints(tmp_path, "1.2.3") == ["the tag 1.2.3 is not of the form vX.Y.Z"]
    assert len(release.complaints(tmp_path, "v1.2.4")) == len(release.PLACES) + 1  # and no section
    for place in release.PLACES:
        right = (tmp_path / place).read_text(encoding="utf-8")
        (tmp_path / place).write_text(right.replace("1.2.3", "1.2.2"), encoding="utf-8")
        assert release.complaints(tmp_path, "v1.2.3") == [f"{place} names 1.2.2, not 1.2.3"]
        (tmp_path / place).write_text(right, encoding="utf-8")


def test_notes_are_the_section_of_the_version(release: ModuleType, tmp_path: Path) -> None:
    copy_of_places(release, tmp_path)
    assert release.notes(tmp_path, "1.2.3") == "- New."
    assert release.notes(tmp_path, "1.0.0") == "- First."
    (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n\n- Later.\n\n## 1.2.3\n\n- New.\n", encoding="utf-8")
    assert len(release.complaints(tmp_path, "v1.2.3")) == 1


def test_wheels_are_built_for_the_versions_of_the_script() -> None:
    loop = re.search(r"for python in ((?:python3\.\d+ ?)+); do", text("tools/wheels.sh"))
    assert loop is not None
    workflow = text(".github/workflows/wheels.yml")
    installed = re.search(r"python-version: \|\n((?: +3\.\d+\n)+)", workflow)
    built = re.search(r"tools/wheels\.sh ((?:python3\.\d+ ?)+)\n", workflow)
    assert installed is not None
    assert built is not None
    assert loop[1].split() == built[1].split() == [f"python{version}" for version in installed[1].split()]
    oldest = re.search(r'requires-python = ">=(.*)"', text("pyproject.toml"))
    assert oldest is not None
    assert built[1].split()[0] == f"python{oldest[1]}"


def test_files_that_workflows_run_are_there() -> None:
    for workflow in WORKFLOWS:
        scripts = set(re.findall(r"(?:tools|\.ci)/[\w/]+(?:\.\w+)?", workflow.read_text(encoding="utf-8")))
        for script in scripts:
            assert (ROOT / script).is_file(), f"{workflow.name}: {script}"
            assert script.endswith((".py", ".txt")) or os.access(ROOT / script, os.X_OK), f"{workflow.name}: {script}"


def test_actions_are_named_by_commit() -> None:
    for workflow in WORKFLOWS:
        for used in re.findall(r"uses: (\S+.*)", workflow.read_text(encoding="utf-8")):
            assert used.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used), used


def test_workflows_have_no_rights_but_those_of_their_jobs() -> None:
    assert {workflow.name for workflow in WORKFLOWS} == {"ci.yml", "wheels.yml", "site.yml", "release.yml"}
    for workflow in WORKFLOWS:
        content = parsed(workflow)
        assert content["permissions"] == {}, workflow.name
        assert "concurrency" in content, workflow.name
        for name, job in content["jobs"].items():
            assert "permissions" in job, f"{workflow.name}: {name}"
            assert "uses" in job or job["timeout-minutes"] <= 150, f"{workflow.name}: {name}"


def test_forms_ask_for_what_finds_the_fault() -> None:
    for form in FORMS:
        content = parsed(form)
        assert {"name", "description", "body"} <= content.keys(), form.name
        ids = [part["id"] for part in content["body"] if part["type"] != "markdown"]
        assert len(ids) == len(set(ids)), form.name
    for name, asked in {
        "bug.yml": ["poseidon doctor", "poseidon version --json"],
        "wrong-or-slow.yml": ["poseidon doctor --before", "poseidon report", "poseidon version --json"],
    }.items():
        labels = " ".join(
            part["attributes"].get("label", "") for part in parsed(GITHUB / "ISSUE_TEMPLATE" / name)["body"]
        )
        for command in asked:
            assert command in labels, f"{name}: {command}"


def test_other_yaml_can_be_read() -> None:
    for path in [GITHUB / "dependabot.yml", GITHUB / "ISSUE_TEMPLATE" / "config.yml"]:
        assert isinstance(parsed(path), dict), path.name
    citation = parsed(ROOT / "CITATION.cff")
    assert len(citation["references"]) == 3
    assert str(citation["version"]) in text("pyproject.toml")
