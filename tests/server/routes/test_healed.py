"""Two turns about documents, over HTTP: the second account tells if it resumed from approximate states."""

import asyncio

import httpx
import pytest

from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import LoadedModel, load_model
from headwater.server.app import create_app
from tests.checkpoints import checkpoint

PAGES = 1000
PATIENCE = 60  # seconds
DOCUMENTS = ["one fine day in the old town " * 20, "two boats lay by the river " * 25]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    prepare_process(2)
    numerics.use(Numerics())
    return load_model(checkpoint(tmp_path_factory.mktemp("healed"), "qwen3_5"), "float32")


def two_turns(loaded, healing):
    """Return the accounts of both turns, and the metrics after them."""
    config = ServeConfig(memory=PAGES * loaded.spec.page_bytes, healing=healing)
    engine = Engine.over(loaded, SelfCheck(True, None, "compiled"), config)
    engine.start()

    async def go():
        transport = httpx.ASGITransport(create_app(engine, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=PATIENCE) as client:

            async def ask(prompt):
                body = {"prompt": prompt, "max_tokens": 80, "temperature": 0, "ignore_eos": True, "fidelity": "fast"}
                reply = await client.post("/v1/completions", json=body)
                assert reply.status_code == 200, reply.text
                assert engine.drain(PATIENCE)
                return reply.json()

            prompt = "<|segment|>".join(["You are a guide. " * 12, *DOCUMENTS, "What lay by the river? "])
            first = await ask(prompt)
            second = await ask(prompt + first["choices"][0]["text"] + " And then? ")
            metrics = (await client.get("/metrics")).text
            cache = (await client.get("/cache")).json()
        return first["headwater"], second["headwater"], metrics, cache

    try:
        return asyncio.run(go())
    finally:
        engine.stop()


def test_second_turn_after_healing_resumes_exactly(loaded):
    first, second, metrics, cache = two_turns(loaded, "idle")
    assert first["segments"] == 2
    assert (second["approximate_tokens"], second["segments"]) == (0, 0)
    assert second["cached_tokens"] >= first["prompt_tokens"] // 64 * 64
    healed = cache["since_start"]["healings"]["healed"]
    assert healed >= 1
    assert f'headwater_healings_total{{outcome="healed"}} {healed}.0' in metrics
    assert cache["since_start"]["computed_tokens"]["healing"] > 0
    assert cache["healings_waiting"] == 0


def test_second_turn_without_healing_reports_its_approximate_tokens(loaded):
    first, second, metrics, _ = two_turns(loaded, "off")
    assert first["segments"] == 2
    assert second["approximate_tokens"] > 64
    assert 'headwater_healings_total{outcome="healed"} 0.0' in metrics
