"""Endpoints about tokens: /tokenize, /detokenize and /tokenizer_info in vLLM's form, /v1/messages/count_tokens.

/cache/segments stores segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from fastapi import Request
from pydantic import BaseModel, Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from headwater.engine.preparations import Outcome
from headwater.errors import ConfigError
from headwater.request import Span
from headwater.server.http.errors import ANTHROPIC_BODY_REFUSALS, BODY_REFUSALS, BadRequest, of_field, refusals
from headwater.server.http.middleware import current_context, current_namespace
from headwater.server.requests.anthropic import CountTokensRequest
from headwater.server.requests.chat import Documents, Messages, ToolDefinitions, conversation_of
from headwater.server.requests.sampling import MAX_SALT_CHARACTERS, MAX_SEGMENTS, TokenId
from headwater.server.routes.service import Service, json_routes, service_of

ADDED_TOKEN = ("special", "lstrip", "rstrip", "single_word", "normalized")  # properties of an added token


class TokenizeRequest(BaseModel, strict=True):
    """Text, or a conversation that the chat template renders."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: ToolDefinitions | None = None
    documents: Documents | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None
    # encoded pieces are kept for this namespace only
    cache_salt: str | None = Field(None, max_length=MAX_SALT_CHARACTERS)

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        given = [name for name in ("prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            which = "both given" if given else "both missing"
            raise of_field("prompt", f"prompt and messages are {which}, exactly one is needed")
        return self


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None
    segments: list[list[int]]  # start and end of the tokens that may be reused at any position


class DetokenizeRequest(BaseModel, strict=True):
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class Text(BaseModel):
    prompt: str


class InputTokens(BaseModel):
    input_tokens: int


class TokenizerInfo(BaseModel):
    """Description of the tokenizer in vLLM's form, for clients that tokenise for themselves."""

    tokenizer_class: str = "PreTrainedTokenizerFast"  # of transformers, which reads any tokenizer.json
    model_max_length: int  # tokens of prompt and answer together
    vocab_size: int  # tokens of the model
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    added_tokens_decoder: dict[str, dict[str, str | bool]]  # added tokens by id


class WarmRequest(BaseModel, strict=True):
    texts: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1, max_length=MAX_SEGMENTS, fail_fast=True)
    cache_salt: str | None = Field(None, max_length=MAX_SALT_CHARACTERS)


class Warmed(BaseModel):
    index: int  # of the text
    tokens: int
    outcome: Outcome


class AllWarmed(BaseModel):
    object: Literal["list"] = "list"
    data: list[Warmed]


@runtime_checkable
class WarmsSegments(Protocol):
    """Engine that can store segments before a prompt holds them."""

    def warm_segments(self, segments: Sequence[tuple[int, ...]], namespace: str) -> list[Outcome]:
        """Store segments of these token ids; return the outcome of each.

        Blocks until all are stored; called on a thread. Raises QueueFull, EngineStopped and DeadlineExceeded, as
        requests do, and ConfigError if the engine stores no segments.
        """
        ...


router = json_routes()


@router.post("/tokenize", responses=BODY_REFUSALS)
async def tokenize(body: TokenizeRequest, request: Request) -> Tokens:
    service = service_of(request)
    tokens, segments = await run_in_threadpool(prompt_of, service, body)
    name_of = service.engine.tokenizer.id_to_token
    return Tokens(
        tokens=list(tokens),
        count=len(tokens),
        max_model_len=service.model_len,
        token_strs=[name_of(token) or "" for token in tokens] if body.return_token_strs else None,
        segments=[[span.start, span.end] for span in segments],
    )


def prompt_of(service: Service, body: TokenizeRequest) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    """Return the tokens of a text or conversation, and its segments. Raises BadRequest and TemplateError."""
    salt = current_namespace(body.cache_salt)
    if body.prompt is not None:
        encoded = service.encoder.encode_prompt(body.prompt, body.add_special_tokens, salt)
        return encoded.ids, encoded.segments
    try:
        sent = conversation_of(
            body.messages or (), body.tools, body.chat_template_kwargs, body.documents, service.message_rules
        )
    except ValueError as error:
        raise BadRequest(str(error), "messages") from error
    prompt = service.chat_prompt(sent, salt)
    return prompt.prompt, prompt.segments


@router.get("/tokenizer_info", responses=refusals(401))
async def tokenizer_info(request: Request) -> TokenizerInfo:
    service = service_of(request)
    engine = service.engine
    added, special = engine.tokenizer.get_added_tokens_decoder(), engine.special_tokens
    return TokenizerInfo(
        model_max_length=service.model_len,
        vocab_size=engine.spec.vocab_size,
        chat_template=engine.chat_template,
        added_tokens_decoder={
            str(id_): {"content": token.content, **{name: getattr(token, name) for name in ADDED_TOKEN}}
            for id_, token in sorted(added.items())
        },
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        unk_token=special.get("unk_token"),
        pad_token=special.get("pad_token"),
    )


@router.post("/detokenize", responses=BODY_REFUSALS)
async def detokenize(body: DetokenizeRequest, request: Request) -> Text:
    service = service_of(request)
    service.check_tokens(body.tokens, "tokens")
    decode = service.engine.tokenizer.decode
    return Text(prompt=await run_in_threadpool(decode, body.tokens, skip_special_tokens=False))


@router.post("/v1/messages/count_tokens", responses=ANTHROPIC_BODY_REFUSALS)
async def count_tokens(body: CountTokensRequest, request: Request) -> InputTokens:
    prompt = await run_in_threadpool(service_of(request).conversation_prompt, body)
    return InputTokens(input_tokens=len(prompt.prompt))


@router.post("/cache/segments", responses={**BODY_REFUSALS, **refusals(501)})
async def warm(body: WarmRequest, request: Request) -> AllWarmed:
    service = service_of(request)
    engine = service.engine
    if not isinstance(engine, WarmsSegments):
        raise HTTPException(501, "this server's engine stores no segments")
    salt = current_namespace(body.cache_salt)
    segments = await run_in_threadpool(segments_of, service, body.texts, salt)
    current_context().charge(sum(map(len, segments)))
    try:
        outcomes = await run_in_threadpool(engine.warm_segments, segments, salt)
    except ConfigError as error:
        raise HTTPException(501, str(error)) from error
    stored = enumerate(zip(segments, outcomes, strict=True))
    return AllWarmed(data=[Warmed(index=i, tokens=len(ids), outcome=outcome) for i, (ids, outcome) in stored])


def segments_of(service: Service, texts: Sequence[str], salt: str) -> list[tuple[int, ...]]:
    """Return each text's tokens as a segment. Raises RequestTooLarge for a text that no prompt could hold."""
    segments = [service.encoder.encode_segment(text, salt) for text in texts]
    for number, ids in enumerate(segments):
        service.lengths.check_segment(number, len(ids))
    return segments
