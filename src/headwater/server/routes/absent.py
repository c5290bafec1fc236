"""Routes that OpenAI's and other servers have and this one has not: told apart from mistyped ones."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException

from headwater.server.routes.service import Service

ABSENT = (
    "/v1/embeddings",
    "/v1/audio/{rest:path}",
    "/v1/images/{rest:path}",
    "/v1/videos",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/score",
    "/v1/pooling",
    "/v1/classify",
    "/v1/files",
    "/v1/batches",
    "/v1/fine_tuning/{rest:path}",
    "/v1/assistants",
    "/v1/threads",
    "/v1/vector_stores",
    "/v1/conversations",
    "/v1/realtime",
    "/v1/messages",
)
OFFERED = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /tokenize and /detokenize"


def install(app: FastAPI, service: Service) -> None:
    async def absent(request: Request) -> None:
        raise HTTPException(404, f"this server generates text and offers {OFFERED}, and nothing at this path")

    for path in ABSENT:
        app.add_api_route(path, absent, methods=["GET", "POST", "DELETE"], include_in_schema=False)
