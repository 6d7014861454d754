"""`poseidon run --hosts`: all that is refused before anything was started."""

from __future__ import annotations

import pytest

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

from hosts_cases import NEEDS_HOSTS, SUM, cleared, hosts, refusal
from poseidon.cluster.messages import BANNER
from ssh_hosts import SshHosts

pytestmark = [NEEDS_HOSTS, pytest.mark.usefixtures("cleared")]
__all__ = ["cleared", "hosts"]  # fixtures


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--workers", "2"), "-n is the number of workers of one machine: with --hosts give them there"),
        (("--workers", "3:2"), "--workers 3:2: the first number is 1 or more, and the second not less"),
        (("--workers", "1:2", "--replicas"), "a range of workers and --replicas exclude each other"),
        (
            ("--workers", "1:2", "--on-failure", "rejoin"),
            "--workers 1:2 makes on_failure shrink, and it was given as rejoin",
        ),
        (("--workers", "1:1"), "the hosts have 2 workers, and --workers allows 1: they have a 2"),
        (("--link", "1gbit"), "--link is for workers of this machine"),
    ],
)
def test_numbers_of_workers_that_cannot_be(hosts: SshHosts, options: tuple[str, ...], words: str) -> None:
    assert refusal(hosts, "a:2", hosts.write("train.py", SUM).name, options=options).startswith(words)


def test_hosts_that_ssh_does_not_reach(hosts: SshHosts) -> None:
    script = hosts.write("train.py", SUM)
    config = (hosts.folder / "config").read_text()
    address = hosts.testbed.hosts[0].address
    (hosts.folder / "config").write_text(
        config + f"Host nobody\n  HostName {address.rpartition('.')[0]}.99\nHost stranger\n  HostName {address}\n"
        f"  UserKnownHostsFile {hosts.folder}/none\nHost impostor\n  HostName {address}\n  UserKnownHostsFile "
        f"{hosts.folder}/other\nHost locked\n  HostName {address}\n  PreferredAuthentications password\n"
        "Host unknown.invalid\n"
    )
    other = (hosts.folder / "user_key.pub").read_text().split()[:2]
    (hosts.folder / "other").write_text(f"{address} {' '.join(other)}\n")
    # Options that come first count: those of particular hosts before those of all.
    lines = (hosts.folder / "config").read_text().splitlines()
    own = [line for line in lines if line.startswith(("Host", "  "))]
    (hosts.folder / "config").write_text("\n".join([*own, "Host *", *(one for one in lines if one not in own)]) + "\n")
    try:
        told = refusal(hosts, "nobody,stranger,impostor,locked,unknown.invalid,a", script.name).splitlines()
    finally:
        (hosts.folder / "config").write_text(config)
    assert len(told) == 5
    assert told[0].startswith("host nobody cannot be reached by ssh: ssh: connect to host ")
    assert told[1] == "the key of host stranger is not known here: compare it once, by ssh stranger"
    assert told[2].startswith("host impostor has another key than known_hosts has for it")
    assert told[3].startswith("host locked would ask for a password: let your key in by ssh-copy-id locked")
    assert told[4].startswith("no host is called unknown.invalid")


def test_hosts_that_are_not_as_they_should_be(hosts: SshHosts) -> None:
    script = hosts.write("train.py", SUM)
    python = "/no/such/python"
    assert refusal(hosts, "a", script.name, options=("--python", python)) == (
        f"host a has no Python at {python}: install the same environment there, or name its path by --python"
    )
    assert refusal(hosts, "a", script.name, options=("--python", "/bin/true")).startswith("host a cannot start workers")
    config = hosts.folder / "config"
    before = config.read_text()
    config.write_text(before + f"Host again\n  HostName {hosts.testbed.hosts[0].address}\n")
    try:
        assert refusal(hosts, "a,again", script.name) == (
            "a and again are one machine: name it once, with all of its workers, as a:2"
        )
    finally:
        config.write_text(before)
    # As a firewall between the two: b has no way to a, but to where the run is started.
    hosts.on("b", "ip", "route", "add", "blackhole", f"{hosts.testbed.hosts[0].address}/32")
    try:
        assert refusal(hosts, "a,b", script.name).startswith(
            f"host a does not reach host b at {hosts.testbed.hosts[1].address}: a firewall, or"
        )
    finally:
        hosts.on("b", "ip", "route", "del", "blackhole", f"{hosts.testbed.hosts[0].address}/32")


@pytest.mark.parametrize(
    "says",
    [
        '{"is":"facts"}',
        '{"is":"facts","cores":"many"}',
        '{"is":"dance"}',
        "no JSON",
        "[" * 100_000,
        '{"is":"line"}',
    ],
)
def test_an_agent_that_talks_nonsense(hosts: SshHosts, says: str) -> None:
    (hosts.folder / "nonsense").write_text(says + "\n")
    fake = hosts.folder / "fake"
    fake.write_text(f"#!/bin/sh\necho welcome\necho '{BANNER}'\ncat {hosts.folder}/nonsense\nexec cat > /dev/null\n")
    fake.chmod(0o755)
    script = hosts.write("train.py", SUM)
    told = refusal(hosts, "a", script.name, options=("--python", str(fake)))
    assert told.startswith("the connection to host a is lost: what its agent says makes no sense: ")
