"""The admin port of real `poseidon server` processes, with real workers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import poseidon
import workers
from poseidon.admin import Address, AdminClient
from poseidon.admin.service import JOB_FIELDS, SERVER_FIELDS, metrics_text
from poseidon.cli.main import app
from poseidon.errors import InvalidArgument, PoseidonError, Refused, Unreachable
from poseidon.launch import free_port
from server_process import started_server
from waiting import IN_PROGRAMS, compute_for, wait_until

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
VALUE_COUNT = 100_000


class Running:
    """A server process with an admin port."""

    def __init__(self, process: subprocess.Popen[str], start: dict[str, Any], token: str | None = None) -> None:
        self.process = process
        self.address = start["address"]
        self.admin = Address.parse(start["admin"])
        self.client = AdminClient(self.admin, token)

    def ask(self, method: str, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection(self.admin.host, self.admin.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
            response = connection.getresponse()
            return response.status, response.read().decode(), dict(response.getheaders())

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {job["name"]: job for job in self.client.jobs()["jobs"]}

    def wait_for(self, condition: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
        wait_until(lambda: condition(self.jobs()), lambda: f"other jobs than {self.jobs()}", every=0.05)


@contextlib.contextmanager
def running(*arguments: str, token: str | None = None, stderr: int | None = None) -> Iterator[Running]:
    with started_server("--admin", "0", "--server-cores", "2", *arguments, stderr=stderr) as (process, start):
        yield Running(process, start, token)


def train(port: int, address: str, job: str, until: str, secret: str | None = None) -> str:
    """Exchanges whole numbers until the file is there; returns the error that ended it."""
    given = {} if secret is None else {"secret": secret}
    try:
        with poseidon.connect(servers=[address], master_port=port, job=job, timeout=20, **given) as exchange:
            exchange.declare({"w": np.zeros(VALUE_COUNT, "float32"), "is over": np.zeros(1, "float32")})
            over = np.zeros(1, "float32")
            while not over[0]:
                array = np.full(VALUE_COUNT, exchange.rank + 1.0, "float32")
                exchange.push_pull("w", array)
                assert np.all(array == (exchange.world_size + 1) / 2)
                compute_for(0.02)
                over[0] = os.path.exists(until)
                exchange.push_pull("is over", over)  # on all ranks in the same step
    except PoseidonError as error:
        return f"{error.code}: {error}"
    return ""


class Training(threading.Thread):
    """A job that trains meanwhile."""

    def __init__(self, server: Running, job: str, folder: Path, world_size: int = 2, secret: str | None = None) -> None:
        super().__init__()
        self.errors: list[str] = []
        self._until = folder / f"until-{id(self)}"
        self._arguments = (world_size, train, free_port(), server.address, job, str(self._until), secret)
        self.start()

    def run(self) -> None:
        self.errors = workers.run_fresh(*self._arguments)

    def ended(self) -> list[str]:
        """What each worker said when the job has ended by itself."""
        self.join(60)
        assert not self.is_alive()
        return self.errors

    def end(self) -> list[str]:
        """Lets the job end."""
        self._until.touch()
        return self.ended()


def wait_until_nothing_is_held(server: Running) -> None:
    # The last answers leave after their job.
    wait_until(lambda: not server.client.jobs()["memory_bytes"], "memory to be given back", every=0.05)


def test_jobs_and_metrics_tell_what_workers_do(tmp_path: Path) -> None:
    with running("--memory-limit", "100mb") as server:
        assert server.jobs() == {}
        assert server.ask("GET", "/healthz")[:2] == (200, "ok\n")
        assert server.ask("GET", "/readyz")[:2] == (200, "ready\n")
        name = "job"
        training = Training(server, name, tmp_path)
        server.wait_for(lambda jobs: name in jobs and jobs[name]["bytes_sent"] > 8 * VALUE_COUNT)
        job = server.jobs()[name]
        assert (job["secret"], job["generation"], job["worker_count"], job["connected_count"]) == (0, 1, 2, 2)
        assert job["bytes_received"] > 8 * VALUE_COUNT
        assert job["memory_limit_bytes"] in (100 << 20, 100_000_000)
        assert 0 < job["memory_bytes"] <= job["memory_limit_bytes"]
        assert 0 <= job["silent_s"] <= job["age_s"] < 60
        status, text, headers = server.ask("GET", "/metrics")
        assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        check_metrics(text)
        assert 'poseidon_job_connected_workers{job="job",secret="0"} 2\n' in text
        assert training.end() == ["", ""]
        server.wait_for(lambda jobs: not jobs)  # whose last worker has gone
        wait_until_nothing_is_held(server)
        report = server.client.jobs()
        assert report["bytes_received"] > job["bytes_received"]


def check_metrics(text: str) -> None:
    """Every sample has its HELP and TYPE before it, all of one name stand together, and counters end in _total."""
    kinds: dict[str, str] = {}
    names: list[str] = []
    for line in text.removesuffix("\n").split("\n"):
        if match := re.fullmatch(r"# HELP (\w+) \S.*", line):
            assert match[1] not in names
            names.append(match[1])
        elif match := re.fullmatch(r"# TYPE (\w+) (counter|gauge)", line):
            assert match[1] == names[-1]
            kinds[match[1]] = match[2]
        else:
            sample = re.fullmatch(
                r'(\w+)(\{\w+="(?:[^"\\]|\\["\\n])*"(?:,\w+="[^"]*")*\})? -?\d+(\.\d+)?(e-?\d+)?', line
            )
            assert sample, line
            assert sample[1] == names[-1]
    assert len(names) == len(kinds) > 10
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())


def test_metrics_escape_what_a_cpp_program_calls_its_job() -> None:
    job = {**dict.fromkeys(JOB_FIELDS, 0), "name": 'a "quoted" \\ job', "state": "running"}
    text = metrics_text({**dict.fromkeys(SERVER_FIELDS, 0), "draining": False, "jobs": [job]})
    check_metrics(text)
    assert 'poseidon_job_workers{job="a \\"quoted\\" \\\\ job",secret="0"} 0\n' in text


def test_a_drained_server_takes_no_new_job_and_ends_with_its_last(tmp_path: Path) -> None:
    with running() as server:
        training = Training(server, "old", tmp_path)
        server.wait_for(lambda jobs: "old" in jobs and jobs["old"]["connected_count"] == 2)
        assert server.client.drain()["draining"] is True
        assert server.ask("GET", "/readyz")[:2] == (503, "draining\n")
        assert server.ask("GET", "/healthz")[0] == 200
        (error,) = Training(server, "new", tmp_path, 1).ended()
        assert "this server is being drained and takes no new job; give job 'new' other servers" in error
        assert server.process.poll() is None
        assert training.end() == ["", ""]
        assert server.process.wait(timeout=20) == 0


def test_a_server_without_jobs_ends_when_it_is_drained() -> None:
    with running() as server:
        server.client.drain()
        assert server.process.wait(timeout=20) == 0


def test_an_evicted_job_fails_alone(tmp_path: Path) -> None:
    with running(stderr=subprocess.PIPE) as server:
        evicted, other = Training(server, "hog_1.x", tmp_path), Training(server, "other", tmp_path)
        server.wait_for(lambda jobs: len(jobs) == 2 and all(job["bytes_sent"] > 0 for job in jobs.values()))
        assert server.client.evict("hog_1.x") == {"evicted": "hog_1.x", "secret": 0}
        server.wait_for(lambda jobs: list(jobs) == ["other"])
        for error in evicted.ended():
            assert error.startswith("evicted: ")
            assert "the operator of this server has evicted job 'hog_1.x'" in error
        assert other.end() == ["", ""]
        server.wait_for(lambda jobs: not jobs)
        wait_until_nothing_is_held(server)
        again = Training(server, "hog_1.x", tmp_path)  # another run may come
        assert again.end() == ["", ""]
        with pytest.raises(Refused, match="this server has no job 'nobody'"):
            server.client.evict("nobody")
        server.process.terminate()
        _, told = server.process.communicate(timeout=20)
        assert "job 'hog_1.x' is evicted, as 127.0.0.1 asks" in told


KILLED = """
import os, signal, sys, numpy as np, poseidon
with poseidon.connect(servers=[sys.argv[1]], job="lost") as exchange:
    exchange.declare({"w": np.zeros(4, "float32")})
    exchange.push_pull("w", np.zeros(4, "float32"))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_job_that_has_lost_its_worker_is_listed_and_can_be_evicted() -> None:
    with running() as server:
        ended = subprocess.run([sys.executable, "-c", KILLED, server.address], timeout=60, check=False)
        assert ended.returncode == -signal.SIGKILL
        server.wait_for(lambda jobs: [job["state"] for job in jobs.values()] == ["lost"])
        (lost,) = server.jobs().values()
        assert (lost["connected_count"], lost["worker_count"]) == (0, 1)
        assert 0 <= lost["silent_s"] < 60
        text = server.ask("GET", "/metrics")[1]
        assert "poseidon_server_lost_jobs 1\n" in text
        assert "poseidon_server_jobs 0\n" in text
        server.client.evict("lost")
        assert server.jobs() == {}


RECOVERING = f"""{IN_PROGRAMS}
import poseidon.torch as poseidon, torch
poseidon.init()
model = poseidon.DistributedDataParallel(torch.nn.Linear(4, 4))
recovery = poseidon.Recovery(model)
while recovery.until(10**6):
    with recovery.attempt():
        model(torch.ones(1, 4)).sum().backward()
        compute_for(0.02)
"""


def test_the_launcher_does_not_start_an_evicted_job_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RECOVERING)
    with running() as server:
        command = [sys.executable, "-m", "poseidon", "run", "-n", "2", "--job", "evicted", "--on-failure", "rejoin"]
        command += ["--servers", server.address, str(script)]
        secretless = {**os.environ, "POSEIDON_SECRET": ""}
        with subprocess.Popen(command, env=secretless, stderr=subprocess.PIPE, text=True) as launcher:
            server.wait_for(lambda jobs: any(job["bytes_sent"] > 0 for job in jobs.values()))
            server.client.evict("evicted")
            _, told = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "the operator of this server has evicted job 'evicted'" in told
    assert "started again (restart" not in told


def test_tenants_with_jobs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    secrets = ["0123456789abcdef", "fedcba9876543210"]
    path = tmp_path / "secrets"
    path.touch(mode=0o600)
    path.write_text("\n".join(secrets))
    with running("--secret-file", str(path)) as server:
        first, second = (Training(server, "same", tmp_path, 1, secret) for secret in secrets)
        wait_until(lambda: [job["secret"] for job in server.client.jobs()["jobs"]] == [1, 2], "both jobs", every=0.05)
        with pytest.raises(Refused, match="jobs of the secrets 1 and 2 are named 'same'"):
            server.client.evict("same")
        assert server.client.evict("same", 2) == {"evicted": "same", "secret": 2}
        assert "has evicted job 'same'" in second.ended()[0]
        assert first.end() == [""]


def test_the_commands_ask_the_admin_port(tmp_path: Path) -> None:
    with running() as server:
        training = Training(server, "my-job", tmp_path)
        server.wait_for(lambda jobs: any(job["bytes_sent"] > 0 for job in jobs.values()))
        admin = ["--admin", str(server.admin)]
        table = CliRunner().invoke(app, ["server", "jobs", *admin])
        assert table.exit_code == 0
        assert "my-job" in table.output
        assert "2 of 2" in table.output
        as_json = CliRunner().invoke(app, ["server", "jobs", *admin, "--json"])
        assert [job["name"] for job in json.loads(as_json.output)["jobs"]] == ["my-job"]
        drained = CliRunner().invoke(app, ["server", "drain", *admin])
        assert drained.output == "The server takes no new job. It ends when these jobs have: 'my-job'.\n"
        assert "The server is draining" in CliRunner().invoke(app, ["server", "jobs", *admin]).output
        evicted = CliRunner().invoke(app, ["server", "evict", "my-job", *admin])
        assert evicted.output == "Job 'my-job' is evicted. It may come back when it is started again.\n"
        assert all("evicted" in error for error in training.ended())
        assert server.process.wait(timeout=20) == 0
    with pytest.raises(Unreachable, match="no admin port answers at 127"):
        server.client.jobs()


def refusal(*arguments: str) -> str:
    """What a command says that ends with status 1."""
    command = [sys.executable, "-m", "poseidon", "server", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_bad_arguments_are_one_line() -> None:
    assert "--admin is 'x': give a port" in refusal("--admin", "x")
    assert "can be reached from other machines" in refusal("--admin", "0.0.0.0:0")
    assert "can be reached from other machines" in refusal("--admin", "[::]:0")
    assert "give --admin, too" in refusal("--admin-token-file", "x")
    assert "options before `jobs` are of a server that starts" in refusal("--timeout", "3", "jobs")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "choose another port" in refusal("--admin", str(taken.getsockname()[1]))


def test_an_address_is_a_port_or_a_host_and_a_port() -> None:
    assert Address.parse("7070") == Address("127.0.0.1", 7070)
    assert Address.parse("localhost:1").is_loopback
    assert str(Address.parse("[::1]:7070")) == "[::1]:7070"
    assert not Address.parse("10.0.0.1:7070").is_loopback
    for text in ("", ":7070", "host:", "1.2.3.4:70700", "1.2.3.4:-1", "٣"):
        with pytest.raises(InvalidArgument, match="--admin is"):
            Address.parse(text)


def test_beyond_this_machine_it_takes_a_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o644)
    arguments = ("--admin", "0.0.0.0:0", "--admin-token-file", str(path))
    assert f"the admin_token_file {path} can be read or written by others" in refusal(*arguments)
    path.chmod(0o600)
    with started_server(*arguments) as (process, start):
        start["admin"] = start["admin"].replace("0.0.0.0", "127.0.0.1")
        server = Running(process, start, "0123456789abcdef")
        assert server.jobs() == {}
        for given in ({}, {"Authorization": "Bearer 0123456789abcdeF"}, {"Authorization": "Bearer é"}):
            for method, path_of_request in (("GET", "/jobs"), ("GET", "/metrics"), ("POST", "/drain")):
                status, text, headers = server.ask(method, path_of_request, **given)
                assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
                why = "the token is not that of" if given else "needs its token"
                assert why in json.loads(text)["error"]
        assert server.ask("GET", "/healthz")[0] == 200
        assert server.ask("GET", "/readyz")[:2] == (200, "ready\n")  # nothing has drained it
        with pytest.raises(Refused, match="needs its token"):
            AdminClient(server.admin).jobs()


def test_requests_that_do_not_fit_are_refused() -> None:
    with running() as server:
        assert server.ask("GET", "/nothing")[0] == 404
        assert server.ask("GET", "/drain")[0] == 405
        assert server.ask("POST", "/jobs")[0] == 405
        assert server.ask("PUT", "/drain")[0] == 405
        assert server.ask("PATCH", "/drain")[0] == 501
        assert server.ask("HEAD", "/readyz")[:2] == (200, "")
        assert server.ask("POST", "/drain", Origin="http://evil.example")[0] == 403
        assert server.ask("POST", "/drain", Content_Length="99999999999999")[0] == 413
        assert server.ask("POST", "/drain", Content_Length="-1")[0] == 400
        assert server.ask("POST", "/jobs//evict")[0] == 404
        assert server.client.jobs()["draining"] is False


def test_slow_and_hostile_clients_cannot_stop_it(tmp_path: Path) -> None:
    with running() as server, contextlib.ExitStack() as stack:
        address = (server.admin.host, server.admin.port)

        def connect(first: bytes) -> socket.socket:
            client = stack.enter_context(socket.create_connection(address, timeout=20))
            with contextlib.suppress(OSError):
                client.sendall(first)
            return client

        flood = connect(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for _ in range(200):
                flood.sendall(b"x: " + b"y" * 1000 + b"\r\n")
        connect(b"\x16\x03\x01\x00\xff" * 100 + b"\r\n\r\n")
        stalled = [connect(b"GET /jobs HT") for _ in range(100)]
        assert Training(server, "job", tmp_path, 1).end() == [""]  # what the server is for goes on
        for client in stalled:  # the time of all of them is over, sooner or later
            assert select.select([client], [], [], 20)[0]
        server.wait_for(lambda jobs: not jobs)
        trickling = connect(b"GET /jobs HT")
        began = time.monotonic()
        while not select.select([trickling], [], [], 0.5)[0]:  # a byte now and then does not buy time
            assert time.monotonic() < began + 9
            with contextlib.suppress(OSError):
                trickling.sendall(b"x")
        for _ in range(3):
            connect(b"GET /jobs HTTP/1.0\r\n")
        server.process.terminate()
        assert server.process.wait(timeout=4) == 0  # it waits for no client
