"""What a server knows of its jobs, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poseidon.admin.prometheus import Metric, families, family, labels

OF_THE_SERVER = (
    Metric("draining", "gauge", "draining", "1 while the server takes no new job."),
    Metric("received_bytes_total", "counter", "bytes_received", "Bytes from all workers since the server started."),
    Metric("sent_bytes_total", "counter", "bytes_sent", "Bytes to all workers since the server started."),
    Metric("memory_bytes", "gauge", "memory_bytes", "Memory that all jobs hold."),
    Metric("memory_limit_bytes", "gauge", "memory_limit_bytes", "The option server_memory."),
)
OF_A_JOB = (
    Metric("generation", "gauge", "generation", "The job's generation, which rises when it recovers."),
    Metric("workers", "gauge", "worker_count", "Workers that belong to the job."),
    Metric("connected_workers", "gauge", "connected_count", "Workers that are connected to this server."),
    Metric("received_bytes_total", "counter", "bytes_received", "Bytes from the job's workers in this generation."),
    Metric("sent_bytes_total", "counter", "bytes_sent", "Bytes to the job's workers in this generation."),
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
