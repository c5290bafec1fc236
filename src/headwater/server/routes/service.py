"""Service that the routes share: engine, settings, and the translation of requests to generations."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from headwater.config import ServeConfig
from headwater.errors import TemplateError, UnknownModel
from headwater.request import Drafting, Fidelity, Generation, SamplingParams
from headwater.server.answer.dialect import Dialect, Start
from headwater.server.answer.forms import Parser, RecordingParser, TokenNames
from headwater.server.answer.reply import Echo, echo_of, without_echo
from headwater.server.http.errors import MODEL, BadRequest, shown
from headwater.server.http.exchange import Exchange, ServedEngine
from headwater.server.http.middleware import current_context
from headwater.server.observe.overview import Overview
from headwater.server.observe.record import RequestRecord, Watcher
from headwater.server.prompt.chat import ChatPrompter
from headwater.server.prompt.encoding import Encoded, encode, longest_token
from headwater.server.prompt.segments import SegmentEncoder
from headwater.server.prompt.template import ChatTemplate
from headwater.server.requests.body import BodyLimits, JsonRoute
from headwater.server.requests.chat import CompletionRequest, ConversationRequest
from headwater.server.requests.messages import PLAIN, Conversation
from headwater.server.requests.normal_form import MessageRules
from headwater.server.requests.sampling import Lengths, SamplingRequest, SpeculationOptions

PREDICTED_CHARACTERS = 16  # of a token, at most
MAX_OTHER_NAMES = 100  # of models that are logged

log = logging.getLogger("headwater.server")


class Residence(BaseModel):
    """Parts of a model that are in memory: its weights, and bytes of its cache."""

    state: Literal["loaded", "unloaded"]
    expires_at: datetime | None  # when the weights leave memory if no request comes; None: never, or they have
    cache_bytes: int


class Service:
    """Engine, settings and translation. Translating may take a second: call it on a thread, not on the event loop."""

    def __init__(self, engine: ServedEngine, config: ServeConfig) -> None:
        self.engine, self.config = engine, config
        self.lengths = Lengths(engine, config)
        self.started = int(time.time())
        self.watchers: tuple[Watcher, ...] = ()
        self.overview: Overview  # set by the routes that show it
        self.answering: dict[Exchange, RequestRecord] = {}  # submitted requests that have not ended
        self._other_names: set[str] = set()  # of models, as clients sent them
        self.names = TokenNames(engine.tokenizer)
        engine.tokenizer.no_truncation()
        engine.tokenizer.no_padding()
        self._dialect = Dialect(engine.chat_template or "", config, engine.tokenizer)
        self.encoder = SegmentEncoder(engine.tokenizer, config.segment_separator, engine.max_model_len)
        self.body_limits = BodyLimits.of(
            engine.max_model_len, longest_token(engine.tokenizer), config.max_running + config.max_waiting
        )
        self._prompter: ChatPrompter | None = None
        if engine.chat_template is not None:
            template = ChatTemplate(engine.chat_template, engine.special_tokens)
            self._prompter = ChatPrompter(engine.tokenizer, template, self.encoder, config.billing_lines)

    @property
    def model_len(self) -> int:
        """Tokens of prompt and answer for which the model is made, if the memory has room for them."""
        return min(self.engine.max_model_len, self.engine.spec.max_length)

    def residence(self) -> Residence:
        """Return what of the model is in memory; wait at most for the planning of a step."""
        health, pages = self.engine.health(), self.engine.stats().cache.pages_by_use()
        at, used = health.get("unloads_at"), sum(pages.values()) - pages["free"]
        state: Literal["loaded", "unloaded"] = "loaded" if health.get("loaded", True) else "unloaded"
        until = None if at is None else datetime.fromisoformat(at)
        return Residence(state=state, expires_at=until, cache_bytes=used * self.engine.spec.page_bytes)

    @property
    def capabilities(self) -> list[str]:
        """Abilities of the model by Ollama's names."""
        return ["completion", *self._dialect.capabilities]

    def prefills(self) -> list[dict[str, object]]:
        """Return requests that have waited longer than a stream's start for their prompts, in order of arrival."""
        found = ((record, exchange.prefilled) for exchange, record in tuple(self.answering.items()))
        return [
            {**record.as_dict(), "computed_tokens": at[0], "prompt_tokens": at[1]}
            for record, at in found
            if at is not None and at[0] < at[1] and record.context.seconds >= self.config.stream_start
        ]

    def note_model(self, name: str | None) -> None:
        """Warn in the log of a name that is not the model's, once for each: the server answers to any name."""
        served = self.engine.model_name
        known = name in (None, served, f"{served}:latest") or name in self._other_names
        if known or len(self._other_names) >= MAX_OTHER_NAMES:
            return
        self._other_names.add(str(name))
        log.warning("a client named model %s; %r answers requests for any name", shown(name), served)
        if len(self._other_names) == MAX_OTHER_NAMES:
            log.warning("clients named %d other models; further names are not logged", MAX_OTHER_NAMES)

    def completion(self, body: CompletionRequest) -> tuple[list[Generation], Echo]:
        """Translate a completion: one generation for each answer, and the echo of the prompts if it is wanted."""
        self.lengths.check_max_tokens(body.max_tokens, body.wanted_prompt_logprobs is not None)
        self._check_tokens_of(body)
        constraint = body.answer_constraint
        encoded = [self._encoded(prompt, body.salt) for prompt in body.prompts]
        generations = []
        for one in encoded:
            prompt = Generation(one.ids, SamplingParams(), body.salt, segments=one.segments)
            generation = self._generation(body, prompt)
            params = replace(generation.params, constraint=constraint)
            generations += nth_answers(replace(generation, params=params), body)
        return generations, echo_of(self.engine.tokenizer, body, encoded) if body.echo else without_echo

    def chat(self, body: ConversationRequest) -> tuple[list[Generation], Callable[[], Parser]]:
        """Translate a conversation: one generation for each answer, and a function that returns a parser for one."""
        use, form = body.tool_use, body.answer_constraint
        held, unenforced = self._dialect.enforced(use, body.salt)
        limit = body.thought_tokens
        if limit is not None and not self._dialect.limits_reasoning:
            unenforced, limit = [*unenforced, "the limit of reasoning, whose end is not one token of this model"], None
        body.note_unenforced(unenforced)
        self._check_tokens_of(body)
        prompt = self.conversation_prompt(body)
        end = self._dialect.end_of(prompt.prompt)
        generation = self._generation(body, prompt)
        start = Start(end, limit if limit is not None and limit < generation.params.max_tokens else None)
        shaped = replace(generation, params=self._dialect.shaped(generation.params, start, held, form))
        parser = partial(self._dialect.parser, end, use)
        if self._prompter is None:
            return nth_answers(shaped, body), parser
        prompter, close = self._prompter, self._dialect.reasoning_close
        kept = (prompter.written, body.salt, body.call_id_prefix, close, prompter.writes_space)
        return nth_answers(shaped, body), lambda: RecordingParser(parser(), *kept)

    def conversation_prompt(self, body: ConversationRequest) -> Generation:
        """Return the prompt of a request's conversation; raises BadRequest for one that no template could render."""
        try:
            conversation = body.conversation(self.message_rules)
        except ValueError as error:
            raise BadRequest(str(error), "messages") from error
        return self.chat_prompt(conversation, body.salt)

    @property
    def message_rules(self) -> MessageRules:
        """Rules of the model's chat template for messages."""
        return PLAIN if self._prompter is None else self._prompter.rules

    def chat_prompt(self, conversation: Conversation, salt: str) -> Generation:
        """Return the conversation's prompt, as a generation of default sampling; raises TemplateError."""
        if self._prompter is None:
            raise TemplateError("the model has no chat template: use /v1/completions")
        return self._prompter.prepare(conversation, salt)

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise BadRequest for a token id beyond the model's vocabulary."""
        vocab_size = self.engine.spec.vocab_size
        if tokens and max(tokens) >= vocab_size:
            raise BadRequest(f"token id is {max(tokens):,}, the model has {vocab_size:,} tokens", param)

    def _check_tokens_of(self, body: SamplingRequest) -> None:
        self.check_tokens(body.stop_token_ids or (), "stop_token_ids")
        self.check_tokens([token for token, _ in body.biases], "logit_bias")

    def _encoded(self, prompt: str | list[int], salt: str) -> Encoded:
        if isinstance(prompt, str):
            return self.encoder.encode_prompt(prompt, namespace=salt)
        self.check_tokens(prompt, "prompt")
        return Encoded(tuple(prompt), (), self.encoder.segments_of(prompt))

    def _generation(self, body: SamplingRequest, prompt: Generation) -> Generation:
        """Add the request's sampling, deadline and fidelity to a prompt. A prompt to be scored is computed whole."""
        scored = body.wanted_prompt_logprobs
        segments = () if body.exact or scored is not None else prompt.segments
        max_tokens = self.lengths.max_tokens(len(prompt.prompt), len(segments), body.wanted_tokens, body.may_be_cut)
        self.lengths.check_min_tokens(body.min_tokens or 0, max_tokens)
        params = body.params(self.engine.generation_defaults, max_tokens, body.wanted_logprobs)
        params = replace(params, prompt_logprobs=scored)
        limits = {"timeout": body.timeout, "request_timeout": self.config.request_timeout}
        least = ((seconds, name) for name, seconds in limits.items() if seconds is not None)
        deadline, by = min(least, default=(None, "timeout"))
        fidelity = body.fidelity or Fidelity.BALANCED
        kept = prompt.keep_output and not body.ended  # no next turn would resume after the answer
        hinted = replace(prompt, ended=body.ended, priority=body.cache_priority, keep_output=kept)
        limited = replace(hinted, deadline=deadline, deadline_of=by)
        drafting = self._drafting(body, max_tokens)
        context = current_context()
        share = 1.0 if context.tenant is None else context.tenant.key.share
        named = replace(limited, request_id=context.id, key=context.key_name, share=share)
        return replace(named, params=params, segments=segments, fidelity=fidelity, drafting=drafting)

    def _drafts_with(self, head: str) -> bool:
        """Return whether requests may name this drafter: a server has one of them, with `auto` the best available."""
        setting = self.config.speculation
        if setting == "auto":
            return self.config.draft_model is not None if head == "draft" else self.engine.mtp_bytes > 0
        return setting in ("off", head)

    def _drafting(self, body: SamplingRequest, max_tokens: int) -> Drafting:
        """Return the drafts that a request asks for; a prediction is cut at about the answer's maximal length."""
        asked, prediction = body.speculation or SpeculationOptions(), list[int]()
        if asked.drafter in ("mtp", "draft") and not self._drafts_with(asked.drafter):
            must = f"the server drafts with {self.config.speculation!r}: name that, or no drafter"
            raise BadRequest(f"drafter is {asked.drafter!r}, and {must}", "speculation")
        if body.predicted_text and self.config.speculation != "off":
            text = body.predicted_text[: PREDICTED_CHARACTERS * max_tokens]
            prediction = encode(self.engine.tokenizer, text, add_special_tokens=False).ids
        return Drafting(asked.drafter, asked.tokens, tuple(prediction))


def json_routes() -> APIRouter:
    """Return a router of routes that read JsonRequests. Apps share them: a request has its app's service."""
    return APIRouter(route_class=JsonRoute, strict_content_type=False)


class Services:
    """Services of one process, by the names of their models. The first one answers requests that name no model."""

    def __init__(self, services: Sequence[Service]) -> None:
        self.all = tuple(services)
        self._by_name = {one.engine.model_name: one for one in services}

    @property
    def first(self) -> Service:
        """Service of the model that is named first."""
        return self.all[0]

    @property
    def several(self) -> bool:
        """True if a request has to name its model, unless it means the first one."""
        return len(self.all) > 1

    def named(self, name: str) -> Service:
        """Return the service of a model, whose name Ollama's clients end in :latest. Raises UnknownModel."""
        found = self._by_name.get(name) or self._by_name.get(name.removesuffix(":latest"))
        if found is None:
            which = "the models are" if self.several else "the model is"
            listed = ", ".join(map(repr, self._by_name))
            raise UnknownModel(f"model {shown(name)} is not served here; {which} {listed}")
        return found


def services_of(request: Request) -> Services:
    """Return the services of the app that has a request."""
    services: Services = request.app.state.services
    return services


def service_of(request: Request) -> Service:
    """Return the service of the model that a request names in its body, or in its query; the only one has any name.

    Raises UnknownModel.
    """
    services = services_of(request)
    if not services.several:
        return services.first
    name = request.scope.get(MODEL) or request.query_params.get("model")
    service = services.named(str(name)) if name else services.first
    current_context().model = service.engine.model_name
    return service


def nth_answers(first: Generation, body: SamplingRequest) -> list[Generation]:
    """Repeat a generation for each answer to its prompt."""
    return [replace(first, params=replace(first.params, choice=i)) for i in range(body.answers)]
