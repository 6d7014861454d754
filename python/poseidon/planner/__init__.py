"""The planner: predicts training steps on described clusters, and gives advice. It runs nothing.

`Planner` plans a model as training does and simulates its step, `make_report` makes what `poseidon plan` says.
"""

from poseidon.planner.cluster import ClusterSpec, InvalidCluster
from poseidon.planner.cluster_file import Setting, make_cluster, read_settings
from poseidon.planner.layers import EXCHANGE_OPTIONS, Exchange
from poseidon.planner.pace import Pace, PaceResult, simulate_pace, time_lost
from poseidon.planner.page import write_page
from poseidon.planner.path_page import write_what_if
from poseidon.planner.placement import PLACEMENTS, ps_bits
from poseidon.planner.predict import Planner, Prediction
from poseidon.planner.recorded import RecordedRun, read_run
from poseidon.planner.report import PlanReport, make_report
from poseidon.planner.trace import write_prediction
from poseidon.planner.what_if import Change, WhatIf, ddp_step_of, what_if

__all__ = [
    "EXCHANGE_OPTIONS",
    "PLACEMENTS",
    "Change",
    "ClusterSpec",
    "Exchange",
    "InvalidCluster",
    "Pace",
    "PaceResult",
    "PlanReport",
    "Planner",
    "Prediction",
    "RecordedRun",
    "Setting",
    "WhatIf",
    "ddp_step_of",
    "make_cluster",
    "make_report",
    "ps_bits",
    "read_run",
    "read_settings",
    "simulate_pace",
    "time_lost",
    "what_if",
    "write_page",
    "write_prediction",
    "write_what_if",
]
