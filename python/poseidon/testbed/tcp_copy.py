"""A plain TCP copy between two processes: what an application can get out of a link.

`tcp_copy.py receive ADDRESS` prints the port it listens on, then the bits per second of what one sender sent.
`tcp_copy.py send ADDRESS PORT BYTES` is that sender.
"""

from __future__ import annotations

import socket
import sys
import time

_BUFFER_BYTES = 1 << 18
_TIMEOUT_SECONDS = 60.0


def receive(address: str) -> None:
    """Serves one sender and prints what it got, from the first bytes' arrival to the last's."""
    with socket.create_server((address, 0)) as listener:
        listener.settimeout(_TIMEOUT_SECONDS)
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(_TIMEOUT_SECONDS)
        buffer = bytearray(_BUFFER_BYTES)
        first_bytes = total_bytes = connection.recv_into(buffer)
        start = end = time.monotonic()
        while received_bytes := connection.recv_into(buffer):
            total_bytes += received_bytes
            end = time.monotonic()
    print(8 * (total_bytes - first_bytes) / max(end - start, 1e-9), flush=True)


def send(address: str, port: int, byte_count: int) -> None:
    """Sends `byte_count` zeros and waits until the receiver has them."""
    block = memoryview(bytes(_BUFFER_BYTES))
    with socket.create_connection((address, port), timeout=_TIMEOUT_SECONDS) as connection:
        while byte_count > 0:
            byte_count -= connection.send(block[: min(byte_count, _BUFFER_BYTES)])
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
