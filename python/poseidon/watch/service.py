"""What the admin port of `poseidon metrics` answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from http import HTTPStatus

from poseidon.admin import CONTENT_TYPE, Answer, error_answer, json_answer
from poseidon.live import WorkerFigures
from poseidon.watch.metrics import metrics_text


class WatchService:
    """Answers requests about the workers that `read` finds. As `poseidon.admin.answer.Service`."""

    open_paths: tuple[str, ...] = ("/healthz",)
    risk = "read the figures of every job"

    def __init__(self, read: Callable[[], Sequence[WorkerFigures]]) -> None:
        self._read = read

    def answer(self, method: str, path: str, query: str, source: str) -> Answer:
        """The answer to a request."""
        if path not in ("/healthz", "/workers", "/metrics"):
            return error_answer(HTTPStatus.NOT_FOUND, f"there is no {path}: GET /healthz, /workers, /metrics")
        if method != "GET":
            return error_answer(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes GET only")
        if path == "/healthz":
            return Answer(HTTPStatus.OK, "ok\n", "text/plain")
        workers = self._read()
        if path == "/workers":
            return json_answer(HTTPStatus.OK, {"workers": [asdict(one) for one in workers]})
        return Answer(HTTPStatus.OK, metrics_text(workers), CONTENT_TYPE)
