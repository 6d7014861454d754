"""`poseidon run --hosts`: runs on four hosts with an sshd each, how they end, and all that is refused before them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

from poseidon.cluster.messages import BANNER
from ssh_hosts import NAMES, SshHosts, missing, ssh_hosts
from waiting import SLOWED, happens, wait_until

pytestmark = pytest.mark.skipif(bool(missing()), reason="hosts with an sshd need " + " and ".join(missing()))

MARK = "mark-of-test-hosts"
MANY = "1000000"  # steps
END_S = 5.0  # in which nothing runs any more
DETECTED_S = 3.0  # in which a lost host is

SUM = """
import os, sys, time
import numpy, poseidon
with poseidon.connect() as exchange:
    exchange.declare({"x": numpy.zeros(3)})
    out = numpy.zeros(3)
    exchange.push_pull("x", numpy.full(3, exchange.rank + 1.0), out=out, average=False)
    print("sum", out[0], "of", exchange.world_size, "local", os.environ["LOCAL_RANK"], flush=True)
    exchange.barrier()
"""

ENDLESS = """
import sys
import numpy, poseidon
with poseidon.connect() as exchange:
    exchange.declare({"x": numpy.zeros(3)})
    value = numpy.ones(3)
    step = 0
    while True:
        exchange.push_pull("x", value, out=value)
        step += 1
        if step == 20:
            print("runs", sys.argv[1], flush=True)
"""

TRAIN = """
import os, pathlib, signal, sys
import torch
import poseidon.torch as poseidon
steps, mode = int(sys.argv[1]), sys.argv[2]
poseidon.init()
first = not pathlib.Path("died").exists()
model = poseidon.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
recovery = poseidon.Recovery(model, optimizer, seed=0)
made = 0
while recovery.until(steps):
    with recovery.attempt():
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    made += 1
    if made == 3 and mode == "kill" and poseidon.rank() == 1 and first:
        pathlib.Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if made == 5:
        print("runs", mode, flush=True)
    if made % 50 == 0:
        print("together", poseidon.world_size(), flush=True)
print("weight", sum(one.sum().item() for one in model.parameters()))
"""

SHARDED = """
import os, pathlib, signal
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import poseidon.torch as poseidon
dist.init_process_group("gloo")
poseidon.init()
first = not pathlib.Path("died").exists()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
fully_shard(model, mesh=mesh)
wrapper = poseidon.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
recovery = poseidon.Recovery(wrapper, optimizer, seed=0)
while recovery.until(8):
    with recovery.attempt():
        part = poseidon.rank() * dist.get_world_size() + dist.get_rank()
        generator = torch.Generator().manual_seed(100 * recovery.step + part)
        optimizer.zero_grad()
        wrapper(torch.randn(3, 6, generator=generator)).pow(2).mean().backward()
        optimizer.step()
    if recovery.step == 3 and poseidon.rank() == 1 and dist.get_rank() == 0 and first:
        pathlib.Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
shards = [one.to_local().double().sum().item() for one in model.parameters()]
print("shard", dist.get_rank(), "of", dist.get_world_size(), "in", poseidon.world_size(), sum(shards))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


@pytest.fixture(autouse=True)
def cleared(hosts: SshHosts) -> None:
    hosts.clear()


def run(
    hosts: SshHosts, names: str, *words: str | Path, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = hosts.command(names, *words, options=options)
    return subprocess.run(command, cwd=hosts.work, capture_output=True, text=True, timeout=120, check=False)


def refusal(hosts: SshHosts, names: str, *words: str | Path, options: tuple[str, ...] = ()) -> str:
    done = run(hosts, names, *words, options=options)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("poseidon: ")
    return done.stderr.removeprefix("poseidon: ").rstrip()


def marked() -> list[int]:
    """Processes with MARK among their arguments, on any host."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if MARK.encode() in words and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def agents() -> list[int]:
    """Processes of agents."""
    own = b"poseidon.cluster.agent"
    paths = Path("/proc").glob("[0-9]*/cmdline")
    return [int(path.parent.name) for path in paths if own in _read(path).split(b"\0")]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_job_on_all_hosts(hosts: SshHosts) -> None:
    script = hosts.write("train.py", SUM)
    done = run(hosts, "a,b:2,c,d", script.name)
    assert done.returncode == 0, done.stderr
    assert "5 workers: 1 on a, 2 on b, 1 on c, 1 on d; rank 0 at " in done.stderr
    places = ["0 a", "1 b", "2 b", "3 c", "4 d"]
    expected = [f"[{place}] sum 15.0 of 5 local {int(place == '2 b')}" for place in places]
    assert sorted(done.stdout.splitlines()) == expected


def test_a_file_of_hosts_variables_and_options(hosts: SshHosts) -> None:
    script = hosts.write(
        "train.py",
        "import os, poseidon\n"
        "with poseidon.connect() as exchange:\n"
        "    if exchange.rank == 1: print(os.environ['A'], os.environ['B'], os.environ.get('C'), "
        "os.environ['POSEIDON_FLOWS'], os.environ['OMP_NUM_THREADS'], 'RUN' if os.environ['POSEIDON_RUN'] else '')\n",
    )
    file = hosts.write("hosts.txt", "# two of four\na slots=1\nc:1   # with its number\n")
    command = hosts.command(str(file), "--flows", "2", script.name, options=["--env", "A", "--env", "B=2"])
    environment = {**os.environ, "A": "1", "C": "3", "OMP_NUM_THREADS": "7"}
    done = subprocess.run(
        command, cwd=hosts.work, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[1 c] 1 2 None 2 7 RUN\n"


def test_the_secret_is_on_no_command_line(hosts: SshHosts) -> None:
    script = hosts.write("train.py", ENDLESS)
    secret = "a-secret-of-the-job-1234567890"
    with started(hosts, "a,b", script.name, env={"POSEIDON_SECRET": secret}):
        lines = [_read(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
        assert not any(secret.encode() in line for line in lines)
        own = [_read(Path(f"/proc/{process}/environ")) for process in marked()]
        assert sum(f"POSEIDON_SECRET={secret}".encode() in one for one in own) >= 2, "but the workers have it"


class started:
    """A run with MARK that goes on for ever, until it is interrupted in the end. `lines` of its output so far."""

    def __init__(self, hosts: SshHosts, names: str, *words: str, env: dict[str, str] | None = None) -> None:
        self.path = hosts.folder / f"output-{time.monotonic_ns()}"
        with self.path.open("wb") as file:
            self.process = subprocess.Popen(
                hosts.command(names, *words, MARK),
                cwd=hosts.work,
                stdout=file,
                stderr=file,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.path.read_text()

    def __enter__(self) -> started:
        wait_until(lambda: f"runs {MARK}" in self.text or self.process.poll() is not None, lambda: self.text)
        assert self.process.poll() is None, self.text
        return self

    def __exit__(self, *about: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        wait_until(lambda: not marked() and not agents(), "the end of all workers")


def seconds_to_end(since: float) -> float:
    """Until no worker and no agent runs anywhere."""
    assert happens(lambda: not marked() and not agents(), 60.0)
    return time.monotonic() - since


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_command_is_ended(hosts: SshHosts, number: signal.Signals) -> None:
    script = hosts.write("train.py", ENDLESS)
    with started(hosts, "a,b,c,d", script.name) as job:
        since = time.monotonic()
        job.process.send_signal(number)
        assert seconds_to_end(since) < END_S * SLOWED
        assert job.process.wait(10) == (-number if number == signal.SIGKILL else 128 + number)
        if number != signal.SIGKILL:
            assert f"the run was interrupted by {number.name}; all ranks have ended" in job.text


def test_a_lost_host_is_the_failure_of_its_worker(hosts: SshHosts) -> None:
    script = hosts.write("train.py", ENDLESS)
    with started(hosts, "a,b,c", script.name) as job:
        since = time.monotonic()
        hosts.on("c", "ip", "link", "set", "eth0", "down")
        try:
            assert job.process.wait(60) != 0
            assert seconds_to_end(since) < (END_S + DETECTED_S) * SLOWED, "also on the host that hears nothing"
        finally:
            hosts.on("c", "ip", "link", "set", "eth0", "up")
    assert "rank 2 on c" in job.text
    assert "host c cannot be reached by ssh" in job.text or "the connection to c was lost" in job.text


def test_the_others_go_on_without_a_lost_host(hosts: SshHosts) -> None:
    script = hosts.write("train.py", TRAIN)
    with started(
        hosts, "a,b,c", "--on-failure", "shrink", "--max-restarts", "0", "--timeout", "30", script.name, MANY
    ) as job:
        hosts.on("c", "ip", "link", "set", "eth0", "down")
        try:
            told = "rank 2 on c failed, as the connection to c was lost; it is not started again, the others go on"
            wait_until(lambda: told in job.text, lambda: job.text)
            wait_until(lambda: "together 2" in job.text, lambda: job.text)
        finally:
            hosts.on("c", "ip", "link", "set", "eth0", "up")


def test_a_failed_worker_is_named_with_its_machine_and_last_words(hosts: SshHosts) -> None:
    more = "    if exchange.rank == 2: raise ValueError('the data is bad')\n    exchange.barrier()\n"
    script = hosts.write("train.py", SUM + more)
    done = run(hosts, "a,b,c", script.name)
    assert done.returncode == 1
    assert "poseidon: rank 2 on c failed first, with exit code 1" in done.stderr
    assert "poseidon: the cause: ValueError: the data is bad" in done.stderr
    assert "[2 c] ValueError: the data is bad" in done.stderr


def test_a_killed_worker_is_started_again_on_its_machine(hosts: SshHosts) -> None:
    script = hosts.write("train.py", TRAIN)
    done = run(hosts, "a,b", "--on-failure", "rejoin", script.name, "6", "kill")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "rank 1 on b failed, killed by SIGKILL; it is started again (restart 1 of 3)" in done.stderr
    weights = {line.split()[-1] for line in done.stdout.splitlines() if " weight " in line}
    assert len(weights) == 1
    assert (hosts.work_of("b") / "died").exists()


def test_a_host_that_comes_back_is_connected_to_again(hosts: SshHosts) -> None:
    script = hosts.write("train.py", TRAIN)
    with started(hosts, "a,b", "--on-failure", "rejoin", script.name, MANY) as job:
        hosts.on("b", "ip", "link", "set", "eth0", "down")
        try:
            told = "rank 1 on b failed, as the connection to b was lost; it is started again (restart 1 of 3)"
            wait_until(lambda: told in job.text, lambda: job.text)
        finally:
            hosts.on("b", "ip", "link", "set", "eth0", "up")
        wait_until(lambda: job.text.count(f"[1 b] runs {MARK}") == 2, lambda: job.text)


def test_machines_come_and_go_as_the_file_of_hosts_says(hosts: SshHosts) -> None:
    script = hosts.write("train.py", TRAIN)
    file = hosts.folder / "hosts.txt"
    file.write_text("a\n")

    def says(text: str) -> None:
        wait_until(lambda: text in job.text or job.process.poll() is not None, lambda: job.text)
        assert text in job.text

    with started(hosts, str(file), "--workers", "1:3", script.name, MANY) as job:
        (hosts.work_of("c") / "train.py").unlink()
        file.write_text("a\nb slots=2\nc\n")
        says("host b comes: ranks 1, 2 are started")
        says("host c has no train.py: copy it there, or let --sync do it")
        says("together 3")
        file.write_text("a\nc\n")
        says("host b is not in the file any more: ranks 1, 2 are asked to leave")
        (hosts.work_of("c") / "train.py").write_text(TRAIN)
        file.write_text("b\nc\n")
        says("host a has rank 0, where all meet: it stays")
        says("host c comes: rank ")
        says("host b comes: rank ")
        file.write_text("a\nb slots=none\n")
        says("the file of hosts is not followed: ")
        assert "failed" not in job.text
    assert "all ranks have ended" in job.text


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


def test_each_machine_is_a_replica_of_a_sharded_model(hosts: SshHosts) -> None:
    script = hosts.write("train.py", SHARDED)
    options = ("--replicas", "--on-failure", "rejoin")
    done = run(hosts, "a:2,b:2", script.name, options=options)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "2 replicas of 2 workers: 2 on a, 2 on b" in done.stderr
    restarted = "rank 2 on b failed, killed by SIGKILL; all ranks of its replica are started again (restart 1 of 3)"
    assert restarted in done.stderr
    shards = sorted(line.partition("] ")[2] for line in done.stdout.splitlines() if "shard " in line)
    assert [line.split()[:5] for line in shards] == [["shard", rank, "of", "2", "in"] for rank in "0011"]
    assert (shards[0], shards[2]) == (shards[1], shards[3]), "of two replicas"
    assert refusal(hosts, "a:2,b", script.name, options=options) == (
        "replicas have equally many ranks, and here they have: a 2, b 1"
    )


def test_top_shows_the_workers_where_the_run_was_started(hosts: SshHosts) -> None:
    script = hosts.write("train.py", TRAIN)
    command = [sys.executable, "-m", "poseidon", "top", "--once", "--json"]

    def shown() -> list[tuple[int, str]]:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [(one["rank"], one["job"]) for one in json.loads(done.stdout)]

    with started(hosts, "b,d", "--job", "shown", script.name, MANY):
        wait_until(lambda: shown() == [(0, "shown"), (1, "shown")], lambda: str(shown()), every=0.5)
    assert happens(lambda: not shown(), 10.0)


def test_sync_copies_what_git_does_not_ignore(hosts: SshHosts) -> None:
    (hosts.work / "package").mkdir()
    (hosts.work / "package" / "__init__.py").write_text("from package.model import SIZE\n")
    (hosts.work / "package" / "model.py").write_text("SIZE = 3\n")
    (hosts.work / "train.py").write_text("import package\n" + SUM + "    print(package.SIZE)\n")
    (hosts.work / ".gitignore").write_text("data\n")
    (hosts.work / "data").write_text("much")
    subprocess.run(["git", "init", "-q"], cwd=hosts.work, check=True)
    lines = refusal(hosts, "a,b", "train.py").splitlines()
    names = ["train.py", "package/__init__.py", "package/model.py"]
    assert sorted(lines) == sorted(
        f"host {host} has no {name}: copy it there, or let --sync do it" for host in "ab" for name in names
    )
    done = run(hosts, "a,b", "--sync", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("] 3\n") == 2
    assert not (hosts.work_of("a") / "data").exists()
    (hosts.work_of("b") / "package" / "model.py").write_text("SIZE = 4\n")
    assert refusal(hosts, "a,b", "train.py") == (
        "package/model.py of host b differs from the one here: copy it there, or let --sync do it"
    )


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


def test_it_is_interrupted_before_the_run(hosts: SshHosts) -> None:
    script = hosts.write("train.py", ENDLESS)
    for pause in (0.5, 1.0, 1.5):
        process = subprocess.Popen(
            hosts.command(",".join(NAMES), script.name, MARK), cwd=hosts.work, stderr=subprocess.DEVNULL
        )
        time.sleep(pause)  # a test of that very moment
        process.send_signal(signal.SIGINT)
        since = time.monotonic()
        assert process.wait(30) == 128 + signal.SIGINT
        assert seconds_to_end(since) < END_S * SLOWED


def test_rank_zero_is_where_all_meet(hosts: SshHosts) -> None:
    script = hosts.write("train.py", TRAIN.replace("poseidon.rank() == 1", "poseidon.rank() == 0"))
    options = ("--on-failure", "shrink", "--max-restarts", "0")
    done = run(hosts, "a,b", *options, script.name, MANY, "kill")
    assert done.returncode == 128 + signal.SIGKILL
    assert "the others cannot go on: they meet at the machine of rank 0 on a" in done.stderr
    assert "rank 0 on a failed first, killed by SIGKILL" in done.stderr


def test_what_has_left_its_process_group_ends_too(hosts: SshHosts) -> None:
    script = hosts.write(
        "train.py",
        "import subprocess, sys\n"
        f"code = 'import time; time.sleep(1000)'\n"
        f"subprocess.Popen([sys.executable, '-c', code, '{MARK}'], start_new_session=True)\n" + ENDLESS,
    )
    with started(hosts, "a,b", script.name) as job:
        assert len(marked()) > 4, "workers, the command and its parts, and daemons"
        job.process.send_signal(signal.SIGINT)
        assert seconds_to_end(time.monotonic()) < END_S * SLOWED


def test_an_agent_that_stands_still_is_given_up(hosts: SshHosts) -> None:
    script = hosts.write("train.py", ENDLESS)
    with started(hosts, "a,b", script.name) as job:
        # Of ssh, sh and the agent, which all have its name among their arguments, it is the one that has workers.
        stopped = sorted({parent_of(pid) for pid in marked()} & set(agents()))[:1]
        assert stopped
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert job.process.wait(60) != 0
            assert "its agent has said nothing for 10 s" in job.text
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_nothing_is_lost_while_nobody_reads(hosts: SshHosts) -> None:
    script = hosts.write(
        "train.py",
        "import os, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('RESULT')\n"
        "    sys.exit('the last words')\n"
        "for number in range(100_000):\n"
        "    print('x' * 60, number)\n",
    )
    command = hosts.command("a:2", script.name)
    with subprocess.Popen(command, cwd=hosts.work, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(6)  # nobody reads
        out, errors = process.communicate(timeout=60)
    assert b"[1 a] RESULT" in out
    assert b"the last words" in errors
    assert process.returncode == 1


def test_a_killed_command_leaves_no_files(hosts: SshHosts) -> None:
    script = hosts.write("train.py", ENDLESS)
    folders = set(Path("/tmp").glob("poseidon-run-*"))
    with started(hosts, "a", script.name) as job:
        assert set(Path("/tmp").glob("poseidon-run-*")) > folders
        job.process.kill()
        job.process.wait()
        assert happens(lambda: set(Path("/tmp").glob("poseidon-run-*")) <= folders, 10.0)


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


def test_a_secret_that_the_configuration_file_names(hosts: SshHosts) -> None:
    script = hosts.write("train.py", "import os; print(os.environ['POSEIDON_SECRET'])\n")
    secret = hosts.folder / "secret"
    secret.write_text("a-secret-in-a-file-123456\n")
    secret.chmod(0o600)
    hosts.write("poseidon.toml", f'secret_file = "{secret}"\n')
    done = run(hosts, "a", script.name)
    assert done.stdout == "[0 a] a-secret-in-a-file-123456\n", done.stderr
