"""The server's OpenAPI description, tested with drawn requests, valid and invalid, in this process."""

from collections import Counter

import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headwater.config import ServeConfig
from headwater.server.app import create_app
from tests.server.fake_engine import FakeEngine
from tests.support import FULL

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/show"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("GET", "/api/version"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("POST", "/cache/segments"),
    ("POST", "/cache/path"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/version"),
]
EXAMPLES = 60 if FULL else 12  # of an operation and kind: half a minute for all 60


@pytest.fixture(autouse=True)
def denormals():
    """Allow denormal floats while drawing requests; the tests' process flushes them, as the server does."""
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(True)


@pytest.fixture(scope="module")
def described():
    engine = FakeEngine()
    engine.start()
    yield schemathesis.openapi.from_asgi("/openapi.json", create_app(engine, ServeConfig()))
    engine.stop()


def test_every_route_that_the_description_names_is_tried(described):
    ours = ("/v1/", "/api/", "/tokenize", "/detokenize", "/cache/", "/health", "/ping", "/version")
    named = {(method.upper(), path) for path, item in described.raw_schema["paths"].items() for method in item}
    assert {operation for operation in named if operation[1].startswith(ours)} == set(OPERATIONS)


WRONG_OR_RIGHT = [
    (*operation, mode)
    for operation in OPERATIONS
    for mode in GenerationMode
    if operation[0] == "POST" or mode is GenerationMode.POSITIVE  # nothing can be wrong about a GET
]


@pytest.mark.parametrize(("method", "path", "mode"), WRONG_OR_RIGHT, ids=str)
def test_server_conforms_to_its_openapi_description(described, method, path, mode):
    operation = described[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def keeps(case):
        statuses[case.call_and_validate(checks=CHECKS).status_code] += 1

    statuses = Counter()
    keeps()
    if mode is GenerationMode.NEGATIVE:
        assert statuses[400] > EXAMPLES / 2  # most of it was refused, so it was read
