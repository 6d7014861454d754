"""Reads the flight records of a job that has failed and says who started it (docs/flight-records.md)."""

from poseidon.doctor.records import Record, group, load
from poseidon.doctor.verdict import Verdict, diagnose
