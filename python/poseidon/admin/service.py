"""What the admin port of a dedicated server answers for a method and a path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote

from poseidon.admin.answer import Answer, error_answer, json_answer, text_answer, to_read
from poseidon.admin.prometheus import CONTENT_TYPE, Metric, families, family, labels

_PLAIN_BYTES = (  # of a `TrafficStats`, after its bytes as they travelled
    Metric("plain_received_bytes_total", "counter", "plain_bytes_received", "The same from them without coding."),
    Metric("plain_sent_bytes_total", "counter", "plain_bytes_sent", "The same to them without coding."),
)
OF_THE_SERVER = (
    Metric("draining", "gauge", "draining", "1 while the server takes no new job."),
    Metric("received_bytes_total", "counter", "bytes_received", "Bytes from all workers since the server started."),
    Metric("sent_bytes_total", "counter", "bytes_sent", "Bytes to all workers since the server started."),
    *_PLAIN_BYTES,
    Metric("memory_bytes", "gauge", "memory_bytes", "Memory that all jobs hold."),
    Metric("memory_limit_bytes", "gauge", "memory_limit_bytes", "The option server_memory."),
)
OF_A_JOB = (
    Metric("generation", "gauge", "generation", "The job's generation, which rises when it recovers."),
    Metric("workers", "gauge", "worker_count", "Workers that belong to the job."),
    Metric("connected_workers", "gauge", "connected_count", "Workers that are connected to this server."),
    Metric("received_bytes_total", "counter", "bytes_received", "Bytes from the job's workers in this generation."),
    Metric("sent_bytes_total", "counter", "bytes_sent", "Bytes to the job's workers in this generation."),
    *_PLAIN_BYTES,
    Metric("memory_bytes", "gauge", "memory_bytes", "Memory that the job holds."),
    Metric("memory_limit_bytes", "gauge", "memory_limit_bytes", "The option memory_limit; 0 means no limit."),
    Metric("open_chunks", "gauge", "open_chunk_count", "Chunks whose step has begun and not ended."),
    Metric("age_seconds", "gauge", "age_s", "Time since this generation of the job came."),
    Metric("silent_seconds", "gauge", "silent_s", "Time since anything came from any worker of the job."),
)


def metrics_text(report: Mapping[str, Any]) -> str:
    """The text for the answer of /jobs. The labels of a job are its name and the number of its secret."""
    jobs = [job for job in report["jobs"] if job["state"] == "running"]
    lost = len(report["jobs"]) - len(jobs)
    lines = [*family("poseidon_server_jobs", "gauge", "Jobs that have workers here.", [("", len(jobs))])]
    lines += family(
        "poseidon_server_lost_jobs", "gauge", "Jobs that have lost workers and may come back.", [("", lost)]
    )
    lines += families("poseidon_server", OF_THE_SERVER, [("", report)])
    lines += families("poseidon_job", OF_A_JOB, [(labels(job=job["name"], secret=job["secret"]), job) for job in jobs])
    return "\n".join(lines) + "\n"


JOB_FIELDS = ("name", "secret", "state", *(metric.field for metric in OF_A_JOB))
SERVER_FIELDS = tuple(metric.field for metric in OF_THE_SERVER if metric.field != "draining")


class Served(Protocol):
    """A parameter server (`_core.Server`). Any thread calls it."""

    def report(self) -> Any: ...
    def drain(self) -> None: ...
    def draining(self) -> bool: ...
    def evict(self, job: str, secret: int) -> bool: ...


class AdminService:
    """Answers requests about one server. Thread-safe."""

    # What does not need the token: it tells nothing of jobs, and those who ask often cannot send a token.
    open_paths: tuple[str, ...] = ("/healthz", "/readyz")
    risk = "stop every job"

    def __init__(self, server: Served) -> None:
        self._server = server

    def answer(self, method: str, path: str, query: str, source: str) -> Answer:
        """The answer to a request. `path` is still quoted; `source` is who asks."""
        parts = [unquote(part) for part in path.split("/")[1:]]
        if len(parts) == 3 and parts[0] == "jobs" and parts[2] == "evict":
            return self._post_only(path, method, lambda: self._evict(parts[1], query, source))
        if path == "/drain":
            return self._post_only(path, method, lambda: self._drain(source))
        found = {
            "/healthz": lambda: text_answer("ok"),
            "/readyz": self._ready,
            "/jobs": lambda: json_answer(HTTPStatus.OK, self._jobs()),
            "/metrics": lambda: Answer(HTTPStatus.OK, metrics_text(self._jobs()), CONTENT_TYPE),
        }
        return to_read(method, path, found, "; POST /drain, /jobs/NAME/evict")

    @staticmethod
    def _post_only(path: str, method: str, act: Callable[[], Answer]) -> Answer:
        return act() if method == "POST" else error_answer(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes POST only")

    def _ready(self) -> Answer:
        if self._server.draining():
            return text_answer("draining", HTTPStatus.SERVICE_UNAVAILABLE)
        return text_answer("ready")

    def _jobs(self) -> dict[str, Any]:
        report = self._server.report()
        return {
            "draining": self._server.draining(),
            **{name: getattr(report, name) for name in SERVER_FIELDS},
            "jobs": [{name: getattr(job, name) for name in JOB_FIELDS} for job in report.jobs],
        }

    def _drain(self, source: str) -> Answer:
        self._server.drain()
        jobs = self._jobs()
        _log(f"draining, as {source} asks; jobs here: {len(jobs['jobs'])}")
        return json_answer(HTTPStatus.OK, jobs)

    def _evict(self, name: str, query: str, source: str) -> Answer:
        wanted = parse_qs(query).get("secret", [""])[0]
        secrets = [job.secret for job in self._server.report().jobs if job.name == name]
        if wanted:
            secrets = [secret for secret in secrets if str(secret) == wanted]
        if len(secrets) > 1:
            told = " and ".join(str(secret) for secret in secrets)
            why = f"jobs of the secrets {told} are named '{name}': say which one you mean with --secret N (?secret=N)"
            return error_answer(HTTPStatus.CONFLICT, why)
        if not secrets:
            secrets = [int(wanted)] if wanted.isdecimal() and len(wanted) < 6 else [0, 1]
        evicted = next((secret for secret in secrets if self._server.evict(name, secret)), None)
        if evicted is None:
            of = f" of secret {wanted}" if wanted else ""
            why = f"this server has no job '{name}'{of}: see `poseidon server jobs` for those that it has"
            return error_answer(HTTPStatus.NOT_FOUND, why)
        _log(f"job '{name}' is evicted, as {source} asks")
        return json_answer(HTTPStatus.OK, {"evicted": name, "secret": evicted})


def _log(text: str) -> None:
    print(f"poseidon server: {text}", file=sys.stderr, flush=True)
