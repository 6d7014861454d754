"""N hosts on one machine: network namespaces behind one switch, with shaped ports."""

from poseidon.testbed.network import HOST_DEVICE, MOST_PORTS, Host, TestbedError, make_hosts, missing_requirements
from poseidon.testbed.rate import format_rate, parse_rate
from poseidon.testbed.state import Record
from poseidon.testbed.testbed import Testbed, records, remove, remove_all

__all__ = [
    "HOST_DEVICE",
    "MOST_PORTS",
    "Host",
    "Record",
    "Testbed",
    "TestbedError",
    "format_rate",
    "make_hosts",
    "missing_requirements",
    "parse_rate",
    "records",
    "remove",
    "remove_all",
]
