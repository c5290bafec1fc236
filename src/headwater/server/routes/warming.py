"""/cache/segments: texts that are stored as segments before a prompt holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol, runtime_checkable

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from headwater.engine.warming import Outcome
from headwater.errors import ConfigError, RequestTooLarge
from headwater.server.http.refusals import OF_A_BODY, refusals
from headwater.server.prompt.segments import MAX_SEGMENTS
from headwater.server.requests.sampling import MAX_SALT
from headwater.server.routes.service import Service


@runtime_checkable
class WarmsSegments(Protocol):
    """What warming needs of an engine."""

    def warm_segments(self, segments: Sequence[tuple[int, ...]], namespace: str) -> list[Outcome]:
        """Store segments of these token ids; what became of each, in their order.

        Blocks until all are done; called on a thread of its own. Raises QueueFull, EngineStopped and DeadlineExceeded
        as requests do.
        """
        ...


class WarmRequest(BaseModel):
    model_config = ConfigDict(strict=True)

    texts: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_SEGMENTS, fail_fast=True)
    ]
    cache_salt: str | None = Field(None, max_length=MAX_SALT)


class Warmed(BaseModel):
    index: int  # of the text
    tokens: int
    outcome: Outcome


class AllWarmed(BaseModel):
    object: Literal["list"] = "list"
    data: list[Warmed]


def install(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.post("/cache/segments", responses={**OF_A_BODY, **refusals(501)})
    async def warm(body: WarmRequest) -> AllWarmed:
        if not isinstance(engine, WarmsSegments):
            raise HTTPException(501, "this server's engine stores no segments")
        salt = body.cache_salt or ""
        segments = await run_in_threadpool(segments_of, service, body.texts, salt)
        try:
            outcomes = await run_in_threadpool(engine.warm_segments, segments, salt)
        except ConfigError as error:
            raise HTTPException(501, str(error)) from error
        told = enumerate(zip(segments, outcomes, strict=True))
        return AllWarmed(data=[Warmed(index=i, tokens=len(ids), outcome=outcome) for i, (ids, outcome) in told])


def segments_of(service: Service, texts: Sequence[str], namespace: str) -> list[tuple[int, ...]]:
    """Each text's token ids as a segment. Raises RequestTooLarge for one that no prompt could hold."""
    segments, limit = [service.encoder.encode_segment(text, namespace) for text in texts], service.engine.max_model_len
    for number, ids in enumerate(segments):
        if len(ids) >= limit:
            raise RequestTooLarge(f"text {number} has {len(ids):,} tokens, the server takes {limit:,} with an answer")
    return segments
