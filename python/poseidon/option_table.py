"""The table of options: names, types, defaults, and what is allowed. `options.py` resolves them."""

from __future__ import annotations

import math
import re

from poseidon.dscp import MOST_CLASSES
from poseidon.option_kinds import AUTO, BYTES, INTEGER, LIST, NUMBER, SECONDS, SIZE_OR_AUTO, TEXT, Option, choice, size


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(colon and host and port.isdigit() and 1 <= int(port) <= 65535)


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


OPTIONS: tuple[Option, ...] = (
    Option(
        "interfaces",
        LIST,
        (),
        "Addresses or devices to listen on, all used at once; none: the one that leads to MASTER_ADDR.",
        "a list of addresses or devices separated by commas",
    ),
    Option(
        "servers",
        LIST,
        (),
        "Dedicated servers, host:port separated by commas; none: every worker hosts a shard.",
        "a list of host:port separated by commas",
        check=lambda value: all(_is_address(address) for address in value),
    ),
    choice(
        "transport",
        "auto",
        ("auto", "tcp", "shm", "ucx"),
        "What carries messages: shared memory within a host and TCP between hosts, or one of them for all.",
    ),
    Option(
        "server_cores",
        INTEGER,
        None,  # depends on the machine: _server_cores
        "Threads of each server, each with its own chunks; 0: the worker's thread; default: by this worker's cores.",
        "a whole number from 0 to 64",
        check=lambda value: 0 <= value <= 64,
    ),
    Option(
        "flows",
        INTEGER,
        1,
        "Connections from each worker to each server core.",
        "a whole number from 1 to 16",
        check=lambda value: 1 <= value <= 16,
    ),
    Option(
        "chunk_bytes",
        SIZE_OR_AUTO,
        256 << 10,
        "Largest piece of a tensor that one server core holds, or auto: measured at the start.",
        "auto, or a size of at least 64 bytes such as 65536, 512k or 2MiB",
        check=lambda value: value == AUTO or 64 <= value <= 1 << 34,
    ),
    size("small_bytes", 32 << 10, 0, "Tensors up to this size are grouped."),
    size("group_bytes", 1 << 20, 1, "A group of small tensors is closed when it reaches this size."),
    choice(
        "schedule",
        "wait_free",
        ("wait_free", "sequential"),
        "When a layer's exchange starts: with its gradient (wait-free), or after the whole backward pass.",
    ),
    choice(
        "partition",
        "balanced",
        ("balanced", "coarse"),
        "How tensors are spread over the shards: even chunks, or a whole tensor per shard.",
    ),
    choice(
        "aggregation",
        "streaming",
        ("streaming", "at_once", "wide"),
        "How servers add: while bytes arrive, when all parts are in, or with many threads on one array (baseline).",
    ),
    choice(
        "reduce_order",
        "rank",
        ("rank", "arrival"),
        "In which order the workers' parts are added: by rank (bitwise repeatable) or as they arrive.",
    ),
    choice(
        "assignment",
        "chunk",
        ("chunk", "worker"),
        "What a server core is responsible for: its chunks, or its workers (baseline).",
    ),
    Option(
        "priority_classes",
        INTEGER,
        2,
        "Flows between each pair of peers, by urgency; the network may tell them apart by their marks.",
        f"a whole number from 1 to {MOST_CLASSES}",
        check=lambda value: 1 <= value <= MOST_CLASSES,
    ),
    Option(
        "dscp",
        LIST,
        (),
        "Code points that mark the classes, the most urgent first; none: 46, 34, 26, …, and 0 for the last.",
        "a list of numbers from 0 to 63 separated by commas, one for each of priority_classes",
        check=lambda value: all(mark.isdigit() and int(mark) < 64 for mark in value),
    ),
    choice(
        "priority_order",
        "urgency",
        ("urgency", "fifo", "reverse", "random"),
        "What DistributedOptimizer sends first: what the next forward pass needs first, or a baseline.",
    ),
    Option(
        "priority_threshold",
        TEXT,
        AUTO,
        "Urgency above which a layer is in the first class; auto: searched in the first steps; coarse: all but linear.",
        "auto, coarse or a number from 0 to 1",
        check=lambda value: value in (AUTO, "coarse") or _is_share(value),
    ),
    choice(
        "scheme",
        "auto",
        ("auto", "ps", "sfb", "adam"),
        "How gradients are exchanged: the cheapest for each layer, or one scheme for all.",
    ),
    Option(
        "compute_threads",
        INTEGER,
        None,  # depends on the machine: _compute_threads
        "Threads that multiply factors; default: this worker's share of the cores, at most 8.",
        "a whole number from 1 to 256",
        check=lambda value: 1 <= value <= 256,
    ),
    choice(
        "stragglers",
        "wait",
        ("wait", "drop"),
        "What a step does about workers that come late: wait for them, or end without them.",
    ),
    Option(
        "straggler_factor",
        NUMBER,
        3.0,
        "With stragglers=drop: how many deviations after the median worker a step ends.",
        "a number from 0 to 1000000",
        check=lambda value: 0 <= value <= 1e6,
    ),
    Option(
        "straggler_steps",
        INTEGER,
        8,
        "With stragglers=drop: a worker that is so many steps behind is waited for.",
        "a whole number from 1 to 64",
        check=lambda value: 1 <= value <= 64,
    ),
    choice(
        "consistency",
        "bsp",
        ("bsp", "ssp", "async"),
        "Whom a worker waits for where servers update: all others' step, nobody more than staleness behind, or nobody.",
    ),
    Option(
        "staleness",
        INTEGER,
        3,
        "With consistency=ssp: how many steps a worker may be ahead of the slowest one.",
        "a whole number from 0 to 1048576",
        check=lambda value: 0 <= value <= 1 << 20,
    ),
    choice(
        "on_failure",
        "abort",
        ("abort", "rejoin", "shrink"),
        "What the others do when a worker is lost: end, wait for its replacement, or go on with fewer.",
    ),
    Option(
        "min_workers",
        INTEGER,
        1,
        "With on_failure=shrink: fewer workers than these wait for more.",
        "a whole number, 1 or more",
        check=lambda value: value >= 1,
    ),
    Option(
        "memory_limit",
        BYTES,
        0,
        "Bytes that a job may hold on one server; 0: no limit of its own.",
        "a size such as 512MiB or 8GiB, or 0",
        check=lambda value: 0 <= value < 1 << 62,
    ),
    Option(
        "server_memory",
        BYTES,
        0,
        "Bytes that all jobs may hold on one server; 0: no limit, or half of the machine's memory for `poseidon "
        "server`.",
        "a size such as 512MiB or 8GiB, or 0",
        check=lambda value: 0 <= value < 1 << 62,
    ),
    Option(
        "max_jobs",
        INTEGER,
        64,
        "Jobs that `poseidon server` takes at once, for each secret.",
        "a whole number from 1 to 1000000",
        check=lambda value: 1 <= value <= 1_000_000,
    ),
    Option(
        "flight_record",
        TEXT,
        None,  # depends on the machine: the system's directory for temporary files
        "Directory for flight records, which say what a process knew when its job failed; off: none are written.",
        "a directory, or off",
        check=bool,
    ),
    Option(
        "checkpoint_dir",
        TEXT,
        "",
        "Directory, shared by all servers of a job, where they save parameters and optimizer state; none: nothing is.",
        "the path of a directory",
    ),
    Option(
        "checkpoint_every",
        INTEGER,
        100,
        "Steps from one checkpoint of the servers to the next.",
        "a whole number, 1 or more",
        check=lambda value: 1 <= value < 1 << 32,
    ),
    Option(
        "checkpoint_keep",
        INTEGER,
        2,
        "Complete checkpoints of the servers that stay.",
        "a whole number, 1 or more",
        check=lambda value: 1 <= value < 1 << 31,
    ),
    Option(
        "timeout",
        SECONDS,
        300.0,
        "Seconds after which waiting for another process is an error.",
        "a number of seconds from 0.1 to 1000000",
        check=lambda value: math.isfinite(value) and 0.1 <= value <= 1e6,
    ),
    Option(
        "secret_file",
        TEXT,
        "",
        "File with the secret that all processes of the job share, readable by its owner alone; "
        "for `poseidon server` one secret a line; none: POSEIDON_SECRET, or no secret.",
        "the path of a file",
    ),
    choice(
        "tls",
        "off",
        ("off", "on"),
        "TLS 1.3 on every TCP connection, with keys made from the secret; the same for all processes and servers.",
    ),
    Option(
        "job",
        TEXT,
        "default",
        "Name of the job; workers of different jobs never talk to each other.",
        "1 to 64 letters, digits, '.', '_' or '-'",
        check=lambda value: re.fullmatch(r"[\w.-]{1,64}", value) is not None,
    ),
)
