"""The reference in docs/api has every public name and method: each has a docstring, from which the pages are made."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("poseidon._core")

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    match[1]: page
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
    for match in re.finditer(r"^::: (poseidon(?:\.\w+)?)$", page.read_text(encoding="utf-8"), re.MULTILINE)
}
OF_TORCHS_SCALER = {"found_inf", "grad_scale"}  # which torch.amp.GradScaler sets and asks for


def documented(module: str) -> ModuleType:
    if module.endswith(".jax"):
        pytest.importorskip("jax")
    if module.endswith(".tensorflow"):
        pytest.importorskip("tensorflow")
    return importlib.import_module(module)


def test_each_public_package_has_a_page() -> None:
    assert set(PAGES) >= {"poseidon", "poseidon.torch", "poseidon.jax", "poseidon.tensorflow"}


@pytest.mark.parametrize("module", PAGES)
def test_all_names_are_public_by_all(module: str) -> None:
    """The reference shows what `__all__` names, so a name that users import must be there."""
    source = Path(inspect.getfile(documented(module))).read_text(encoding="utf-8")
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    public = {name for name in imported if not name.startswith("_")}
    missing = public - set(documented(module).__all__)
    assert not {name for name in missing if _is_ours(getattr(documented(module), name, None))}


@pytest.mark.parametrize("module", PAGES)
def test_each_name_and_method_has_its_text(module: str) -> None:
    package = documented(module)
    bare = []
    for name in package.__all__:
        value = getattr(package, name)
        if callable(value) and not inspect.getdoc(value):
            bare.append(name)
        if inspect.isclass(value):
            bare += [f"{name}.{method}" for method in _own_methods(value) if not _text_of(value, method)]
    assert not bare, f"without a docstring, so not in the reference: {bare}"


@pytest.mark.parametrize("module", PAGES)
def test_a_name_that_hides_its_own_module_has_an_entry(module: str) -> None:
    """mkdocstrings takes the name of a function that lies in a module of the same name for the module."""
    package = documented(module)
    folder = Path(inspect.getfile(package)).parent
    page = PAGES[module].read_text(encoding="utf-8")
    for name in package.__all__:
        if (folder / f"{name}.py").exists():
            assert f"::: {module}.{name}.{name}" in page


def _text_of(cls: type, method: str) -> str | None:
    return "as torch" if method in OF_TORCHS_SCALER else inspect.getdoc(getattr(cls, method))


def _own_methods(cls: type) -> list[str]:
    """The public methods and properties that Poseidon's classes add."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("poseidon.")]
    return sorted({name for base in ours for name in vars(base) if not name.startswith("_")})


def _is_ours(value: Any) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).startswith("poseidon")


def test_the_reference_shows_inherited_methods() -> None:
    """`plan()` is of a base class of DistributedDataParallel, which has no entry of its own."""
    options = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "inherited_members" in options
