"""What an admin port answers, without HTTP: status, content type and text."""

from __future__ import annotations

import json
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
