"""Endpoints of Ollama's API: /api/chat, /api/generate, the served model, and refusals of those that change models."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from headwater.errors import CheckpointError
from headwater.models.files import config_file, model_config
from headwater.models.hub import folder_of
from headwater.server.answer.formats.parser import AnswerParser
from headwater.server.answer.forms import Parser
from headwater.server.answer.ollama import MEDIA_TYPE, Fields, OllamaReply, chat_fields, generate_fields, loaded
from headwater.server.http.error_forms import OllamaRefusal
from headwater.server.http.errors import OLLAMA_BODY_REFUSALS, generated, refusals
from headwater.server.requests.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from headwater.server.routes.generation import Answering
from headwater.server.routes.service import Service, Services, json_routes, service_of

API_VERSION = "0.32.0"  # release of Ollama that has this API: clients refuse one below the version that they need
FIELDS = ("model", "created_at", "done", "done_reason")
STREAMED = {MEDIA_TYPE: {"schema": {"type": "string", "description": "Objects, a line each"}}}
LOADED_DAYS = 36_500  # until the model is unloaded: never
# format of the weights -> Ollama's name, if it has one
QUANTIZATION = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
UNITS = (("B", 10**9), ("M", 10**6), ("K", 10**3))
# the model's default of a sampling parameter -> Ollama's option
DEFAULTS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
DEFAULTS |= {"repetition_penalty": "repeat_penalty"}

# path below /api -> the reason why it is absent
CHANGES_REFUSED = "serves the models that it was started with (headwater serve MODEL) and changes none"
ABSENT = dict.fromkeys(("pull", "push", "create", "delete", "copy", "blobs/{digest}"), CHANGES_REFUSED)
ABSENT |= dict.fromkeys(("embed", "embeddings"), "generates text and computes no embeddings")
UNAUTHORIZED = refusals(401, form=OllamaRefusal)


class Details(BaseModel):
    parent_model: str = ""
    format: str = "safetensors"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(BaseModel):
    """The served model, as lists have it."""

    name: str
    model: str
    modified_at: datetime
    size: int  # bytes of the weights in memory
    digest: str  # of name, configuration, template, dtype and format of weights, not of the weights
    details: Details


class Tags(BaseModel):
    models: list[ListedModel]


class RunningModel(ListedModel):
    """A model whose weights, or at least whose cache, are in memory."""

    state: Literal["loaded", "unloaded"]
    cache_bytes: int
    expires_at: datetime
    size_vram: int
    context_length: int


class Running(BaseModel):
    models: list[RunningModel]


class ShowRequest(BaseModel, strict=True):
    model: str | None = None  # any name is accepted: the server has one model
    name: str | None = None  # older name of the field


class Shown(BaseModel):
    """Description of the served model."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: datetime


class ApiVersion(BaseModel):
    version: str  # of Ollama's API
    headwater: str


router = json_routes()
CHAT = generated(*FIELDS, "message", refused=OLLAMA_BODY_REFUSALS, streamed=STREAMED)
GENERATE = generated(*FIELDS, "response", refused=OLLAMA_BODY_REFUSALS, streamed=STREAMED)


@router.post("/api/chat", response_model=None, responses=CHAT)
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    service = service_of(request)
    if not body.messages:
        return without_prompt(service, body, chat_fields)
    generations, parser = await run_in_threadpool(service.chat, body)
    answering = Answering(service, "ollama_chat", body, request)
    return await answering.answer(generations, ollama_reply(service, body, parser(), chat_fields))


@router.post("/api/generate", response_model=None, responses=GENERATE)
async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
    service = service_of(request)
    if not body.prompt:
        return without_prompt(service, body, generate_fields)
    if body.raw:
        generations, _ = await run_in_threadpool(service.completion, body.as_completion())
        parser: Parser = AnswerParser()  # all text is the answer
    else:
        generations, new_parser = await run_in_threadpool(service.chat, body)
        parser = new_parser()
    answering = Answering(service, "ollama_generate", body, request)
    return await answering.answer(generations, ollama_reply(service, body, parser, generate_fields))


def ollama_reply(service: Service, body: OllamaRequest, parser: Parser, fields: Fields) -> OllamaReply:
    """Return the reply to a request, with names of tokens if log probabilities are wanted."""
    names = None if body.wanted_logprobs is None else service.names
    return OllamaReply(body, service.engine.model_name, parser, names, fields)


def without_prompt(service: Service, body: OllamaRequest, fields: Fields) -> Response:
    """Answer a request without a prompt, by which clients load a model: it is loaded."""
    service.note_model(body.model)
    return JSONResponse(loaded(service.engine.model_name, fields))


def refusing(reason: str) -> Any:
    """Return an endpoint that refuses every request for this reason."""

    async def absent(request: Request) -> None:
        raise HTTPException(404, f"this server {reason}")

    return absent


for path, reason in ABSENT.items():
    methods = ["HEAD", "POST", "DELETE"]
    router.add_api_route(f"/api/{path}", refusing(reason), methods=methods, include_in_schema=False)


def install(app: FastAPI, services: Services) -> None:
    """Describe the served models once: their folders may be deleted while they are served."""
    app.state.listed = {service: listed_model(service) for service in services.all}


@router.head("/api/tags", include_in_schema=False)
@router.get("/api/tags", responses=UNAUTHORIZED)
async def tags(request: Request) -> Tags:
    return Tags(models=list(request.app.state.listed.values()))


@router.get("/api/ps", responses=UNAUTHORIZED)
async def ps(request: Request) -> Running:
    listed = request.app.state.listed
    return Running(models=[await run_in_threadpool(running_model, *one) for one in listed.items()])


@router.post("/api/show", responses=OLLAMA_BODY_REFUSALS)
async def show(body: ShowRequest, request: Request) -> Shown:
    service = service_of(request)
    listed = request.app.state.listed[service]
    service.note_model(body.model or body.name)
    engine = service.engine
    return Shown(
        modelfile=f"FROM {engine.model_name}\n",
        parameters=parameters(service.model_len, engine.generation_defaults),
        template=engine.chat_template or "",
        details=listed.details,
        model_info=model_info(service),
        capabilities=service.capabilities,
        modified_at=listed.modified_at,
    )


@router.head("/api/version", include_in_schema=False)
@router.get("/api/version", responses=UNAUTHORIZED)
async def api_version() -> ApiVersion:
    return ApiVersion(version=API_VERSION, headwater=version("headwater"))


def running_model(service: Service, listed: ListedModel) -> RunningModel:
    """Describe a model in memory; unloaded weights have no size, and their time is over."""
    held = service.residence()
    is_loaded, never = (
        held.state == "loaded",
        datetime.fromtimestamp(service.started, UTC) + timedelta(days=LOADED_DAYS),
    )
    facts = listed.model_dump() | held.model_dump() | {"size": listed.size if is_loaded else 0}
    facts["expires_at"] = held.expires_at or (never if is_loaded else datetime.now(UTC))
    on_card = listed.size if service.config.device.startswith("cuda") else 0
    return RunningModel(**facts, size_vram=on_card, context_length=service.model_len)


def listed_model(service: Service) -> ListedModel:
    """Describe the served model. Without a readable `config.json` its time is the server's start."""
    engine, spec = service.engine, service.engine.spec
    text, changed = "", float(service.started)
    with suppress(OSError, CheckpointError):  # the folder may have gone since the model was loaded
        path = folder_of(service.config.model)
        text, changed = json.dumps(model_config(path)), config_file(path).stat().st_mtime
    parts = (engine.model_name, text, engine.chat_template or "", spec.dtype_name, spec.weights)
    return ListedModel(
        name=engine.model_name,
        model=engine.model_name,
        modified_at=datetime.fromtimestamp(changed, UTC),
        size=spec.weight_bytes,
        digest=hashlib.sha256("\0".join(parts).encode()).hexdigest(),
        details=Details(
            family=spec.model_type,
            families=[spec.model_type],
            parameter_size=short(parameter_count(service)),
            quantization_level=QUANTIZATION.get(spec.weights_held, spec.weights_held),
        ),
    )


def model_info(service: Service) -> dict[str, Any]:
    """Return the facts about the model that clients read, by Ollama's names."""
    engine, spec = service.engine, service.engine.spec
    return {
        "general.architecture": spec.model_type,
        "general.basename": engine.model_name,
        "general.parameter_count": parameter_count(service),
        f"{spec.model_type}.context_length": service.model_len,
        f"{spec.model_type}.embedding_length": spec.hidden_size,
        f"{spec.model_type}.block_count": len(spec.blocks),
    }


def parameter_count(service: Service) -> int:
    """Return the number of weights, experts included."""
    return sum(service.engine.spec.parameters_by_kind().values())


def parameters(context: int, defaults: dict[str, Any]) -> str:
    """Return options with the model's defaults, a line each, as Ollama writes them; `context`: tokens."""
    values = {"num_ctx": context}
    values |= {name: defaults[key] for key, name in DEFAULTS.items() if defaults.get(key) is not None}
    return "\n".join(f"{name:<30} {value}" for name, value in values.items())


def short(count: int) -> str:
    """Return a number of weights in at most five characters or so: 26.2M."""
    return next((f"{count / size:.1f}{unit}" for unit, size in UNITS if count >= size), str(count))
