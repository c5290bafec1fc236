"""What tests of the server share."""

from __future__ import annotations

import pytest

from tests.server.fake_engine import FakeEngine


@pytest.fixture
def engine():
    fake = FakeEngine()
    fake.start()
    yield fake
    fake.stop()
