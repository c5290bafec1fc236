"""Warm-up before the first request, so that it is as fast as later ones.

The first steps of a process load kernels, record decode steps and touch memory; the first chat starts threads. The
requests of the warm-up go through an app and an engine of their own, which share nothing with the served ones but the
model, the memory and the process: caches, policies, metrics and the live page begin empty.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import httpx

from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.server.app import create_app

WORDS = 280  # of a prompt: about 300 tokens, several pages
MIN_WORD_TOKENS = 4  # of memory for a word, with room for the template
MAX_TOKENS = 8  # of an answer
IDLE_SECONDS = 60.0  # for the work that follows answers

log = logging.getLogger("headwater.server")


def warm_up(engine: Engine, config: ServeConfig) -> None:
    """Answer a few requests before `engine`, which must not have started, gets its first one.

    An error is logged, and the server starts nevertheless.
    """
    began = time.perf_counter()
    quiet = replace(
        config, record=None, otlp_endpoint=None, api_key=None, api_key_file=None, kv_events=False, speculation="off",
        draft_model=None, tier=(), request_timeout=None,
    )  # fmt: skip
    rehearsal = engine.rehearsal(quiet)
    rehearsal.start()
    try:
        asyncio.run(_answer(rehearsal, quiet))
        rehearsal.drain(IDLE_SECONDS)
    except Exception as error:
        log.warning("the warm-up failed, so that the first requests are slower: %s", error)
    finally:
        rehearsal.stop()
    log.info("warmed up in %.1f s", time.perf_counter() - began)


async def _answer(engine: Engine, config: ServeConfig) -> None:
    """Send a prompt, the same one again, which hits, and another one. Raises RuntimeError for an error's status."""
    app = create_app(engine, config)
    app.state.services.first.watchers = ()  # no lines of the log
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://headwater", timeout=None) as client:
        for body in (_body("river", engine), _body("river", engine, stream=True), _body("stone", engine)):
            path = "/v1/completions" if engine.chat_template is None else "/v1/chat/completions"
            reply = await client.post(path, json=body)
            if reply.status_code != 200:
                raise RuntimeError(f"{path} answers with status {reply.status_code}: {reply.text[:200]}")


def _body(word: str, engine: Engine, **more: object) -> dict[str, object]:
    """Return a request whose prompt has about 300 tokens, fewer if the model or the memory takes fewer."""
    words = max(1, min(WORDS, engine.max_model_len // MIN_WORD_TOKENS))
    text = f"{word} " * words
    asked = {"prompt": text} if engine.chat_template is None else {"messages": [{"role": "user", "content": text}]}
    return {**asked, "max_tokens": MAX_TOKENS, "temperature": 0.7, "top_p": 0.9, "ignore_eos": True, **more}
