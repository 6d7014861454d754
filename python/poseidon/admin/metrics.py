"""What a server knows of its jobs, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from poseidon.admin.prometheus import family, labels


@dataclass(frozen=True)
class _Metric:
    name: str
    kind: str
    field: str
    help: str


_OF_THE_SERVER = (
    _Metric("draining", "gauge", "draining", "1 while the server takes no new job."),
    _Metric("received_bytes_total", "counter", "bytes_received", "Bytes from all workers since the server started."),
    _Metric("sent_bytes_total", "counter", "bytes_sent", "Bytes to all workers since the server started."),
    _Metric("memory_bytes", "gauge", "memory_bytes", "Memory that all jobs hold."),
    _Metric("memory_limit_bytes", "gauge", "memory_limit_bytes", "The option server_memory."),
)
_OF_A_JOB = (
    _Metric("generation", "gauge", "generation", "The job's generation, which rises when it recovers."),
    _Metric("workers", "gauge", "worker_count", "Workers that belong to the job."),
    _Metric("connected_workers", "gauge", "connected_count", "Workers that are connected to this server."),
    _Metric("received_bytes_total", "counter", "bytes_received", "Bytes from the job's workers in this generation."),
    _Metric("sent_bytes_total", "counter", "bytes_sent", "Bytes to the job's workers in this generation."),
    _Metric("memory_bytes", "gauge", "memory_bytes", "Memory that the job holds."),
    _Metric("memory_limit_bytes", "gauge", "memory_limit_bytes", "The option memory_limit; 0 means no limit."),
    _Metric("open_chunks", "gauge", "open_chunk_count", "Chunks whose step has begun and not ended."),
    _Metric("age_seconds", "gauge", "age_s", "Time since this generation of the job came."),
    _Metric("silent_seconds", "gauge", "silent_s", "Time since anything came from any worker of the job."),
)


def metrics_text(report: Mapping[str, Any]) -> str:
    """The text for the answer of /jobs. The labels of a job are its name and the number of its secret."""
    jobs = [job for job in report["jobs"] if job["state"] == "running"]
    lost = len(report["jobs"]) - len(jobs)
    lines = [*family("poseidon_server_jobs", "gauge", "Jobs that have workers here.", [("", len(jobs))])]
    lines += family(
        "poseidon_server_lost_jobs", "gauge", "Jobs that have lost workers and may come back.", [("", lost)]
    )
    for metric in _OF_THE_SERVER:
        lines += family(f"poseidon_server_{metric.name}", metric.kind, metric.help, [("", report[metric.field])])
    for metric in _OF_A_JOB:
        samples = [(labels(job=job["name"], secret=job["secret"]), job[metric.field]) for job in jobs]
        lines += family(f"poseidon_job_{metric.name}", metric.kind, metric.help, samples)
    return "\n".join(lines) + "\n"
