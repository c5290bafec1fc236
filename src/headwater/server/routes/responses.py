"""/v1/responses: the chat path in the words of OpenAI's newer API. Nothing is kept from one request to the next."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from headwater.server.answer.reply import Reply
from headwater.server.answer.responses_reply import ResponsesReply
from headwater.server.http.refusals import generated
from headwater.server.requests.responses import ResponsesRequest
from headwater.server.routes.service import Service

FIELDS = ("id", "object", "created_at", "model", "status", "output", "usage", "headwater")


def install(app: FastAPI, service: Service) -> None:
    @app.post("/v1/responses", response_model=None, responses=generated(*FIELDS))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        def worded(chat: Reply) -> ResponsesReply:
            return ResponsesReply(body, service.engine.model_name, chat)

        return await service.chat(body.chat(), request, "responses", worded)
