"""Every message of an error, in the Python package and in the C++ core, names what is wrong and what to do about it.

A message that does not is listed here with its reason, so that a new one needs either a remedy or a reason.
"""

from __future__ import annotations

import itertools
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
    "{}, line {}: {}",  # of a file of hosts: what is wrong with the line
    "{}; under way were: {}",  # the first says what to do
}
# What a clause of a text of the core begins with if it says what to do, and what says what is allowed.
CORE_REMEDY = re.compile(
    r"(?:[;:,(]|\b(?:so|or)) (?:or |and )?(?:allow|ask|assign|build|check|choose|connect|declare|divide|end|exchange"
    r"|find|give|install|leave|let|load|lower|make|name|put|raise|register|resume|see|set|start|take|try|use|wait)\b"
    r"|\bmust\b|\bneeds?\b|\bat (?:least|most)\b|\bis one of\b|\bknown(?: are)?:? |\bknows\b|; it has\b|\bare needed\b"
    r"|\bcannot be combined with\b",
)
# Texts of the core that need no remedy, by reason. A pattern names a place, and texts where not all of it is meant.
CORE_WITHOUT_REMEDY = {
    "a peer that breaks the protocol, which no user can mend": (
        r"src/wire/(header|kinds|update_rule|messages/\w+)\.cc: ",
        r"src/rendezvous/store_protocol\.cc: ",
        r"src/scheme/\w+\.cc: .*(unexpected result|bytes instead of|came twice|as late|have none$|was not named$)",
        r"src/scheme/\w+\.cc: .*(belongs to another worker|does not match their header)$",
        r"src/client/client_loop\.cc: sent a \{\} message",
        r"src/transport/(coded_payload|tcp/message_reader)\.cc: .*(segment|coded payload)",
        r"src/client/handlers/ready\.cc: ",
        r"src/collective/messages\.cc: .*(asks for message|beyond its \{\} bytes|than it said|been asked for)",
        r"src/collective/collectives\.cc: .* bytes of a call that this rank has not begun$",
        r"src/client/syncer\.cc: a (server's result|result of the next step) for",
        r"src/server/(core/handlers/\w+|pace/\w+|chunk/chunk_state)\.cc: ",
        r"src/server/core/server_\w+\.cc: (\{\} sent a message before its hello|a machine \{\} of \{\} does not fit)",
        r"src/server/core/shard\.cc: .*(as late|too early$|not kept in float32$|not a whole|waits for this)",
        r"src/server/checkpoint/shard_checkpoint\.cc: unit \{\} ",
        r"src/transport/shm/(inbox|outbox|segment|shm_flow)\.cc: ",
        r"src/transport/ucx/ucx_flow\.cc: ",
    ),
    "a rest: who passes it on says whom it is about and what to do": (
        r"src/bindings/store\.cc: ",
        r"src/server/core/server_greeting\.cc: of this server's options and the job's, \{\}$",  # features.cc
        r"src/client/client\.cc: \{\} ended the job: its layers make no plan: \{\}$",
        r"src/client/(client_loop|client_vigil|heartbeats)\.cc: \{\} lost ",  # what_to_check, where_it_is_cut
        r"src/rendezvous/tcp_store\.cc: the rendezvous store has no key",
        r"src/transport/flow_end\.cc: connection to ",
        r"src/transport/\w+/\w+_(flow|transport)\.cc: (connection to .*)?\(?closed by the peer",
        r"src/transport/(\w+/\w+|connector)\.cc: cannot connect to ",  # Connections::on_failure
        r"src/transport/shm/(local_socket|shm_transport|shm_listener)\.cc: ",
        r"src/transport/tcp/tcp_flow\.cc: the system does not permit marking",  # the job goes on
        r"src/transport/tls/tls_session\.cc: TLS: ",
        r"src/transport/ucx/(engine|ucx_connector|ucx_listener|ucx_transport)\.cc: ",
    ),
    "the system says what is wrong with the file": (
        r"src/server/checkpoint/checkpoint_(file|directory)\.cc: \{\} could not be ",
    ),
    "a damaged checkpoint: the one before is taken, and who passes this on says so": (
        r"src/server/checkpoint/checkpoint_\w+\.cc: .*(is damaged: |is wrong$|does not fit the other files)",
    ),
    "the user has interrupted it": (r"src/rendezvous/\w+\.cc: interrupted while ",),
    "the job goes on without this process, or meets again": (
        r"src/client/connections\.cc: \{\} is (in generation|of another run)",
        r"src/server/core/server_greeting\.cc: generation \{\} of job '\{\}' has been replaced",
    ),
    "a mistake of the library's own, within one process": (
        r"src/transport/flow_end\.cc: the receiver gave ",
        r"src/transport/(loop|inproc/\w+)\.cc: ",
        r"src/rendezvous/tcp_store\.cc: key or value too large",
    ),
}
MESSAGES = sorted({one for one in python_messages() if not one.place.startswith(OWN)}, key=lambda one: one.text)
CORE = core_messages()
_TLS_DIFFERS = (
    "{} has tls={}, this process tls={}; give all processes of the job, and its servers, the same tls (POSEIDON_TLS)"
)


def test_there_are_as_many_as_a_reader_of_the_sources_would_find() -> None:
    assert len(MESSAGES) > 250
    assert len(CORE) > 300


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


def _needs_none(one: Message) -> list[str]:
    """The patterns of CORE_WITHOUT_REMEDY that fit."""
    patterns = itertools.chain.from_iterable(CORE_WITHOUT_REMEDY.values())
    return [pattern for pattern in patterns if re.match(pattern, f"{one.place}: {one.text}")]


def test_a_message_of_the_core_says_what_to_do() -> None:
    told = [one for one in CORE if CORE_REMEDY.search(one.text) or one.text.endswith("; {}")]  # a text by name
    silent = [one for one in CORE if one not in told and not _needs_none(one)]
    assert not silent, "without a remedy: say what to do, or find its place in CORE_WITHOUT_REMEDY"


def test_every_reason_for_no_remedy_is_needed() -> None:
    used = {pattern for one in CORE if CORE_REMEDY.search(one.text) is None for pattern in _needs_none(one)}
    assert used == set(itertools.chain.from_iterable(CORE_WITHOUT_REMEDY.values()))


def test_a_message_of_the_core_is_one_line_that_begins_with_whom_or_what_and_ends_without_a_stop() -> None:
    for one in CORE:
        assert "\n" not in one.text, one
        assert not one.text.endswith((".", ";", ",", " ")), one
        assert re.match(r"[\w{'/]", one.text), one


def test_the_collector_reads_all_forms() -> None:
    known = {one.text for one in python_messages()}
    assert any(text.startswith("rank ") or "{}" in text for text in known)
    assert Message("python/poseidon/cli/doctor.py", "InvalidArgument", "") not in MESSAGES


def test_the_collector_puts_texts_of_the_core_together() -> None:
    """Pieces around values, variables, choices, and what lambdas, functions of other files and callers add."""
    whole = {(one.place, one.kind, one.text) for one in CORE}
    refused = "the server refuses the push of rank {} in step {}: "
    assert whole >= {
        (
            "src/rendezvous/gathering.cc",
            "mismatch",
            "the options of rank {} differ from those of rank {}; give all ranks the same values",
        ),
        (
            "src/client/syncer.cc",
            "invalid_argument",
            "layer '{}' cannot take this residual: it never takes a lossy scheme; give it none",
        ),
        ("src/client/steps.cc", "invalid_argument", "layer '{}' has dtype {}; a rule needs float32 or float64"),
        ("src/plan/layer_rules.cc", "invalid_argument", "{} has powersgd_rank 0; it must be at least 1"),
        ("src/server/chunk/chunk_state.cc", "refused", refused + "factors must have a floating-point dtype"),
        ("src/wire/handshake.cc", "mismatch", _TLS_DIFFERS.format("{}", "on", "off")),
        ("src/wire/handshake.cc", "mismatch", _TLS_DIFFERS.format("{}", "off", "on")),
        (
            "src/server/core/server_greeting.cc",
            "refused",
            "rank {} is connected already; see whether two processes have the same RANK",
        ),
    }
    assert not [one for one in CORE if "\0" in one.text]


def test_an_error_that_names_a_flight_record_says_what_to_run_next() -> None:
    for kind in (PeerLost, PoseidonTimeout, InvalidArgument):
        told = str(kind("rank 0 lost rank 1; flight record: /tmp/poseidon-a-rank0.json"))
        assert told.startswith("rank 0 lost rank 1; flight record: /tmp/poseidon-a-rank0.json (bring")
        assert "poseidon doctor" in told
        assert str(kind(told)) == told
        assert "doctor" not in str(kind("rank 0 lost rank 1"))
