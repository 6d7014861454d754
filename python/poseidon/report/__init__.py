"""Shows a run as a page (report.html) and as a trace that Perfetto opens (trace.json).

Every rank makes a `RankRecord` (`rank_record` makes it from what an adapter recorded) and saves it with `save_rank`.
One process loads all records with `load_ranks`, makes a `Report` and writes both files.
"""

from poseidon.report.charts import bars_chart, scheme_style, scheme_title, timeline_chart
from poseidon.report.data import (
    Epoch,
    LayerRow,
    RankRecord,
    Report,
    Span,
    hidden_share,
    load_ranks,
    save_rank,
    slowest_step_s,
)
from poseidon.report.layout import (
    HALF_WIDTH,
    PAGE_WIDTH,
    document,
    figure,
    figures,
    head,
    legend,
    paragraphs,
    section,
    table,
)
from poseidon.report.lines import Line, speedup_chart
from poseidon.report.page import headlines, html, write_html
from poseidon.report.path_chart import Link, path_chart
from poseidon.report.run import report_of_run
from poseidon.report.steps import rank_record
from poseidon.report.svg import bytes_text, number_text, percent_text, seconds_text
from poseidon.report.trace import trace_events, write_trace

__all__ = [
    "HALF_WIDTH",
    "PAGE_WIDTH",
    "Epoch",
    "LayerRow",
    "Line",
    "Link",
    "RankRecord",
    "Report",
    "Span",
    "bars_chart",
    "bytes_text",
    "document",
    "figure",
    "figures",
    "head",
    "headlines",
    "hidden_share",
    "html",
    "legend",
    "load_ranks",
    "number_text",
    "paragraphs",
    "path_chart",
    "percent_text",
    "rank_record",
    "report_of_run",
    "save_rank",
    "scheme_style",
    "scheme_title",
    "seconds_text",
    "section",
    "slowest_step_s",
    "speedup_chart",
    "table",
    "timeline_chart",
    "trace_events",
    "write_html",
    "write_trace",
]
