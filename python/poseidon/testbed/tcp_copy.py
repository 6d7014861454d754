"""A plain TCP copy between two processes: the rate that an application can reach on a link.

`tcp_copy.py receive ADDRESS DSCP` prints the port on which it listens, then the bits per second of one sender's data.
`tcp_copy.py send ADDRESS PORT BYTES DSCP` is that sender. DSCP is the code point of the packets, 0 for unmarked ones.
"""

from __future__ import annotations

import socket
import sys
import time

_BUFFER_BYTES = 1 << 18
_TIMEOUT_SECONDS = 60.0


def receive(address: str, dscp: int) -> None:
    """Serves one sender and prints its rate, from the arrival of the first bytes to that of the last."""
    with socket.create_server((address, 0)) as listener:
        _mark(listener, dscp)  # its connection takes the mark over: acknowledgements are as urgent as the data
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


def send(address: str, port: int, byte_count: int, dscp: int) -> None:
    """Sends `byte_count` zeros and waits until the receiver has them."""
    block = memoryview(bytes(_BUFFER_BYTES))
    with socket.socket() as connection:
        connection.settimeout(_TIMEOUT_SECONDS)
        _mark(connection, dscp)  # before the first packet
        connection.connect((address, port))
        while byte_count > 0:
            byte_count -= connection.send(block[: min(byte_count, _BUFFER_BYTES)])
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


def _mark(end: socket.socket, dscp: int) -> None:
    end.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2], int(sys.argv[3]))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
