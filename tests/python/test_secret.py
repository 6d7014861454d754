"""The job's secret: where it comes from, and that nobody gets to see it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from poseidon import options
from poseidon.errors import InvalidArgument, Refused
from poseidon.launch import free_port, launch
from poseidon.options import secret

SECRET = "correct horse battery"
OTHER = "staple correct horse"
FILE_VARIABLE = "POSEIDON_SECRET_FILE"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable and no file of the machine takes part."""
    for name in list(os.environ):
        if name.startswith("POSEIDON_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def secret_file(tmp_path: Path) -> Callable[..., str]:
    def write(text: str, mode: int = 0o600) -> str:
        path = tmp_path / "secret"
        path.write_text(text)
        path.chmod(mode)
        return str(path)

    return write


def test_there_is_none_unless_somebody_gives_it() -> None:
    settings = options.resolve()
    assert settings.secrets == ()
    assert settings.sources["secret"] == "default"
    assert settings.core().secret == ""


def test_each_source_beats_the_next(
    monkeypatch: pytest.MonkeyPatch, secret_file: Callable[..., str], tmp_path: Path
) -> None:
    path = secret_file(f"{SECRET}\n")

    def source(command_line: dict[str, str], **keywords: object) -> tuple[tuple[str, ...], str]:
        settings = options.resolve_with(command_line, **keywords)
        return settings.secrets, settings.sources["secret"]

    (tmp_path / "poseidon.toml").write_text(f'secret_file = "{path}"\n')
    assert source({}) == ((SECRET,), "configuration file")
    monkeypatch.setenv(FILE_VARIABLE, path)
    assert source({}) == ((SECRET,), "environment")
    monkeypatch.setenv(secret.VARIABLE, OTHER)
    assert source({}) == ((OTHER,), "environment")
    assert source({"secret_file": path}) == ((SECRET,), "command line")
    assert source({}, secret_file=path) == ((SECRET,), "keyword")
    assert source({"secret_file": path}, secret=OTHER) == ((OTHER,), "keyword")


def test_a_file_may_have_several_of_which_workers_take_the_first(secret_file: Callable[..., str]) -> None:
    settings = options.resolve(secret_file=secret_file(f"\n  {SECRET} \r\n\n{OTHER}\n"))
    assert settings.secrets == (SECRET, OTHER)
    assert settings.core().secret == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622, 0o777])
def test_a_file_that_others_can_read_is_refused(secret_file: Callable[..., str], mode: int) -> None:
    path = secret_file(SECRET, mode)
    with pytest.raises(InvalidArgument, match=f"chmod 600 {path}"):
        options.resolve(secret_file=path)


def test_what_is_no_secret_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, secret_file: Callable[..., str], tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="at least 16") as error:
        options.resolve(secret="fifteen bytes..")
    assert "fifteen" not in str(error.value)
    with pytest.raises(InvalidArgument, match="of type int"):
        options.resolve(secret=7)
    with pytest.raises(InvalidArgument, match="is empty"):
        options.resolve(secret_file=secret_file(" \n\n"))
    with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
        options.resolve(secret_file=str(tmp_path / "nothing"))
    monkeypatch.setenv(secret.VARIABLE, "fifteen bytes..")
    with pytest.raises(InvalidArgument, match=f"{secret.VARIABLE} has a secret of 15 bytes"):
        options.resolve()


def test_it_is_never_shown(secret_file: Callable[..., str]) -> None:
    settings = options.resolve(secret_file=secret_file(SECRET))
    assert SECRET not in repr(settings)
    assert SECRET not in repr(settings.core())


def test_fresh_ones_differ_and_are_good_enough() -> None:
    first, second = secret.fresh(), secret.fresh()
    assert first != second
    assert options.resolve(secret=first).secrets == (first,)


def test_a_run_gets_its_own_unless_there_is_one(secret_file: Callable[..., str], tmp_path: Path) -> None:
    assert set(options.fresh_secret({})) == {secret.VARIABLE}
    assert options.fresh_secret({}) != options.fresh_secret({})
    assert options.fresh_secret({secret.VARIABLE: SECRET}) == {}
    assert options.fresh_secret({FILE_VARIABLE: "somewhere"}) == {}
    assert options.fresh_secret({"POSEIDON_SERVERS": "10.0.0.1:7000"}) == {}
    (tmp_path / "poseidon.toml").write_text(f'secret_file = "{secret_file(SECRET)}"\n')
    assert options.fresh_secret({}) == {}


def _secrets_of_workers(tmp_path: Path, **given: object) -> list[str]:
    script = tmp_path / "show.py"
    script.write_text(
        "from poseidon.options import resolve\n"
        f"open(f'{tmp_path}/seen-{{resolve().rank}}', 'w').write(','.join(resolve().secrets))\n"
    )
    assert launch([sys.executable, str(script)], 2, **given) == [0, 0]  # type: ignore[arg-type]
    return [(tmp_path / f"seen-{rank}").read_text() for rank in range(2)]


def test_workers_of_a_run_share_one_that_other_runs_do_not_have(tmp_path: Path) -> None:
    first, second = _secrets_of_workers(tmp_path), _secrets_of_workers(tmp_path)
    assert first[0] == first[1]
    assert len(first[0]) == 64
    assert first != second


def test_a_file_on_the_command_line_beats_a_secret_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, secret_file: Callable[..., str], tmp_path: Path
) -> None:
    monkeypatch.setenv(secret.VARIABLE, OTHER)
    assert _secrets_of_workers(tmp_path) == [OTHER, OTHER]
    path = secret_file(SECRET)
    assert _secrets_of_workers(tmp_path, options={"secret_file": path}) == [SECRET, SECRET]


def test_a_worker_with_another_secret_is_refused_by_a_server_at_once() -> None:
    import poseidon
    from poseidon._core import Server

    served = options.resolve(secret=SECRET).core()
    served.secret = f"{SECRET}\n{OTHER}"
    server = Server.listen(served, 0)

    def connect(**options: Any) -> poseidon.Exchange:
        return poseidon.connect(servers=[server.address], timeout=20, master_port=free_port(), **options)

    try:
        assert server.address.startswith("127.0.0.1:"), "it listens on loopback unless told otherwise"
        for known in (SECRET, OTHER):
            with connect(secret=known) as exchange:
                assert exchange.world_size == 1
        with pytest.raises(Refused, match="POSEIDON_SECRET"):
            connect(secret="a secret that nobody knows")
        with pytest.raises(Refused, match="POSEIDON_SECRET"):
            connect()
    finally:
        server.shutdown()
