"""What `--hosts` may name, which files a program consists of, and what an agent's facts tell before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

from poseidon.cluster import before
from poseidon.cluster.environment import forwarded, places, replica_variables
from poseidon.cluster.files import program_files
from poseidon.cluster.hosts import Host, parse_hosts
from poseidon.cluster.messages import BANNER, Malformed, Messages, encoded
from poseidon.cluster.ssh import ssh_command, why_it_failed
from poseidon.errors import InvalidArgument
from poseidon.launch import Failure
from poseidon.version import VERSION


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a,b,c:2", [Host("a"), Host("b"), Host("c", 2)]),
        (" me@a , 10.0.0.2:4,", [Host("me@a"), Host("10.0.0.2", 4)]),
        ("[fd00::1]:2,me@[fd00::2]", [Host("fd00::1", 2), Host("me@fd00::2")]),
    ],
)
def test_names_of_hosts(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no host is given: write --hosts a,b,c:2"),
        ("a,b,a:2", "host a is given 2 times: name it once, as a:WORKERS"),
        ("a:0", "host a has 0 workers: it is 1 or more"),
        ("a:", "host a has no number of workers"),
        ("a:two", "host a has two workers"),
        ("fd00::1", "put an IPv6 address in brackets: [fd00::1], or [fd00::1]:2"),
        ("-oProxyCommand=touch", "'-oProxyCommand=touch' is no host"),
        ("a;reboot", "'a;reboot' is no host"),
        ("-oProxyCommand=touch${IFS}x;@[::1]", "'-oProxyCommand=touch${IFS}x;@[::1]' is no host"),
        ("a:" + "9" * 5000, "host a has 9999999999999999999999999999999999999999 workers"),
        ("./none.txt", "there is no file of hosts ./none.txt"),
    ],
)
def test_what_is_no_host(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as told:
        parse_hosts(text)
    assert str(told.value).startswith(words)


def test_files_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\n\na slots=4  # of DeepSpeed\nb slots=2 max_slots=8\nme@c:3\nd\n")
    assert parse_hosts(str(path)) == [Host("a", 4), Host("b", 2), Host("me@c", 3), Host("d")]
    path.write_text("a\nb slot=2\n")
    with pytest.raises(InvalidArgument, match="line 2: 'slot=2' says nothing about host b: write b slots=2"):
        parse_hosts(str(path))
    path.write_bytes(b"\xef\xbb\xbfa\r\nb slots=2\r\n")
    assert parse_hosts(str(path)) == [Host("a"), Host("b", 2)]
    path.write_text("a,b\n")
    with pytest.raises(InvalidArgument, match="line 1: 'a,b' is no host"):
        parse_hosts(str(path))
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match="cannot be read: it is no UTF-8 text"):
        parse_hosts(str(path))


def test_files_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "src/train.py": "import json, model.net\nfrom model import data as d\nimport torch\nif 0:\n    import late\n",
        "src/late.py": "import train\n",
        "src/model/__init__.py": "",
        "src/model/net.py": "from . import layers\nfrom .deep import block\n",
        "src/model/layers.py": "from ..unknown import nothing\n",
        "src/model/deep/__init__.py": "",
        "src/model/deep/block.py": "this is no Python(",
        "src/model/data.py": "",
        "src/model/unused.py": "",
        "poseidon.toml": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    own = {"late.py", "train.py", "model/__init__.py", "model/net.py", "model/layers.py", "model/data.py"}
    deep = {"model/deep/__init__.py", "model/deep/block.py"}
    assert set(program_files("src/train.py", is_module=False)) == {
        "poseidon.toml",
        *(f"src/{one}" for one in own | deep),
    }
    monkeypatch.chdir(tmp_path / "src")
    assert set(program_files("model.net", is_module=True)) == {
        *("model/__init__.py", "model/net.py", "model/layers.py"),
        *deep,
    }
    assert program_files("torch.distributed", is_module=True) == []
    (tmp_path / "link.py").symlink_to(tmp_path / "src" / "late.py")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "torch.py").write_text("")
    (tmp_path / "src" / "model" / "__main__.py").write_text("import net\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    linked = set(program_files("link.py", is_module=False))
    assert linked >= {"link.py", "src/late.py", "src/train.py", "elsewhere/torch.py"}
    assert set(program_files("src/model", is_module=False)) >= {"src/model/__main__.py", "src/model/net.py"}
    monkeypatch.chdir("/usr")
    assert str(tmp_path / "src" / "train.py") in program_files(str(tmp_path / "src" / "train.py"), is_module=False)


class Answered:
    """A machine that has answered."""

    def __init__(self, name: str, **facts: Any) -> None:
        self.name = name
        self.skew_s = facts.pop("skew_s", 0.0)
        self.answers = {
            "facts": {
                "machine": name,
                "poseidon": VERSION,
                "python": "3.11.7",
                "torch": "2.13.0",
                "free_bytes": 1 << 30,
                "has_folder": True,
                "digests": {},
                **facts,
            }
        }


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"poseidon": "0.9"}, f"host b has poseidon 0.9, and this machine {VERSION}: install the same on all"),
        ({"python": "3.12.1"}, "host b has python 3.12.1, and host a 3.11.7: install the same on all"),
        ({"torch": "none"}, "host b has torch none, and host a 2.13.0: install the same on all"),
        ({"free_bytes": 4096}, "the disk of host b is full: 4096 bytes are free for temporary files"),
        ({"skew_s": 3700}, "the clock of host b is 3700 s apart from the one here"),
        ({"machine": "a"}, "a and b are one machine: name it once, with all of its workers, as a:2"),
    ],
)
def test_what_is_wrong_with_a_machine(facts: dict[str, Any], words: str) -> None:
    machines: list[Any] = [Answered("a"), Answered("b", **facts)]
    told = list(before.problems_of(machines, []))
    assert len(told) == 1
    assert told[0].startswith(words)


def test_variables_that_go_along() -> None:
    here = {
        "POSEIDON_FLOWS": "2",
        "NCCL_DEBUG": "INFO",
        "HOME": "/root",
        "PATH": "/bin",
        "TORCHELASTIC_RUN_ID": "7",
        "A": "1",
    }
    assert forwarded(here, ["A", "B=2=3"]) == {"POSEIDON_FLOWS": "2", "NCCL_DEBUG": "INFO", "A": "1", "B": "2=3"}
    with pytest.raises(InvalidArgument, match="--env C: this variable is not set here"):
        forwarded(here, ["C"])


def test_the_places_of_ranks() -> None:
    own = [place.variables(("10.0.0.1", 29400)) for place in places([1, 2], [8, 8], 16)]
    assert [(one["RANK"], one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"], one["OMP_NUM_THREADS"]) for one in own] == [
        ("0", "0", "1", "8"),
        ("1", "0", "2", "4"),
        ("2", "1", "2", "4"),
    ]
    assert {one["WORLD_SIZE"] for one in own} == {"16"}
    replicas = replica_variables(("fd00::1", 29400), [1000, 2000], [8, 8], 2)
    assert [(one["RANK"], one["WORLD_SIZE"], one["MASTER_PORT"], one["POSEIDON_REPLICA"]) for one in replicas] == [
        ("0", "2", "1000", "0/2@[fd00::1]:29400"),
        ("1", "2", "1000", "0/2@[fd00::1]:29400"),
        ("0", "2", "2000", "1/2@[fd00::1]:29400"),
        ("1", "2", "2000", "1/2@[fd00::1]:29400"),
    ]


def test_messages_come_in_pieces_and_nonsense_is_refused() -> None:
    data = encoded("line", number=1, text="ä\udcff", error=False) + encoded("alive")
    messages = Messages()
    found = [one for place in range(len(data)) for one in messages.feed(data[place : place + 1])]
    assert found == [("line", {"number": 1, "text": "ä\udcff", "error": False}), ("alive", {})]
    for nonsense in (b"[1]\n", b"{}\n", b"what?\n", b'{"is":1,\n', b"\xff\n"):
        with pytest.raises(Malformed):
            list(Messages().feed(nonsense))


def test_what_ssh_is_told_and_tells() -> None:
    command = ssh_command("ssh -p 2222", "me@a", "/a b/python")
    assert command[:3] == ["ssh", "-p", "2222"]
    assert "-oBatchMode=yes" in command
    assert command[-2] == "me@a"
    assert "'\"'\"'/a b/python'\"'\"' -u -m poseidon.cluster.agent" in command[-1]
    assert VERSION in BANNER
    with pytest.raises(InvalidArgument, match="No closing quotation"):
        ssh_command("ssh -p 'x", "a", "/python")
    missing = why_it_failed("a", "/python", 1, ["/python: Error while finding module: No module named 'poseidon'"])
    assert missing.startswith("the Python of host a, /python, has no Poseidon of this version: install it there")


def test_a_signal_without_a_name() -> None:
    assert Failure(3, -35, "b").how == "killed by signal 35"
