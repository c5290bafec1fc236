"""A session of an agent over HTTP: with the cache its answers and their probabilities are those without it."""

from __future__ import annotations

from headwater.config import ServeConfig
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import load_model
from headwater.server.answer import recording
from headwater.server.app import create_app
from tests.checkpoints import checkpoint
from tests.exactness.rig import Make
from tests.server import templates
from tests.server.agents import QwenCode
from tests.server.client import send_to

TURNS = ("Read a.py.", "Now b.py, and say why.", "Again.")


def answer(app, body):
    (response,) = send_to(app, [("POST", QwenCode.path, {"json": body})])
    assert response.status_code == 200, response.text
    return response.json()


def test_session_with_calls_has_the_same_bits_with_and_without_the_cache(tmp_path, monkeypatch):
    prepare_process(2)
    numerics.use(Numerics())
    loaded = load_model(checkpoint(tmp_path, "qwen3_5"), "float32")
    make, number = Make(loaded, SelfCheck(True, None, "compiled")), 0
    monkeypatch.setattr(recording, "new_call_id", lambda prefix: f"{prefix}{number}")
    with make(600) as warm, make(600, cache=False) as cold:
        warm.engine.chat_template = cold.engine.chat_template = templates.STRICT
        apps = [create_app(rig.engine, ServeConfig()) for rig in (warm, cold)]
        agent, cached = QwenCode(), []
        for text in TURNS:
            agent.say(text)
            for choice in ("required", "none"):
                number += 1
                limits = {"max_tokens": 40, "temperature": 0, "logprobs": True, "top_logprobs": 3}
                body = {**agent.body(), "tool_choice": choice, **limits}
                one, other = (answer(app, body) for app in apps)
                assert one["choices"] == other["choices"]
                cached.append(one["usage"]["prompt_tokens_details"]["cached_tokens"])
                agent.take(one)
    assert cached[0] == 0
    assert min(cached[1:]) > 0
    assert cached[-1] > cached[1]
