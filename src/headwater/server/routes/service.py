"""Service that the routes share: engine, settings, and the translation of requests to generations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from headwater.config import ServeConfig
from headwater.errors import TemplateError
from headwater.request import Fidelity, Generation, SamplingParams
from headwater.server.answer.dialect import Dialect
from headwater.server.answer.formats.parser import AnswerParser
from headwater.server.answer.forms import TokenNames
from headwater.server.answer.reply import Echo, echo_of, without_echo
from headwater.server.http.errors import BadRequest
from headwater.server.http.exchange import ServedEngine
from headwater.server.observe.record import Watcher
from headwater.server.prompt.chat import ChatPrompter
from headwater.server.prompt.encoding import Encoded, longest_token
from headwater.server.prompt.segments import SegmentEncoder
from headwater.server.prompt.template import ChatTemplate
from headwater.server.requests.chat import CompletionRequest, ConversationRequest
from headwater.server.requests.lengths import Lengths
from headwater.server.requests.messages import Conversation
from headwater.server.requests.sampling import SamplingRequest
from headwater.server.requests.scan import BodyLimits


class Service:
    """Engine, settings and translation. Translating may take a second: call it on a thread, not on the event loop."""

    def __init__(self, engine: ServedEngine, config: ServeConfig) -> None:
        self.engine, self.config = engine, config
        self.lengths = Lengths(engine, config)
        self.started = int(time.time())
        self.watchers: tuple[Watcher, ...] = ()
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
            self._prompter = ChatPrompter(engine.tokenizer, template, self.encoder)

    def completion(self, body: CompletionRequest) -> tuple[list[Generation], Echo]:
        """Translate a completion: one generation for each answer, and the echo of the prompts if it is wanted."""
        self.lengths.check_max_tokens(body.max_tokens, body.scores_prompt)
        self._check_tokens_of(body)
        encoded = [self._encoded(prompt, body.salt) for prompt in body.prompts]
        generations = []
        for one in encoded:
            prompt = Generation(one.ids, SamplingParams(), body.salt, segments=one.segments)
            generation = self._generation(body, prompt)
            if body.scores_prompt:
                params = replace(generation.params, prompt_logprobs=body.logprobs or 0)
                generation = replace(generation, params=params, segments=())  # the prompt is computed whole
            generations += nth_answers(generation, body)
        return generations, echo_of(self.engine.tokenizer, body, encoded) if body.echo else without_echo

    def chat(self, body: ConversationRequest) -> tuple[list[Generation], Callable[[], AnswerParser]]:
        """Translate a conversation: one generation for each answer, and a function that returns a parser for one."""
        use, schema = body.tool_use, body.answer_schema
        self._check_tokens_of(body)
        prompt = self.conversation_prompt(body)
        end = self._dialect.end_of(prompt.prompt)
        generation = self._generation(body, prompt)
        shaped = replace(generation, params=self._dialect.shaped(generation.params, end, use, schema))
        return nth_answers(shaped, body), partial(self._dialect.parser, end, use)

    def conversation_prompt(self, body: ConversationRequest) -> Generation:
        """Return the prompt of a request's conversation; raises BadRequest for one that no template could render."""
        try:
            conversation = body.conversation
        except ValueError as error:
            raise BadRequest(str(error), "messages") from error
        return self.chat_prompt(conversation, body.salt)

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
        """Add the request's sampling, deadline and fidelity to a prompt."""
        segments = () if body.exact else prompt.segments
        max_tokens = self.lengths.max_tokens(len(prompt.prompt), len(segments), body.wanted_tokens, body.may_be_cut)
        params = body.params(self.engine.generation_defaults, max_tokens, body.wanted_logprobs)
        limits = {"timeout": body.timeout, "request_timeout": self.config.request_timeout}
        least = ((seconds, name) for name, seconds in limits.items() if seconds is not None)
        deadline, by = min(least, default=(None, "timeout"))
        fidelity = body.fidelity or Fidelity.BALANCED
        limited = replace(prompt, deadline=deadline, deadline_of=by)
        return replace(limited, params=params, segments=segments, fidelity=fidelity)


def nth_answers(first: Generation, body: SamplingRequest) -> list[Generation]:
    """Repeat a generation for each answer to its prompt, each with a seed of its own."""
    params = first.params
    seeds = [None if params.seed is None else params.seed + i for i in range(body.answers)]
    return [replace(first, params=replace(params, seed=seed)) for seed in seeds]
