"""Metrics, logs, traces, recordings, and the data of the live page."""
