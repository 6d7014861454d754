"""The HTTP server of an admin port. It bounds what a client may cost: time, bytes, and requests at once."""

from __future__ import annotations

import contextlib
import hmac
import io
import socket
import socketserver
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from poseidon.admin.address import Address
from poseidon.admin.answer import Answer, Service, error_answer
from poseidon.errors import InvalidArgument, Unreachable

_MOST_REQUESTS = 16  # at once
_REQUEST_S = 5.0  # until a request has come; as long again until its answer has gone
_MOST_REQUEST_BYTES = 64 << 10
_MOST_BODY_BYTES = 4 << 10  # no request needs a body


class AdminServer:
    """An admin port that listens until `close`."""

    def __init__(self, service: Service, address: Address, token: str | None) -> None:
        """Raises InvalidArgument for an address beyond this machine without a token, Unreachable for one in use."""
        if token is None and not address.is_loopback:
            raise InvalidArgument(
                f"--admin {address} can be reached from other machines, which could {service.risk}: give it a "
                f"token with --admin-token-file FILE, or listen on this machine alone with --admin {address.port}"
            )
        try:
            self._http = _HttpServer(service, address, token)
        except OSError as error:
            raise Unreachable(f"--admin {address}: {error.strerror}; choose another port") from None
        self.address = Address(address.host, self._http.server_address[1])
        self._thread = threading.Thread(target=self._http.serve_forever, name="psd-admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the requests under way and waits for their threads."""
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = False  # server_close() waits for them

    def __init__(self, service: Service, address: Address, token: str | None) -> None:
        self.service = service
        self.expected = None if token is None else f"Bearer {token}".encode()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks the name service, which may take long

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            has_room = len(self._open) < _MOST_REQUESTS
            if has_room:
                self._open.add(request)
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        with self._lock:
            for request in self._open:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)  # its thread reads or sends in vain
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # an OSError: the client has gone
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer
    server_version = "poseidon"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_BoundedInput(self.connection))

    def _respond(self) -> None:
        path, _, query = self.path.partition("?")
        answer = self._refusal(path)
        if answer is None:
            method = "GET" if self.command == "HEAD" else self.command
            answer = self.server.service.answer(method, path, query, self.client_address[0])
        self._send(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _respond

    def _refusal(self, path: str) -> Answer | None:
        length = self.headers.get("Content-Length", "0")
        if not length.isascii() or not length.isdigit() or "Transfer-Encoding" in self.headers:
            return error_answer(HTTPStatus.BAD_REQUEST, "the request's Content-Length is no number")
        if int(length[:9]) > _MOST_BODY_BYTES or len(length) > 9:
            return error_answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "no request needs a body: leave it out")
        self.rfile.read(int(length))  # what is left unread would make the kernel discard the answer
        if "Origin" in self.headers:
            return error_answer(HTTPStatus.FORBIDDEN, "pages of a browser may not use the admin port")
        expected = self.server.expected
        if expected is None or path in self.server.service.open_paths:
            return None
        given = self.headers.get("Authorization", "").encode(errors="surrogateescape")
        if hmac.compare_digest(given, expected):
            return None
        why = "the token is not that of this admin port" if given else "the admin port needs its token"
        return error_answer(HTTPStatus.UNAUTHORIZED, f"{why}: give it with --admin-token-file FILE")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library calls for a request that it cannot read."""
        self._send(error_answer(HTTPStatus(code), message or HTTPStatus(code).phrase))

    def _send(self, answer: Answer) -> None:
        body = answer.text.encode(errors="replace")
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(body)))
        if answer.status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.connection.settimeout(_REQUEST_S)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged; what changes a server is (service.py)."""


class _BoundedInput(io.RawIOBase):
    """What a client sends, as far as it comes in time. A timeout of the socket would begin anew with each byte."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._latest = time.monotonic() + _REQUEST_S
        self._left_bytes = _MOST_REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._latest - time.monotonic()
        if left_s <= 0 or self._left_bytes <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        size = self._connection.recv_into(buffer, min(len(buffer), self._left_bytes))
        self._left_bytes -= size
        return size
