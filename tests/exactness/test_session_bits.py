"""A session of an agent over HTTP: with the cache its answers and their probabilities are those without it."""

from __future__ import annotations

import pytest

from headwater.config import ServeConfig
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import load_model
from headwater.server.answer import forms
from headwater.server.app import create_app
from tests.checkpoints import checkpoint
from tests.exactness.rig import Make
from tests.server import templates
from tests.server.agents import AGENTS
from tests.server.client import send_to

TURNS = ("Read a.py.", "Now b.py, and say why.", "Again.")


LIMITS = {
    "/v1/chat/completions": {"max_tokens": 40, "logprobs": True, "top_logprobs": 3},
    "/v1/messages": {"max_tokens": 40},
    "/v1/responses": {"max_output_tokens": 40},
}
FULL = [pytest.param(name, marks=pytest.mark.full) for name in AGENTS if name != "qwen_code"]


def answer(app, path, body):
    (response,) = send_to(app, [("POST", path, {"json": body})])
    assert response.status_code == 200, response.text
    return response.json()


def said(value):
    """Return an answer's content and probabilities, without ids that differ from answer to answer."""
    if isinstance(value, dict):
        return {name: said(one) for name, one in value.items() if name != "id"}
    return [said(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["qwen_code", *FULL])
def test_session_has_the_same_bits_with_and_without_the_cache(tmp_path, monkeypatch, name):
    prepare_process(2)
    numerics.use(Numerics())
    loaded = load_model(checkpoint(tmp_path, "qwen3_5"), "float32")
    make, number = Make(loaded, SelfCheck(True, None, "compiled")), 0
    monkeypatch.setattr(forms, "new_call_id", lambda prefix: f"{prefix}{number}")
    with make(600) as warm, make(600, cache=False) as cold:
        warm.engine.chat_template = cold.engine.chat_template = templates.STRICT
        apps = [create_app(rig.engine, ServeConfig()) for rig in (warm, cold)]
        agent, cached = AGENTS[name](), []
        for text in TURNS:
            agent.say(text)
            for choice in ("required", "none"):
                number += 1
                body = {**agent.body(), **LIMITS[agent.path], "temperature": 0}
                if name == "qwen_code":
                    body["tool_choice"] = choice
                elif not agent.asks:
                    continue
                one, other = (answer(app, agent.path, body) for app in apps)
                for field in ("choices", "content", "output"):
                    assert said(one.get(field)) == said(other.get(field))
                cached.append(one["headwater"]["cached_tokens"])
                agent.take(one)
    assert cached[0] == 0
    assert min(cached[1 + agent.moves :]) > 0  # what moves stood right after the rules in the first request
