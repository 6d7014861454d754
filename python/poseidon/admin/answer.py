"""What an admin port answers, without HTTP: status, content type and text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol


@dataclass(frozen=True)
class Answer:
    """An HTTP answer."""

    status: HTTPStatus
    text: str
    content_type: str = "application/json"


class Service(Protocol):
    """What answers the requests to an admin port. Thread-safe.

    `open_paths` need no token. `risk`: what others could do who reach the port without one.
    """

    open_paths: tuple[str, ...]
    risk: str

    def answer(self, method: str, path: str, query: str, source: str) -> Answer:
        """The answer to a request. `path` is still quoted; `source` is who asks."""


def json_answer(status: HTTPStatus, data: Any) -> Answer:
    """An answer of plain data."""
    return Answer(status, json.dumps(data, indent=2) + "\n")


def error_answer(status: HTTPStatus, why: str) -> Answer:
    """An answer that says in one sentence why nothing was done."""
    return json_answer(status, {"error": why})


def text_answer(text: str, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    """An answer of one line."""
    return Answer(status, text + "\n", "text/plain")


def to_read(method: str, path: str, found: Mapping[str, Callable[[], Answer]], more: str = "") -> Answer:
    """The answer to a request for one of these paths, which can be read only. `more`: what others there are."""
    if path not in found:
        return error_answer(HTTPStatus.NOT_FOUND, f"there is no {path}: GET {', '.join(found)}{more}")
    if method != "GET":
        return error_answer(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes GET only")
    return found[path]()
