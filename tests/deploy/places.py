"""Where the service's tests have what they make."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "build" / "deploy"
ROOT = FOLDER / "root"  # of the Debian that is booted
SECRET = ROOT / "etc/poseidon/secret"
