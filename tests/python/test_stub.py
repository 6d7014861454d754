"""The types that users' checkers see: the stub of the compiled module, and the mark that the package has types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import poseidon

ROOT = Path(__file__).resolve().parents[2]


def test_the_stub_says_what_the_compiled_module_says() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "stub.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_type_checkers_may_use_the_package() -> None:
    """Without py.typed, mypy and pyright take everything from an installed package for Any."""
    assert (Path(poseidon.__file__).parent / "py.typed").is_file()
