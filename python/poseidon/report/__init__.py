"""Shows a run as a page (report.html) and as a trace that Perfetto opens (trace.json).

Every rank makes a `RankRecord` (`rank_record` makes it from what an adapter recorded) and saves it with `save_rank`.
One process loads all records with `load_ranks`, makes a `Report` and writes both files.
"""

from poseidon.report.data import Epoch, LayerRow, RankRecord, Report, Span, load_ranks, save_rank, slowest_step_s
from poseidon.report.page import headlines, write_html
from poseidon.report.run import rank_record, report_of_run
from poseidon.report.svg import bytes_text, percent_text
from poseidon.report.trace import write_trace
