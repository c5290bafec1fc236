"""Fixtures of the server's tests."""

import pytest

from tests.server.fake_engine import FakeEngine


@pytest.fixture
def engine():
    fake = FakeEngine()
    fake.start()
    yield fake
    fake.stop()
