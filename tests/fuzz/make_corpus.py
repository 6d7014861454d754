#!/usr/bin/env python3
"""Writes the corpora of the fuzzers that read messages (decode, messages, tcp_receive), coded values or checkpoints.

The bytes are put together here from docs/wire-format.md and docs/checkpoints.md, not by the library's own encoder. Run
it again when a format changes: python tests/fuzz/make_corpus.py
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"

KINDS = {
    "hello": 1,
    "push": 2,
    "result": 3,
    "factors": 4,
    "refuse": 5,
    "abort": 6,
    "goodbye": 7,
    "rule": 8,
    "assign": 9,
    "pull": 10,
    "value": 11,
    "units": 12,
    "restore": 13,
    "rows": 14,
    "topk": 15,
    "onebit": 16,
    "heartbeat": 17,
    "rate": 18,
    "local_push": 19,
    "local_result": 20,
    "hold": 21,
    "waiting": 22,
    "piece": 23,
    "ready": 24,
}
FLOAT32 = 1
INT64 = 7
PREFERS_PLAIN = 0x80
# How a stream is cut into reads (tcp_receive_fuzz.cc): by the first byte of its input.
READ_SIZES = (0, 5, 7)


def body(dtype: int = 0, flags: int = 0, code: int = 0, numbers: bytes = b"") -> bytes:
    """The 28 bytes that belong to the kind."""
    return (struct.pack("<BBBx", dtype, flags, code) + numbers).ljust(28, b"\0")


def header(kind: str, body_bytes: bytes, payload_bytes: int = 0, priority: int = 0, coding: int = 0) -> bytes:
    """64 bytes; rank 1, unit 2, chunk 5, step 3."""
    sizes = payload_bytes | coding << 56
    start = struct.pack("<4sBBHQQIII", b"PSD1", 5, KINDS[kind], priority, sizes, 3, 1, 2, 5)
    return start + body_bytes


def contribution(
    flags: int = 0, divisor: int = 4, factor_count: int = 0xFFFFFFFF, rows: int = 0, cols: int = 0, rule_digest: int = 0
) -> bytes:
    """The body of a push, a factors, a rows, a topk or an onebit message of four workers.

    A push has the digest of its base where others have rows and columns.
    """
    return body(FLOAT32, flags, numbers=struct.pack("<IIIIII", 4, divisor, factor_count, rows, cols, rule_digest))


def hello(pace: int = 0, bound: int = 0, factor: float = 0.0, generation: int = 1, priority_class: int = 0) -> bytes:
    """The body of a hello of the second flow."""
    numbers = struct.pack("<IIIIIf", 4, generation, 1, priority_class, bound, factor)
    return body(code=pace, numbers=numbers)


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def rule(name: str = "", aggregator: str = "sum", **values: float) -> bytes:
    """The payload of a rule that keeps the gradient."""
    names = crc32c("".join(f"{value}\n" for value in values).encode()) if values else 0
    numbers = [*values.values(), *[0.0] * (12 - len(values))]
    return struct.pack("<24sBBxxI12d24s", name.encode(), 1, len(values), names, *numbers, aggregator.encode())


def units(*entries: tuple[int, int, int, int, bytes]) -> bytes:
    """The payload of units of run 7 without a checkpoint."""
    texts = [struct.pack("<IIQQI", *entry[:4], len(entry[4])) + entry[4] for entry in entries]
    return struct.pack("<QQ", 7, 0) + b"".join(texts)


def messages() -> dict[str, tuple[str, bytes, bytes]]:
    """By name: kind, body and payload of what is taken."""
    data = bytes(range(48))
    sgd = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 1e-4, "nesterov": 1.0, "maximize": 0.0}
    adam = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "maximize": 0.0}
    return {
        "hello": ("hello", hello(), b"a job\n"),
        "hello_run": ("hello", hello(generation=0xFFFFFFFF), b"default\n0123456789abcdef"),
        "hello_server": ("hello", hello(), b"a job\nrun\n10.0.0.1:5000\n[fe80::1]:6\nshm/1"),
        "hello_of_a_class": ("hello", hello(priority_class=3), b"a job\n"),
        "hello_drop": ("hello", hello(1, 8, 3.0), b"a job\n"),
        "hello_ssp": ("hello", hello(2, 4), b"a job\n"),
        "hello_async": ("hello", hello(3), b"a job\n"),
        "hello_unknown_pace": ("hello", hello(9, 1, 1.5), b"a job\n"),
        "hello_empty_lines": ("hello", hello(), b"\n\n\n"),
        "push": ("push", contribution(), data),
        "push_absent": ("push", contribution(1, factor_count=0), b""),
        "push_stored_without_result": ("push", contribution(8 | 16), data),
        "push_of_another_rule": ("push", contribution(8, rule_digest=0x12345678), data),
        "push_with_base": ("push", contribution(8, rows=0x89ABCDEF, cols=0x01234567), data),
        "push_transient": ("push", contribution(4), data),
        "push_excluded": ("push", contribution(1 | 32, factor_count=0), b""),
        "result": ("result", body(FLOAT32, numbers=struct.pack("<II", 12, 0)), data),
        "result_difference": ("result", body(FLOAT32, 4, numbers=struct.pack("<II", 12, 0)), data),
        "result_late": ("result", body(FLOAT32, 3, numbers=struct.pack("<II", 12, 5)), b""),
        "factors": ("factors", contribution(factor_count=2, rows=4, cols=2), data),
        "factors_dense": ("factors", contribution(2, rows=4, cols=3), data),
        "factors_too_large": ("factors", contribution(rows=0xFFFFFFFF, cols=0xFFFFFFFF), data),
        "refuse": ("refuse", body(code=5, numbers=struct.pack("<I", 0)), b"it does not fit"),
        "refuse_departed": ("refuse", body(flags=1, code=3, numbers=struct.pack("<I", 6)), b"rank 6 has left"),
        "refuse_unknown_code": ("refuse", body(code=200, numbers=struct.pack("<I", 0)), b"?"),
        "abort": ("abort", body(code=7), b"out of memory"),
        "abort_planned": ("abort", body(flags=1, code=7), b"the next generation forms"),
        "goodbye": ("goodbye", body(), b""),
        "heartbeat": ("heartbeat", body(numbers=struct.pack("<I", 3)), b""),
        "rate": ("rate", body(numbers=struct.pack("<Q", 12_000_000)), b""),
        "hold": ("hold", body(numbers=struct.pack("<Q", 60_000)), b""),
        "local_push": ("local_push", contribution(), data),
        "local_result": ("local_result", body(FLOAT32, numbers=struct.pack("<II", 12, 0)), data),
        "waiting": ("waiting", body(), b"in step 3 layer 'w' was waiting for the result of chunk 0"),
        "piece": ("piece", body(FLOAT32, 1, numbers=struct.pack("<QQII", 64, 0, 0, 0x1234)), bytes(64)),
        "piece_sent": ("piece", body(INT64, 2, numbers=struct.pack("<QQII", 1 << 20, 0, 7, 0)), b""),
        "ready": ("ready", body(flags=1), b""),
        "rule_none": ("rule", body(), rule()),
        "rule_sgd": ("rule", body(), rule("sgd", **sgd)),
        "rule_adam": ("rule", body(), rule("adam", **adam)),
        "rule_lamb": ("rule", body(), rule("lamb", **adam)),
        "rule_not_finite": ("rule", body(), rule("sgd", **sgd | {"lr": float("inf")})),
        "rule_unknown": ("rule", body(), rule("sgd2", **sgd)),
        "rule_other_values": ("rule", body(), rule("sgd", **adam)),
        "rule_short": ("rule", body(), rule("sgd", **sgd)[:40]),
        "assign": ("assign", body(FLOAT32, numbers=struct.pack("<IQ", 1, 41)), data),
        "pull": ("pull", body(numbers=struct.pack("<I", 2)), b""),
        "value": ("value", body(FLOAT32, numbers=struct.pack("<IQQ", 2, 41, 6)), data),
        "value_absent": ("value", body(FLOAT32, 1, numbers=struct.pack("<IQQ", 0, 0, 0)), b""),
        "units": ("units", body(), units((1, FLOAT32, 400, 100, b"w"), (2, FLOAT32, 64, 64, b"b"))),
        "units_cut": ("units", body(), units((1, FLOAT32, 400, 100, b"weight"))[:-3]),
        "restore": ("restore", body(FLOAT32, numbers=struct.pack("<Q", 2**64 - 1)), b""),
        "rule_aggregator": ("rule", body(), rule("sgd", "median", **sgd)),
        "rows": ("rows", contribution(factor_count=2, rows=4, cols=5), struct.pack("<II", 1, 3) + data[:40]),
        "rows_odd": ("rows", contribution(factor_count=1, rows=4, cols=3), struct.pack("<II", 2, 0) + data[:12]),
        "rows_absent": ("rows", contribution(1, factor_count=0, rows=4, cols=3), b""),
        "rows_dense": ("rows", contribution(2, rows=4, cols=3), data),
        "rows_descending": ("rows", contribution(factor_count=2, rows=4, cols=5), struct.pack("<II", 3, 1) + data[:40]),
        "rows_out_of_range": (
            "rows",
            contribution(factor_count=1, rows=4, cols=3),
            struct.pack("<II", 4, 0) + data[:12],
        ),
        "rows_too_many": ("rows", contribution(factor_count=9, rows=4, cols=3), data),
        "rule_no_aggregator": ("rule", body(), rule("sgd", "", **sgd)),
        "topk": ("topk", contribution(rows=4, cols=3), struct.pack("<IIff", 1, 11, 0.5, -2)),
        "topk_absent": ("topk", contribution(1, factor_count=0), b""),
        "topk_descending": ("topk", contribution(), struct.pack("<IIff", 11, 1, 0.5, -2)),
        "topk_out_of_range": ("topk", contribution(), struct.pack("<IIff", 1, 0xFFFFFFFF, 0.5, -2)),
        "onebit": ("onebit", contribution(rows=4, cols=3), struct.pack("<ff", -0.5, 2) + data + data[:16]),
    }


def rejected() -> dict[str, bytes]:
    """By name: headers that no receiver takes."""
    push = header("push", contribution())
    return {
        "rejected_coding": header("push", contribution(), coding=7),
        "rejected_dtype": header("push", body(99)),
        "rejected_flags": header("local_result", body(FLOAT32, 4)),
        "rejected_kind": push[:5] + bytes([len(KINDS) + 1]) + push[6:],
        "rejected_payload": header("push", contribution(), 2**34 + 1),
        "rejected_priority": header("push", contribution(), priority=1024),
        "rejected_reserved": header("pull", body(numbers=struct.pack("<II", 2, 1))),
        "rejected_version": push[:4] + b"\x02" + push[5:],
    }


def coded_values() -> dict[str, bytes]:
    """By name: blocks of 256 float32 values, as docs/wire-format.md describes them."""
    raw = bytes(range(256)) * 3  # signs and mantissas
    return {
        "zeros": b"\x00\x02\x01",
        "plain": b"\x02" + bytes(1024),
        "one_exponent": b"\x20\x7f\x00" + raw,
        "two_bits_and_escapes": b"\x22\x7f\x02" + raw + b"\x03" + bytes(31) + b"\x03" + bytes(31) + b"\x09\x1f",
        "zeros_between": b"\x2a\x7f\x00" + raw + bytes(32) + b"\x55" * 32,
        "rejected_zero_code": b"\x28\x7f\x00" + raw,
        "rejected_width": b"\x26\x7f\x00" + raw + bytes(192),
        "rejected_escapes": b"\x21\x7f\x05" + raw + bytes(37),
    }


def coded_integers() -> dict[str, bytes]:
    """By name: blocks of 256 integers of 32 bits, as docs/wire-format.md describes them."""

    def head(bits: int, most_bits: int, class_bits: int, above: int) -> bytes:
        return struct.pack("<BBH", 0x20 + bits, most_bits | class_bits << 6, above)

    low, classes = bytes(range(96)), b"\x0f" + bytes(31)
    return {
        "zeros": b"\x00\x02\x01",
        "one_length": head(3, 3, 0, 0) + low,
        "two_classes": head(3, 9, 1, 3) + low + classes + b"\x21\x43\x65",
        "eight_classes": head(9, 20, 3, 6) + bytes(range(256)) + low[:32] + 3 * classes + b"\x21\x43\x65\x87\xa9\x0b",
        "rejected_above": head(3, 9, 1, 4) + low + classes + bytes(4),
        "rejected_classes": head(3, 5, 2, 0) + low + bytes(64),
        "rejected_width": head(3, 33, 2, 0) + low + bytes(64),
    }


def lossless() -> dict[str, bytes]:
    """By name: which values, how many, and coded ones."""
    files = {name: b"\x00\x19" + coded for name, coded in coded_values().items()}  # 1025 float32 values
    return files | {f"integers_{name}": b"\x03\x19" + coded for name, coded in coded_integers().items()}


def coded_streams() -> dict[str, bytes]:
    """By name: a push of 512 float32 values in a segment, as a stream for tcp_receive."""
    streams = {}
    for coding in range(1, 7):
        coded = b"".join(coded_values()[name] for name in ("one_exponent", "two_bits_and_escapes"))
        head = header("push", contribution(), 2048, coding=coding | (PREFERS_PLAIN if coding == 2 else 0))
        segment = struct.pack("<I", len(coded)) + coded
        streams[f"coded_{coding}"] = b"\x05" + (head + segment) * 2
        streams[f"rejected_coded_{coding}"] = b"\x05" + head + struct.pack("<I", 4000) + coded
    return streams


def checkpoint(
    units: Sequence[tuple[bytes, int, int, bytes]], records: Sequence[tuple[int, int, int]], data_bytes: int, job: bytes
) -> bytes:
    """The head of a checkpoint file of float32 units.

    A unit has its name, bytes, chunk bytes and rule. A record has its unit, its chunk and its number of arrays.
    """
    parts = [struct.pack("<IIQQ", len(name), FLOAT32, *sizes) + rule + name for name, *sizes, rule in units]
    parts += [struct.pack("<IIQII", unit, chunk, 4, arrays, 99) for unit, chunk, arrays in records]
    rest = job + b"".join(parts)
    head_bytes = 56 + len(rest) + 4
    numbers = (len(units), len(records), len(job), 0)
    start = struct.pack("<4sI4Q4I", b"PSDC", 3, head_bytes, head_bytes + data_bytes + 16, 300, 5, *numbers)
    return start + rest + struct.pack("<I", crc32c(start + rest))


def checkpoints() -> dict[str, bytes]:
    """By name: a zero and the head of a checkpoint file, or a one and the payload of units."""
    sgd = rule("sgd", "median", lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=0.0, maximize=0.0)
    two = checkpoint(
        [(b"w", 96, 64, sgd), (b"bias", 16, 16, rule())], [(0, 0, 2), (0, 1, 2), (1, 0, 1)], 2 * 96 + 16, b"default"
    )
    described = units((3, FLOAT32, 64, 64, b"w"), (4, FLOAT32, 1000, 64, b"bias"))
    return {
        "empty": b"\0" + checkpoint([], [], 0, b"default"),
        "no_value": b"\0" + checkpoint([(b"w", 64, 64, sgd)], [(0, 0, 0)], 0, b"j\nab12"),
        "two_units": b"\0" + two,
        "rejected_cut": b"\0" + two[:-40],
        "units": b"\1" + described,
        "rejected_units_cut": b"\1" + described[:-9],
        "no_units": b"\1" + units(),
    }


def write(folder: str, files: dict[str, bytes]) -> None:
    """Replaces the folder's files."""
    for old in (CORPUS / folder).iterdir():
        old.unlink()
    for name, content in files.items():
        (CORPUS / folder / name).write_bytes(content)


def corpora() -> dict[str, dict[str, bytes]]:
    """By folder and name: all that is written."""
    known = messages()
    last = {"largest": header("push", contribution(), 2**34, 1023)}
    heads = {name: header(kind, its_body, len(payload)) for name, (kind, its_body, payload) in known.items()}
    streams = {}
    for index, (name, (_, _, payload)) in enumerate(known.items()):
        cut = bytes([READ_SIZES[index % len(READ_SIZES)]])
        streams[name] = cut + (heads[name] + payload) * 2
    streams |= {name: b"\x05" + heads["push"] + known["push"][2] + bad for name, bad in rejected().items()}
    return {
        "decode": heads | last | rejected(),
        "messages": {name: heads[name] + payload for name, (_, _, payload) in known.items()},
        "tcp_receive": streams | coded_streams(),
        "lossless": lossless(),
        "checkpoint": checkpoints(),
    }


def main() -> None:
    """Writes all corpora."""
    for folder, files in corpora().items():
        write(folder, files)


if __name__ == "__main__":
    main()
