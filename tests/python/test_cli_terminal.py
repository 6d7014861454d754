"""The command line as a terminal shows it: help, version, completion, and tables of 80 columns."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

pytest.importorskip("poseidon._core")

from poseidon.cli.main import app
from poseidon.version import VERSION

COMMANDS = ("run", "plan", "top", "server", "server jobs", "bench", "testbed up", "checkpoint", "doctor", "options")


def printed(*arguments: str, **environment: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"TERM": "dumb", **environment}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_version() -> None:
    assert printed("--version") == printed("-V") == f"poseidon {VERSION}\n"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_short_help(command: str) -> None:
    assert "Usage: " in printed(*command.split(), "-h", COLUMNS="80")


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ("bash", {"COMP_WORDS": "poseidon pl", "COMP_CWORD": "1"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "poseidon pl"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "poseidon pl", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_completion(shell: str, words: dict[str, str]) -> None:
    environment = {**os.environ, **words, "_POSEIDON_COMPLETE": f"complete_{shell}"}
    program = "import sys; sys.argv[0] = 'poseidon'; from poseidon.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert "plan" in done.stdout, done.stderr


def test_tables_fit_80_columns_and_cut_no_name() -> None:
    plan = ["plan", "VGG19", "--hosts", "4", "--link", "1gbit", "--racks", "2", "--oversubscription", "4"]
    text = printed(*plan, COLUMNS="80")
    table = text.split("layer or group")[1].split("torch's DDP")[0]
    assert "conv5_4.weight" in table
    assert "dense gradient" in table
    assert max(map(len, table.splitlines())) <= 80
    options = printed("options", COLUMNS="80")
    assert max(map(len, options.splitlines())) <= 80
    assert "priority_threshold" in options
