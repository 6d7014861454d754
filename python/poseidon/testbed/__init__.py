"""Puts N hosts on one machine: network namespaces behind switches, with ports of limited rate and with priorities."""

from poseidon.testbed.layout import CONGESTION_CONTROLS, MOST_PORTS, Layout
from poseidon.testbed.network import HOST_DEVICE, Host, TestbedError, make_hosts, missing_requirements
from poseidon.testbed.state import Record, records
from poseidon.testbed.testbed import Testbed, remove, remove_all
