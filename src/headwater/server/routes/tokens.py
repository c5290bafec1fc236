"""/tokenize and /detokenize, in the form that vLLM has made common."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.concurrency import run_in_threadpool

from headwater.request import Span
from headwater.server.http.refusals import OF_A_BODY
from headwater.server.requests.chat import ChatMessage, ChatRequest, Documents
from headwater.server.requests.sampling import MAX_SALT, TokenId
from headwater.server.requests.tools import MAX_TOOLS, ToolDefinition
from headwater.server.routes.service import Service


class TokenizeRequest(BaseModel):
    """Text, or a conversation in place of it, which the chat template renders first."""

    model_config = ConfigDict(strict=True)

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    documents: Documents | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT)  # what is tokenised is kept for its namespace alone

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        given = [name for name in ("prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given) or 'neither'} given, of prompt and messages one is needed")
        return self


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None
    segments: list[list[int]]  # start and end of those tokens that may be reused at any position


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True)

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class Text(BaseModel):
    prompt: str


def install(app: FastAPI, service: Service) -> None:
    tokenizer = service.engine.tokenizer

    async def prompt_of(body: TokenizeRequest) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        if body.prompt is None:
            chat = ChatRequest.model_construct(
                messages=body.messages,
                tools=body.tools,
                documents=body.documents,
                chat_template_kwargs=body.chat_template_kwargs,
                cache_salt=body.cache_salt,
            )
            prompt = await run_in_threadpool(service.chat_prompt, chat)
            return prompt.tokens, prompt.segments
        encode, salt = service.encoder.encode_prompt, body.cache_salt or ""
        encoded = await run_in_threadpool(encode, body.prompt, body.add_special_tokens, salt)
        return encoded.ids, encoded.segments

    @app.post("/tokenize", responses=OF_A_BODY)
    async def tokenize(body: TokenizeRequest) -> Tokens:
        tokens, segments = await prompt_of(body)
        names = [tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
        return Tokens(
            tokens=list(tokens),
            count=len(tokens),
            max_model_len=service.engine.max_model_len,
            token_strs=names,
            segments=[[span.start, span.end] for span in segments],
        )

    @app.post("/detokenize", responses=OF_A_BODY)
    async def detokenize(body: DetokenizeRequest) -> Text:
        service.check_tokens(body.tokens, "tokens")
        return Text(prompt=await run_in_threadpool(tokenizer.decode, body.tokens, skip_special_tokens=False))
