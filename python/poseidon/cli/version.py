"""`poseidon version`: what is installed."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from poseidon.cli.output import JsonFlag, print_json, print_table
from poseidon.version import VERSION

_PACKAGES = ("torch", "numpy")


def version(json: JsonFlag = False) -> None:
    """Print the versions of Poseidon and of what it works with."""
    versions = {"poseidon": VERSION}
    versions |= {package: _version_of(package) for package in _PACKAGES}
    versions |= {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    if json:
        print_json(versions)
    else:
        print_table(["part", "version"], list(versions.items()))


def _version_of(package: str) -> str:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return "not installed"
