"""What the admin port of `poseidon metrics` answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from http import HTTPStatus

from poseidon.admin import CONTENT_TYPE, Answer, json_answer, text_answer, to_read
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
        found = {
            "/healthz": lambda: text_answer("ok"),
            "/workers": lambda: json_answer(HTTPStatus.OK, {"workers": [asdict(one) for one in self._read()]}),
            "/metrics": lambda: Answer(HTTPStatus.OK, metrics_text(self._read()), CONTENT_TYPE),
        }
        return to_read(method, path, found)
