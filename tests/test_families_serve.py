"""The server over a small checkpoint of each family: the official client is answered, and then from the cache."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from headwater.cli import run
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics
from headwater.models.families import read_folder
from headwater.server.app import create_app
from tests.checkpoints import SMALLEST
from tests.server.routes.test_serving import Server

PROMPT = "the quiet river flows under the old stone bridge and " * 30
PAGE = 64


@pytest.fixture(params=SMALLEST.values(), ids=SMALLEST)
def folder(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint(request.param)


@pytest.fixture
def client(folder: Path) -> Iterator[openai.OpenAI]:
    config = ServeConfig(model=folder, dtype="float32", memory=64 * 2**20)
    engine = Engine.load(config)
    engine.start()
    with socket.create_server(("127.0.0.1", 0)) as sock, Server(create_app(engine, config), sock):
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
    engine.stop()
    numerics.use(Numerics())


def test_family_is_served_and_a_cached_answer_is_the_cold_one(client: openai.OpenAI) -> None:
    cold, cached = (
        client.completions.create(model="any", prompt=PROMPT, max_tokens=24, temperature=0, logprobs=1) for _ in "12"
    )
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert cached.usage.prompt_tokens_details.cached_tokens == (cold.usage.prompt_tokens - 1) // PAGE * PAGE > 0
    assert cached.choices[0].text == cold.choices[0].text != ""
    assert cached.choices[0].logprobs.token_logprobs == cold.choices[0].logprobs.token_logprobs
    assert client.get("/../health", cast_to=object)["deterministic"] == "yes"


def test_inspect_prints_the_cache_costs_of_a_family(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = read_folder(folder)
    assert run(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    for cost in (spec.weight_bytes, spec.kv_bytes_per_token, spec.page_bytes, spec.checkpoint_bytes):
        assert f" {cost:,} " in shown
    for kind, n in spec.layers_by_kind.items():
        assert f"{n} {kind}" in " ".join(shown.split())
