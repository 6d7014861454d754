"""The table of options: precedence, parsing, and one clear sentence for everything that is wrong."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon import _core, options
from poseidon.dscp import MOST_CLASSES
from poseidon.errors import InvalidArgument
from poseidon.options.kinds import KINDS
from poseidon.options.table import CORE_OPTIONS

PLACE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable and no file of the machine takes part."""
    for name in list(os.environ):
        if name.startswith("POSEIDON_") or name in (*PLACE, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.chdir(tmp_path)


def set_place(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    for name, value in {**PLACE, **changes}.items():
        if value is not None:
            monkeypatch.setenv(name, value)


def test_defaults_are_those_of_the_core_header() -> None:
    settings = options.resolve()
    assert (settings.rank, settings.world_size) == (0, 1)
    assert (settings.master_addr, settings.master_port) == ("127.0.0.1", 29500)
    assert (settings.chunk_bytes, settings.small_bytes, settings.group_bytes) == (256 << 10, 32 << 10, 1 << 20)
    assert (settings.schedule, settings.partition, settings.scheme) == ("wait_free", "balanced", "auto")
    assert (settings.servers, settings.timeout, settings.job) == ((), 300.0, "default")
    assert (settings.interfaces, settings.transport, settings.flows) == ((), "auto", 1)
    assert (settings.aggregation, settings.reduce_order, settings.assignment) == ("streaming", "rank", "chunk")
    assert settings.use_agent_store is False
    assert set(settings.sources.values()) == {"default"}


def test_settings_hold_every_option_of_the_table() -> None:
    assert set(options.BY_NAME) <= set(options.resolve().values)


def test_every_row_has_a_kind_a_group_and_a_sentence() -> None:
    names = [option.name for option in (*options.PLACE, *options.OPTIONS)]
    assert len(set(names)) == len(names)
    for option in (*options.PLACE, *options.OPTIONS):
        assert option.group in {group.name for group in options.GROUPS}
        assert option.help.endswith(".")
        assert option.kind.allowed(option.limits)
        if option.default is not None:
            assert option.read(option.default, option.name) == option.default


def test_defaults_that_depend_on_the_machine_are_those_without_a_constant() -> None:
    assert set(options.defaults.BY_MACHINE) == {option.name for option in options.OPTIONS if option.default is None}


def test_constant_defaults_are_those_of_the_core() -> None:
    core = _core.Options()
    constant = [option for option in options.table.CORE_OPTIONS if option.default is not None]
    assert len(constant) > 25
    for option in constant:
        assert option.kind.to_core(option.default) == getattr(core, option.name)


def test_the_network_has_as_many_classes_as_there_are_code_points() -> None:
    assert options.BY_NAME["priority_classes"].limits.most == MOST_CLASSES


def test_many_workers_have_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def classes_of(world_size: int, **keywords: Any) -> tuple[int, tuple[str, ...]]:
        place = {"rank": 0, "world_size": world_size, "master_addr": "127.0.0.1", "master_port": 1}
        settings = options.resolve(**place, **keywords)
        return settings.priority_classes, settings.dscp

    assert classes_of(64) == (2, ("46", "0"))
    assert classes_of(65) == (1, ("0",))
    assert classes_of(65, priority_classes=3) == (3, ("46", "34", "0"))
    assert classes_of(65, servers="127.0.0.1:1") == (2, ("46", "0"))
    monkeypatch.setenv("POSEIDON_PRIORITY_CLASSES", "2")
    assert classes_of(1024) == (2, ("46", "0"))


def test_settings_are_values() -> None:
    settings = options.resolve(flows=3)
    assert settings == options.resolve(flows=3) == pickle.loads(pickle.dumps(settings)) == copy.copy(settings)
    other = settings.replace(job="night", rank=2)
    assert (other.job, other.rank, other.flows, settings.job) == ("night", 2, 3, "default")
    with pytest.raises(InvalidArgument, match="did you mean flows"):
        settings.replace(flow=1)
    with pytest.raises(AttributeError, match="no attribute 'flow'"):
        settings.flow  # noqa: B018


def test_nobody_asks_the_settings_for_what_they_do_not_have() -> None:
    """Settings answer by name, so that no type checker sees a misspelt one."""
    known = set(dir(options.Settings)) | {field.name for field in dataclasses.fields(options.Settings)}
    known |= set(options.resolve().values)
    root = Path(__file__).parents[2]
    for path in (path for folder in ("python", "bench", "examples") for path in (root / folder).rglob("*.py")):
        for name in re.findall(r"\bsettings\.(\w+)", path.read_text(encoding="utf-8")):
            assert name in known or name == "py", f"{path} asks for settings.{name}"


def test_each_source_beats_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def source(command_line: dict[str, str], **keywords: object) -> tuple[int, str]:
        settings = options.resolve_with(command_line, **keywords)
        return settings.chunk_bytes, settings.sources["chunk_bytes"]

    (tmp_path / "poseidon.toml").write_text('chunk_bytes = "1MiB"\n')
    assert source({}) == (1 << 20, "configuration file")
    monkeypatch.setenv("POSEIDON_CHUNK_BYTES", "512k")
    assert source({}) == (512 << 10, "environment")
    assert source({"chunk_bytes": "3000"}) == (3000, "command line")
    assert source({"chunk_bytes": "3000"}, chunk_bytes=4000) == (4000, "keyword")
    assert source({}, chunk_bytes=None) == (512 << 10, "environment")


def test_named_configuration_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text('servers = ["a:1", "b:2"]\ntimeout = 5\n')
    monkeypatch.setenv("POSEIDON_CONFIG", str(other))
    settings = options.resolve()
    assert settings.servers == ("a:1", "b:2")
    assert settings.timeout == 5.0
    assert isinstance(settings.timeout, float)


@pytest.mark.parametrize(
    ("text", "size"),
    [("65536", 65536), ("512k", 512 << 10), ("2MiB", 2 << 20), ("2MB", 2_000_000), ("1.5K", 1536), ("1 g", 1 << 30)],
)
def test_sizes(text: str, size: int) -> None:
    assert options.parse_bytes(text) == size


@given(st.integers(0, 2**60))
def test_a_plain_number_of_bytes_is_exact(size: int) -> None:
    assert options.parse_bytes(str(size)) == size


@pytest.mark.parametrize("text", ["", "k", "-1", "2XB", "1.5", "0.3k", "2 MiB MiB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        options.parse_bytes(text)


def test_place_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    set_place(monkeypatch, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
    settings = options.resolve()
    assert (settings.rank, settings.world_size, settings.local_rank, settings.local_world_size) == (1, 4, 1, 2)
    assert (settings.master_addr, settings.master_port, settings.use_agent_store) == ("10.0.0.1", 1234, True)
    assert settings.sources["rank"] == "environment"


def test_compute_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options.defaults, "available_cpu_count", lambda: 64)
    set_place(monkeypatch, LOCAL_RANK="0", LOCAL_WORLD_SIZE="4", WORLD_SIZE="16")
    assert options.resolve().compute_threads == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert options.resolve().compute_threads == 4
    monkeypatch.setattr(options.defaults, "available_cpu_count", lambda: 2)
    assert options.resolve().compute_threads == 1


def test_server_cores_leave_room_for_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options.defaults, "available_cpu_count", lambda: 64)
    set_place(monkeypatch, LOCAL_RANK="0", LOCAL_WORLD_SIZE="8", WORLD_SIZE="16")
    assert options.resolve().server_cores == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert options.resolve().server_cores == 4
    monkeypatch.setattr(options.defaults, "available_cpu_count", lambda: 2)
    assert options.resolve().server_cores == 1
    assert options.resolve(transport="shm").server_cores == 0
    assert options.resolve(server_cores=3).server_cores == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")  # all on one host, eight to a core
    assert options.resolve().server_cores == 0
    assert options.resolve(transport="tcp").server_cores == 0


def test_chunk_bytes_may_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.resolve(chunk_bytes="auto").chunk_bytes == options.AUTO
    monkeypatch.setenv("POSEIDON_CHUNK_BYTES", " auto ")
    assert options.resolve().chunk_bytes == options.AUTO


def test_lists_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_INTERFACES", "eth0, 10.0.0.7,")
    assert options.resolve().interfaces == ("eth0", "10.0.0.7")
    assert options.resolve(interfaces=["lo"]).interfaces == ("lo",)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"RANK": None}, "RANK is missing while WORLD_SIZE is 4"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is missing while RANK is 1"),
        ({"RANK": "4"}, "RANK is 4 while WORLD_SIZE is 4: it must be from 0 to 3"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "one"}, "RANK is 'one': it must be a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is missing while WORLD_SIZE is 4"),
        ({"MASTER_PORT": None}, "MASTER_PORT is missing while WORLD_SIZE is 4"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000': it must be a port from 1 to 65535"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is 2, LOCAL_WORLD_SIZE is 2"),
        ({"POSEIDON_CHUNK_BYTES": "12x"}, "POSEIDON_CHUNK_BYTES is '12x': it must be auto, or a size"),
        ({"POSEIDON_CHUNK_BYTES": "automatic"}, "it must be auto, or a size"),
        ({"POSEIDON_CHUNK_BYTES": "8"}, "at least 64 bytes"),
        ({"POSEIDON_SCHEME": "sfd"}, "did you mean 'sfb'"),
        ({"POSEIDON_TRANSPORT": "shmem"}, "did you mean 'shm'"),
        ({"POSEIDON_SERVER_CORES": "65"}, "from 0 to 64"),
        ({"POSEIDON_FLOWS": "0"}, "from 1 to 16"),
        ({"POSEIDON_AGGREGATION": "tall"}, "one of streaming, at_once, wide"),
        ({"POSEIDON_REDUCE_ORDER": "none"}, "one of rank, arrival"),
        ({"POSEIDON_ASSIGNMENT": "workers"}, "did you mean 'worker'"),
        ({"POSEIDON_SERVERS": "a:1,b"}, "a list of host:port"),
        ({"POSEIDON_TIMEOUT": "inf"}, "POSEIDON_TIMEOUT is 'inf'"),
        ({"POSEIDON_TIMEOUT": "0"}, "a number of seconds"),
        ({"POSEIDON_COMPUTE_THREADS": "0"}, "from 1 to 256"),
        ({"POSEIDON_JOB": "a b"}, "1 to 64 letters"),
        ({"POSEIDON_CONFIG": "nowhere.toml"}, "POSEIDON_CONFIG is 'nowhere.toml', which does not exist"),
    ],
)
def test_wrong_variables(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], expected: str) -> None:
    set_place(monkeypatch, **changes)
    with pytest.raises(InvalidArgument) as caught:
        options.resolve()
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"chunk_byte": 1}, "did you mean chunk_bytes?"),
        ({"chunk_bytes": True}, "chunk_bytes is True"),
        ({"servers": [1]}, "servers is [1]"),
        ({"interface": "eth0"}, "did you mean interfaces?"),
        ({"interfaces": "eth0", "flows": 1.5}, "flows is 1.5"),
        ({"schedule": "eager"}, "one of wait_free, sequential"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
        ({"rank": 3}, "WORLD_SIZE is missing while RANK is 3"),
    ],
)
def test_wrong_keywords(keywords: dict[str, object], expected: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        options.resolve(**keywords)
    assert expected in str(caught.value)


def test_wrong_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "poseidon.toml").write_text("chunk_bites = 1\n")
    with pytest.raises(InvalidArgument, match=r"poseidon\.toml: did you mean chunk_bytes"):
        options.resolve()
    (tmp_path / "poseidon.toml").write_text("chunk_bytes =\n")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        options.resolve()


def test_unknown_variable_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_CHUNKBYTES", "1")
    with pytest.warns(UserWarning, match="did you mean POSEIDON_CHUNK_BYTES"):
        options.resolve()
    monkeypatch.delenv("POSEIDON_CHUNKBYTES")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options.resolve()


def test_command_line_goes_to_workers_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_CHUNK_BYTES", "1MiB")
    variables = options.to_environment({"chunk_bytes": "4k", "scheme": None})
    assert variables == {"POSEIDON_CHUNK_BYTES": "4k"}
    monkeypatch.setenv("POSEIDON_CHUNK_BYTES", variables["POSEIDON_CHUNK_BYTES"])
    assert options.resolve().chunk_bytes == 4096
    with pytest.raises(InvalidArgument, match="--scheme is 'tcp'"):
        options.to_environment({"scheme": "tcp"})


def test_flight_records_lie_with_temporary_files_unless_they_are_off() -> None:
    pytest.importorskip("poseidon._core", reason="the compiled core is not built")
    assert options.resolve().core().flight_record == tempfile.gettempdir()
    assert options.resolve(flight_record="off").core().flight_record == ""


# Where a row gives neither bounds nor names.
SOME_VALUE = {
    "host": "10.0.0.1",
    "path": "/somewhere",
    "path_or_off": "/somewhere",
    "job_name": "night",
    "label": "b12",
    "list": ["eth0", "eth1"],
    "addresses": ["h:1"],
    "code_points": ["34", "10", "0"],
}


def other_value(option: options.Option) -> Any:
    """A value that is allowed and is not the core's default."""
    default = getattr(_core.Options(), option.name)
    kind = next(name for name, kind in KINDS.items() if kind is option.kind)
    if option.choices:
        return next(name for name in option.choices if name != default)
    if option.limits.least is None:
        return SOME_VALUE[kind]
    return next(value for value in (option.limits.least + 1, option.limits.least + 2) if value != default)


def test_core_options() -> None:
    """Every setting reaches the core; none is left at the core's own default."""
    given = {option.name: other_value(option) for option in CORE_OPTIONS} | {"secret": "0123456789abcdef"}
    core = options.resolve(**given).core()
    assert {name: getattr(core, name) for name in given} == {**given, "dscp": [34, 10, 0], "replica_check": "2"}
    assert options.resolve().core().dscp == [46, 0]
    assert {name for name in dir(core) if not name.startswith("_")} == {*given, "generation", "late_timeout", "run"}
    assert options.resolve(chunk_bytes="auto").core().chunk_bytes == 0


def test_a_late_rank_is_waited_for_half_an_hour_unless_somebody_sets_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = {"rank": 0, "world_size": 2, "master_addr": "127.0.0.1", "master_port": 1}
    default = options.resolve(**place).core()
    assert (default.timeout, default.late_timeout) == (300, 1800)
    assert options.resolve(**place, timeout=300).core().late_timeout == 300
    monkeypatch.setenv("POSEIDON_TIMEOUT", "7")
    assert options.resolve(**place).core().late_timeout == 7
