"""The planner: predicts training steps on described clusters, and gives advice. It runs nothing.

`Planner` plans a model as training does and simulates its step, `make_report` makes what `poseidon plan` says.
"""

from poseidon.planner.cluster import ClusterSpec
from poseidon.planner.layers import Exchange
from poseidon.planner.pace import Pace, simulate_pace
from poseidon.planner.predict import Planner, Prediction
from poseidon.planner.recorded import RecordedRun, read_run
from poseidon.planner.report import make_report
from poseidon.planner.what_if import Change, what_if
