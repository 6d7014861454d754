"""The report: what it computes, that its page is well-formed and needs nothing else, that its trace is valid."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from poseidon import report
from poseidon.report import Epoch, LayerRow, RankRecord, Report, Span
from poseidon.report.charts import bars_chart
from poseidon.report.data import hidden_share, merge_layers, typical_step
from poseidon.report.page import headlines, html
from poseidon.report.svg import (
    CHARACTER_WIDTH,
    bytes_text,
    number_text,
    percent_text,
    seconds_text,
    short_names,
    shortened,
    ticks,
)
from poseidon.report.trace import trace_events

MS = 1_000_000
VOID = {"meta", "br", "link", "img", "input"}


def rank_record(rank: int, name: str = "fc1.weight", steps: int = 3) -> RankRecord:
    """Steps of 20 ms: 4 forward, 8 backward, 4 waiting, 1 update. Half of the layer's synchronization is hidden."""
    spans = []
    for step in range(steps):
        at = (100 + 20 * step) * MS
        spans += [
            Span("forward", step, at, at + 4 * MS),
            Span("backward", step, at + 4 * MS, at + 8 * MS, name),
            Span("synchronization", step, at + 8 * MS, at + 16 * MS, name),
            Span("backward", step, at + 4 * MS, at + 12 * MS),
            Span("wait", step, at + 12 * MS, at + 16 * MS),
            Span("update", step, at + 16 * MS, at + 17 * MS),
        ]
    rows = [
        LayerRow(name, (512, 576), 32, "sfb", 417_792 + rank, 1_769_472, 0.5),
        LayerRow("b", (), 0, "ps", 6, 6, None),
    ]
    return RankRecord(rank, f"host-{rank}", 10 * rank, rows, spans)


def whole_report(name: str = "fc1.weight", title: str = "A run") -> Report:
    epochs = [Epoch(1, 0.9, 0.8125, 1000.0, 30.0), Epoch(2, 0.4, 0.9062, 2000.0, 15.0)]
    losses = [2.0 / (1 + step / 50) for step in range(938)]
    return Report(
        title, "subtitle", [("Link", "100mbit")], epochs, losses, [rank_record(rank, name) for rank in range(2)]
    )


class Checker(HTMLParser):
    """Fails on tags that do not match; collects the text, the tags and their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def test_page_shows_the_numbers() -> None:
    text = " ".join(parsed(html(whole_report())).text)
    for shown in (
        "90.6 %",
        "1,333",
        "418 kB",
        "1.77 MB",
        "4.24 times less",
        "50 %",
        "512×576",
        "sfb",
        "100mbit",
        "45 s",
    ):
        assert shown in text


def test_page_is_well_formed_and_needs_nothing_else() -> None:
    page = html(whole_report())
    checker = parsed(page)
    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))  # stricter than HTML: every tag is closed
    assert {tag for tag, _ in checker.elements}.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not [
        value for _, attributes in checker.elements for name in ("src", "href") if (value := attributes.get(name))
    ]
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page


def test_every_style_class_is_styled() -> None:
    page = html(whole_report())
    style = page[page.index("<style>") : page.index("</style>")]
    used = {name for _, attributes in parsed(page).elements for name in (attributes.get("class") or "").split()}
    assert used
    assert {name for name in used - {"pair", "name"} if f".{name}" not in style} == set()


def test_text_is_escaped() -> None:
    bad = '<script>alert("x")</script>&'
    page = html(whole_report(name=bad, title=bad))
    checker = parsed(page)
    assert "script" not in {tag for tag, _ in checker.elements}
    assert checker.text.count(bad) >= 2


def test_another_methods_step_stands_beside_the_runs_own() -> None:
    shown = whole_report()
    assert [record.step_s for record in shown.ranks] == [0.02, 0.02]
    assert ("Time of a step", "20 ms", "median, of the slowest rank") in headlines(shown)
    shown.other_step_s["plain DDP"] = 0.05
    assert ("Time of a step", "20 ms", "50 ms with plain DDP, 2.5 times as long") in headlines(shown)
    shown.ranks.append(rank_record(2, steps=1))
    assert (shown.ranks[2].step_s, shown.step_s) == (None, 0.02)


def test_page_of_a_run_without_layers_or_epochs() -> None:
    empty = Report("Nothing", "", [], [], [], [RankRecord(0, "host", 0)])
    assert "Nothing" in parsed(html(empty)).text
    assert headlines(empty) == []
    assert trace_events(empty)["traceEvents"]


def test_a_model_with_many_layers_keeps_its_pictures_small_and_its_table_whole() -> None:
    rows = [LayerRow(f"layer{index}.weight", (8, index + 1), 0, "ps", 40.0, 40.0 + index, 0.0) for index in range(300)]
    page = html(Report("Deep", "", [], [], [], [RankRecord(0, "host", 0, rows)]))
    assert page.count('<td class="name">') == 300
    assert page.count("<rect") == 2 * 2 * 24


def test_pictures_stay_inside_their_frame() -> None:
    page = html(whole_report(name="encoder." * 12 + "weight"))
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 8
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for rect in root.iter("rect"):
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
            assert float(rect.attrib["y"]) + float(rect.attrib["height"]) <= height
        for text in root.iter("text"):
            anchor = {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib["text-anchor"]]
            length = 6.2 * len(text.text or "")
            left = float(text.attrib["x"]) - anchor * length
            assert left >= -2
            assert left + length <= width + 2


def test_the_labels_of_bars_are_whole_where_there_is_room() -> None:
    words = "bf16 with a DistributedOptimizer"
    picture = bars_chart([("as described", 3.0, "3"), (words, 4.0, "4 × one host")], 952, "What would help")
    assert f">{words}</text>" in picture.render("wide")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize(("width", "printed"), [(1200, False), (718, True)])  # the second one as A4 has
def test_the_table_of_layers_fits_a_window_and_a_sheet(tmp_path: Path, width: int, printed: bool) -> None:
    whole = whole_report()
    row = LayerRow(
        "features.denseblock4.denselayer16.conv2.weight", (512, 576, 3, 3), 32, "sfb", 4e8, 2e9, 0.5, 1.2, 1.3
    )
    row = replace(row, reason="dense: rank 4 costs more bytes than the factors would save at 8 workers")
    page = html(replace(whole, ranks=[replace(rank, layers=[row]) for rank in whole.ranks]))
    if printed:
        page = page.replace("@media print", "@media all")
    size = "<script>document.title = [...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)"
    (path := tmp_path / "page.html").write_text(page + size + "</script>", encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},2000", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    assert "<title>0</title>" in done.stdout, re.findall("<title>.*</title>", done.stdout)


def test_hidden_share_counts_only_overlap_with_the_models_passes() -> None:
    spans = rank_record(0).spans
    synchronizations = [span for span in spans if span.kind == "synchronization"]
    assert hidden_share(synchronizations, spans) == pytest.approx(0.5)
    assert hidden_share(synchronizations, []) == 0
    assert hidden_share([], spans) is None
    # Two at once count once: of the 10 ms in which anything was exchanged the model computed for 6.
    overlapping = [
        Span("synchronization", 0, 110 * MS, 114 * MS, "y"),
        Span("synchronization", 0, 106 * MS, 116 * MS, "x"),
    ]
    assert hidden_share(overlapping, spans[:6]) == pytest.approx(0.6)
    into_next_forward = [Span("synchronization", 0, 112 * MS, 122 * MS, "x")]
    assert hidden_share(into_next_forward, spans) == pytest.approx(0.2)


def test_layers_are_means_over_the_ranks() -> None:
    merged = whole_report().layers
    assert [row.name for row in merged] == ["fc1.weight", "b"]
    assert merged[0].bytes_sent == 417_792.5
    assert merged[0].hidden == 0.5
    assert merged[1].hidden is None
    with pytest.raises(ValueError, match="differently"):
        merge_layers([rank_record(0).layers, rank_record(1, "other").layers])


def test_typical_step_is_the_median_of_the_warm_ones() -> None:
    lengths = [500, 10, 30, 20]
    spans = [Span("forward", step, 1000 * step, 1000 * step + length) for step, length in enumerate(lengths)]
    assert typical_step(RankRecord(0, "host", 0, [], spans)) == 3
    assert typical_step(RankRecord(0, "host", 0, [], spans[:1])) == 0
    assert typical_step(RankRecord(0, "host", 0)) is None


def test_records_survive_the_folder(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        report.save_rank(rank_record(rank), tmp_path)
    loaded = report.load_ranks(tmp_path)
    assert [record.rank for record in loaded] == [0, 2, 10]
    assert loaded[1] == rank_record(2)


def recorded_step(at: int) -> SimpleNamespace:
    """As an adapter records it: backward computes for 10 ms; "w" is ready after 4 ms and exchanged until 4 ms later
    than that, "b" is ready at the end and exchanged for 2 ms."""

    def layer(name: str, scheme: str, ready_ns: int, took_ns: int) -> SimpleNamespace:
        times = {"gradient_ready_ns": ready_ns, "started_ns": ready_ns, "completed_ns": ready_ns + took_ns}
        figures = {"factor_count": 100, "bytes_sent": 300, "bytes_received": 200, "seconds": took_ns / 1e9}
        return SimpleNamespace(name=name, scheme=scheme, **figures, **times)

    layers = [layer("w", "sfb", at + 4 * MS, 4 * MS), layer("b", "ps", at + 10 * MS, 2 * MS)]
    return SimpleNamespace(backward_begin_ns=at, backward_end_ns=at + 10 * MS, layers=layers)


def test_record_of_recorded_steps() -> None:
    told = {"predicted_seconds": 0.003, "reason": "chosen at step 8"}
    plan = [
        SimpleNamespace(layer="b", shape=(8,), factor_count=None, scheme="ps", dense_bytes=1000.0, **told),
        SimpleNamespace(layer="w", shape=(8, 6), factor_count=25, scheme="sfb", dense_bytes=4000.0, **told),
    ]
    steps = [recorded_step(0), recorded_step(20 * MS)]
    passes = [
        Span("backward", 7, 0, 12 * MS),
        Span("backward", 8, 20 * MS, 32 * MS),
        Span("forward", 8, 15 * MS, 20 * MS),
    ]
    record = report.rank_record(3, "host", 4, plan, steps, passes, first_step=7)
    assert record.rank == 3
    assert [(row.name, row.shape, row.scheme, row.factor_count) for row in record.layers] == [
        ("w", (8, 6), "sfb", 25),
        ("b", (8,), "ps", 0),
    ]
    assert [(row.predicted_s, row.measured_s) for row in record.layers] == [(0.003, 0.004), (0.003, 0.002)]
    assert {row.reason for row in record.layers} == {"chosen at step 8"}
    # What a shard answers counts where the layer goes by PS; dense is one direction of what the plan says.
    assert [(row.bytes_sent, row.dense_bytes) for row in record.layers] == [(300, 2000), (500, 500)]
    assert [row.hidden for row in record.layers] == [1.0, 0.0]
    assert [span for span in record.spans if span.step == 8 and not span.layer] == [
        Span("backward", 8, 20 * MS, 30 * MS),
        Span("wait", 8, 30 * MS, 32 * MS),
        Span("forward", 8, 15 * MS, 20 * MS),
    ]
    assert Span("backward", 7, 4 * MS, 10 * MS, "b") in record.spans
    assert Span("synchronization", 7, 4 * MS, 8 * MS, "w") in record.spans


@pytest.mark.parametrize(("kind", "end_ns"), [("sleep", 5), ("forward", -1)])
def test_impossible_spans_are_refused(kind: str, end_ns: int) -> None:
    with pytest.raises(ValueError, match="span"):
        Span(kind, 0, 0, end_ns)


def test_trace_is_in_the_trace_event_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    report.write_trace(whole_report(), path)
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"], e["name"]): e["args"] for e in events if e["ph"] == "M"}
    assert names[0, 0, "process_name"] == {"name": "rank 0 on host-0"}
    assert names[1, 1, "thread_name"] == {"name": "compute"}
    assert names[1, 2, "thread_name"] == {"name": "fc1.weight (sfb)"}
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 2 * 3 * 6
    assert len(complete) + len(names) == len(events)
    for event in complete:
        assert set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        assert (event["pid"], event["tid"], "thread_name") in names
        assert event["ts"] >= 0
        assert math.isfinite(event["dur"])
    assert min(event["ts"] for event in complete) == 0


def test_trace_aligns_the_ranks_and_keeps_durations() -> None:
    complete = [event for event in trace_events(whole_report())["traceEvents"] if event["ph"] == "X"]
    first = {e["pid"]: e["ts"] for e in reversed(complete) if e["name"] == "forward"}
    assert first[0] - first[1] == pytest.approx(0.010)  # rank 1's clock was 10 ns ahead
    exchange = next(event for event in complete if event["cat"] == "synchronization")
    assert exchange["dur"] == pytest.approx(8000)
    assert exchange["args"] == {"step": 0, "scheme": "sfb", "bytes_sent": 417_792, "factor_count": 32}


def test_late_workers_are_named_the_latest_first() -> None:
    def left_out(*late_steps: int) -> list[tuple[str, str, str]]:
        ranks = [RankRecord(rank, "", 0, late_steps=steps) for rank, steps in enumerate(late_steps)]
        return headlines(Report("", "", [], [], [], ranks))

    assert left_out(0, 0) == []
    assert left_out(0, 7) == [("Gradients left out", "7", "late workers’ steps: rank 1: 7")]
    assert left_out(1, 9, 4, 2) == [
        ("Gradients left out", "16", "late workers’ steps: rank 1: 9, rank 2: 4, rank 3: 2 and 1 more")
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(999), "999 B"),
        (bytes_text(1_000), "1 kB"),
        (bytes_text(3_524_000), "3.52 MB"),
        (bytes_text(0), "0 B"),
        (number_text(1524.3), "1,524"),
        (number_text(100), "100"),
        (number_text(0.25), "0.25"),
        (percent_text(None), "–"),
        (percent_text(0.256), "26 %"),
        (seconds_text(118.2), "1 min 58 s"),
        (seconds_text(0.0123), "12.3 ms"),
        (shortened("encoder.layer.weight", 70), "…er.weight"),
        (shortened("fc", 70), "fc"),
    ],
)
def test_numbers_as_text(text: str, expected: str) -> None:
    assert text == expected


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 1, 4) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    assert ticks(0, 63, 8) == pytest.approx([0, 10, 20, 30, 40, 50, 60])
    assert ticks(2, 2) == [2]


@pytest.mark.parametrize("width", [40, 60, 110, 160, 400])
def test_no_two_names_look_the_same(width: float) -> None:
    names = [f"transformer.encoder.layers.{layer}.self_attention.out_projection.weight" for layer in range(24)]
    names += ["fc6", "fc7", "transformer.decoder.layers.3.self_attention.out_projection.weight"]
    short = short_names(names, width)
    assert set(short) == set(names)
    assert len(set(short.values())) == len(names)
    assert all(len(text) <= max(2, width / CHARACTER_WIDTH) for text in short.values())
    assert short["fc6"] == "fc6"


def test_names_that_differ_in_the_middle_show_where() -> None:
    names = [f"encoder.layers.{layer}.attention.out_projection.weight" for layer in (3, 11)]
    assert list(short_names(names, 100).values()) == ["…3…ction.weight", "…11…tion.weight"]


def test_large_numbers_and_times_have_no_exponent() -> None:
    assert number_text(1040) == "1,040"
    assert number_text(65536.4, 4) == "65,536"
    assert number_text(93.554, 4) == "93.55"
    assert seconds_text(1.04) == "1.04 s"
