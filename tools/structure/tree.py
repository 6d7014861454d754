"""The files of a checkout, as the checks see them."""

from __future__ import annotations

import ast
import subprocess
from functools import cached_property
from pathlib import Path


class Tree:
    """A checkout. Every path that the checks use is relative to its root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._texts: dict[Path, str] = {}
        self._modules: dict[Path, ast.Module] = {}

    @cached_property
    def files(self) -> list[Path]:
        """The files that git tracks, and the new ones that it does not ignore."""
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True)
        return [Path(line) for line in sorted(set(listed.stdout.splitlines())) if (self.root / line).is_file()]

    def matching(self, *suffixes: str, below: str = "") -> list[Path]:
        """The files with one of these suffixes in a folder and all its sub-folders."""
        return [path for path in self.files if path.suffix in suffixes and path.is_relative_to(below)]

    def text(self, path: Path) -> str:
        """A file's text. Each file is read once."""
        if path not in self._texts:
            self._texts[path] = (self.root / path).read_text(encoding="utf-8")
        return self._texts[path]

    def module(self, path: Path) -> ast.Module:
        """A Python file's syntax tree. Each file is parsed once."""
        if path not in self._modules:
            self._modules[path] = ast.parse(self.text(path), str(path))
        return self._modules[path]
