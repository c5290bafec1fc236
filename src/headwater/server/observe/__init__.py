"""Observation of requests and engine: metrics, logs, traces, recordings, and the data and files of the live page."""
