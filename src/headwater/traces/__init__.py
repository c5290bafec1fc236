"""Recorded traffic: one reader a file, and when its requests come. No torch."""

from headwater.traces.loads import LOADS, make_arrivals, make_load
from headwater.traces.read import READERS, read_trace
from headwater.traces.request import Request, Trace

__all__ = ["LOADS", "READERS", "Request", "Trace", "make_arrivals", "make_load", "read_trace"]
