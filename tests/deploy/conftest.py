"""Metrics that a server exports."""

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from headwater.config import ServeConfig
from headwater.server.app import create_app
from tests.server.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def exported():
    """{sample: its labels' values} of a server that has answered one request."""
    engine = FakeEngine()
    engine.start()
    client = TestClient(create_app(engine, ServeConfig()))
    client.post("/v1/completions", json={"prompt": "abc"})
    text = client.get("/metrics").text
    engine.stop()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label, value in sample.labels.items():
                found.setdefault(sample.name, {}).setdefault(label, set()).add(value)
            found.setdefault(sample.name, {})
    return found
