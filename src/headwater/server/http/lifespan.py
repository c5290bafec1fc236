"""What runs from an app's start to its end, beside its requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI


def during(app: FastAPI, part: Callable[[], AbstractAsyncContextManager[None]]) -> None:
    """Enter `part` when the app starts, after what was added before, and leave it when the app ends."""
    outer = app.router.lifespan_context

    @asynccontextmanager
    async def both(started: FastAPI) -> AsyncIterator[object]:
        async with outer(started) as state, part():
            yield state

    app.router.lifespan_context = both
