"""The two endpoints that generate in OpenAI's older forms: completions and chat completions."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from headwater.server.http.refusals import generated
from headwater.server.requests.chat import ChatRequest, CompletionRequest
from headwater.server.routes.service import Service

FIELDS = ("id", "object", "created", "model", "choices", "usage", "headwater")


def install(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None, responses=generated(*FIELDS))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.complete(body, request)

    @app.post("/v1/chat/completions", response_model=None, responses=generated(*FIELDS))
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await service.chat(body, request)
