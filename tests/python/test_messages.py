"""Every message of an error in the Python package names what is wrong and what to do about it.

A message that does not is listed here with its reason, so that a new one needs either a remedy or a reason.
"""

from __future__ import annotations

import re

import pytest

from messages import Message, core_messages, python_messages
from poseidon.errors import InvalidArgument, PeerLost, PoseidonTimeout

# A clause that says what to do: its verb, or what is allowed.
REMEDY = re.compile(
    r"\b(use|give|set|call|check|leave|take|start|pass|correct|install|wrap|make|may|can|must|only|choose|remove|see"
    r"|wait|let|end|add|convert|run|known|try|build|move|create|restart|free|measure|unset|compare|lower|upgrade|load"
    r"|copy|declare|write|train|compile|put|read|keep|name|whole number|such as|or more|bring|do|needs?|excludes?"
    r"|exclude|change|stop|mend|synchronize|open|divide|drop|rename|delete|report|reduce|cannot"
    r"|raise|from \d|knows|takes|it has|it is the|or another|first|instead|wrap|again|same code)\b",
    re.IGNORECASE,
)
# Of benchmarks and between the library's own parts: no user can mend them by what the message could say.
OWN = ("python/poseidon/bench/",)
# A message whose cause comes after it in other words, or is told by who catches it.
TOLD_ELSEWHERE = {
    "an attempt of this rank itself failed: {}: {}",  # the attempt's own error
    "a worker joins",  # Recovery goes on
    "{} was not published within {} s",  # the store's caller names the rank
    "{}: {}",
}
MESSAGES = sorted({one for one in python_messages() if not one.place.startswith(OWN)}, key=lambda one: one.text)


def test_there_are_as_many_as_a_reader_of_the_sources_would_find() -> None:
    assert len(MESSAGES) > 250
    assert len(list(core_messages())) > 120


def _has_remedy(text: str) -> bool:
    """Whether a clause says what to do. A value at the end may be that clause."""
    return REMEDY.search(text) is not None or text.endswith("; {}")


@pytest.mark.parametrize("place", sorted({one.place for one in MESSAGES}))
def test_a_message_says_what_to_do(place: str) -> None:
    own = [one for one in MESSAGES if one.place == place]
    silent = [one.text for one in own if one.text not in TOLD_ELSEWHERE and not _has_remedy(one.text)]
    assert not silent, "without a remedy: say what to do, or list it in TOLD_ELSEWHERE with a reason"


@pytest.mark.parametrize("place", sorted({one.place for one in MESSAGES}))
def test_a_message_is_one_line_that_ends_without_a_stop(place: str) -> None:
    """The last line of a failure is its cause."""
    for one in MESSAGES:
        if one.place == place:
            assert "\n" not in one.text.strip(), one.text
            assert not one.text.endswith("."), one.text


def test_messages_of_the_core_begin_with_whom_or_what() -> None:
    """They are joined to the name of a rank, a server or a layer; what begins with punctuation is such a rest."""
    for one in core_messages():
        assert not one.text[0].isspace() or len(one.text.split()) > 1 or one.text.strip() in ("is full", ":"), one


def test_the_collector_reads_all_forms() -> None:
    known = {one.text for one in python_messages()}
    assert any(text.startswith("rank ") or "{}" in text for text in known)
    assert Message("python/poseidon/cli/doctor.py", "InvalidArgument", "") not in MESSAGES


def test_an_error_that_names_a_flight_record_says_what_to_run_next() -> None:
    for kind in (PeerLost, PoseidonTimeout, InvalidArgument):
        told = str(kind("rank 0 lost rank 1; flight record: /tmp/poseidon-a-rank0.json"))
        assert told.startswith("rank 0 lost rank 1; flight record: /tmp/poseidon-a-rank0.json (bring")
        assert "poseidon doctor" in told
        assert str(kind(told)) == told
        assert "doctor" not in str(kind("rank 0 lost rank 1"))
