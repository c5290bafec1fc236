"""Traces: recorded traffic, one reader a format, and its arrival times. No torch."""
