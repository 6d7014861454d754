"""Checks that the repository is ready for a release, and takes the release's notes out of the CHANGELOG.

Usage: release.py check vX.Y.Z, before and after tagging: every place that names the version names this one, and the
CHANGELOG has a section for it. release.py notes vX.Y.Z prints that section.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# CMakeLists.txt reads the version from pyproject.toml.
PLACES = {
    "pyproject.toml": r'^version = "(.*)"$',
    "python/poseidon/version.py": r'^VERSION = "(.*)"$',
    "src/base/version.h": r'kVersionText = "(.*)"',
    "CITATION.cff": r"^version: (.*)$",
}


def named_versions(root: Path) -> dict[str, str]:
    """The version that each place names; "nothing" where it names none."""
    found = {place: re.search(pattern, _text(root, place), re.MULTILINE) for place, pattern in PLACES.items()}
    return {place: match[1] if match else "nothing" for place, match in found.items()}


def notes(root: Path, version: str) -> str:
    """The CHANGELOG's section of a version, without its heading; empty if there is none."""
    sections = re.split(r"^## (.*)\n", _text(root, "CHANGELOG.md"), flags=re.MULTILINE)[1:]
    return dict(zip(sections[::2], sections[1::2], strict=True)).get(version, "").strip()


def complaints(root: Path, tag: str) -> list[str]:
    """One sentence for everything that does not fit to the tag."""
    if not re.fullmatch(r"v\d+\.\d+\.\d+", tag):
        return [f"the tag {tag} is not of the form vX.Y.Z"]
    version = tag[1:]
    named = named_versions(root)
    found = [f"{place} names {named[place]}, not {version}" for place in named if named[place] != version]
    if not notes(root, version):
        found.append(f"CHANGELOG.md has no section {version}")
    if notes(root, "Unreleased"):
        found.append("CHANGELOG.md has a section Unreleased, which has to become the version's")
    return found


def _text(root: Path, place: str) -> str:
    return (root / place).read_text(encoding="utf-8")


def main(command: str, tag: str) -> int:
    """Runs one of the two commands; the exit status says whether the repository fits to the tag."""
    if command == "notes":
        print(notes(ROOT, tag.removeprefix("v")))
        return 0
    found = complaints(ROOT, tag)
    for complaint in found:
        print(complaint, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("check", "notes"):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
