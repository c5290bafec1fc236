"""How the model of this server writes reasoning and calls, and what a request may ask of its answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.request import Constraint, SamplingParams
from headwater.server.answer import formats
from headwater.server.answer.formats.grammar import FLEXIBLE, Grammar, either, tag_tokens
from headwater.server.answer.formats.parser import AnswerParser
from headwater.server.answer.formats.tools import Tool, ToolFormat
from headwater.server.http.errors import BadRequest
from headwater.server.requests.tools import ToolUse

NEVER = -100.0  # added to a logit: OpenAI's way to ban a token
GAP = "/\\n{0,2}/"  # line ends after reasoning


@dataclass(frozen=True, slots=True)
class Shape:
    """What sampling has to see to, so that an answer is what was asked for."""

    constraint: Constraint | None = None
    banned: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    shown: tuple[int, ...] = ()  # special tokens that the answer's parser has to see

    def applied(self, params: SamplingParams) -> SamplingParams:
        bias = params.logit_bias + tuple((token, NEVER) for token in self.banned)
        stop = params.stop + self.stop
        return replace(params, constraint=self.constraint, logit_bias=bias, stop=stop, shown_tokens=self.shown)


class Dialect:
    """A model's formats. `none` as a setting, or a template that tells nothing, leaves all text as content."""

    def __init__(self, template: str, config: ServeConfig, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for a format that does not exist."""
        self._tag_tokens = tag_tokens(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token.content: id_ for id_, token in added.items() if token.special}
        self._reasoning = formats.reasoning_format(
            _known("reasoning_format", config.reasoning_format, formats.REASONING), template
        )
        self._calls = formats.tool_format(_known("tool_format", config.tool_format, formats.TOOLS), template)

    def parser(self, prompt_end: str, use: ToolUse) -> AnswerParser:
        """A parser for one answer to a prompt that ends like this. Where no call is wanted, none is looked for."""
        thinking = self._reasoning is not None and self._reasoning.left_open_by(prompt_end)
        return AnswerParser(self._reasoning, thinking, self._calls, None if use.mode == "none" else use.tools)

    def shape(self, prompt_end: str, use: ToolUse, schema: Mapping[str, Any] | None) -> Shape:
        """Raises BadRequest if a call is required and nobody knows how this model writes one."""
        return replace(self._shape(prompt_end, use, schema), shown=self._shown(use))

    def _shown(self, use: ToolUse) -> tuple[int, ...]:
        """The special tokens among the tags that this answer's parser looks for."""
        tags = (self._reasoning.open, self._reasoning.close) if self._reasoning else ()
        if self._calls is not None and use.tools and use.mode != "none":
            tags += self._calls.tags
        return tuple(self._special[tag] for tag in tags if tag in self._special)

    def _shape(self, prompt_end: str, use: ToolUse, schema: Mapping[str, Any] | None) -> Shape:
        calls = self._calls if use.tools else None
        if use.mode == "required" and calls is None:
            raise BadRequest("tool_choice requires a call, but the model's tool format is unknown", "tool_choice")
        if calls is None or use.mode == "none":
            banned = None if calls is None else self._tag_tokens.get(calls.open)
            constraint = None if schema is None else self._constraint(prompt_end, Grammar(self._tag_tokens), [], schema)
            return Shape(constraint, () if banned is None else (banned,))
        if use.mode == "required" or schema is not None:
            grammar = Grammar(self._tag_tokens)
            return Shape(self._constraint(prompt_end, grammar, [call_list(grammar, calls, use)], schema, use.mode))
        # a format whose tags hold several calls has no text that ends the first
        if any(tool.strict for tool in use.tools.values()) or (use.one and calls.several):
            grammar = Grammar(self._tag_tokens)
            return Shape(self._constraint(prompt_end, grammar, [text_with_calls(grammar, calls, use)], None))
        # the end of the first call ends the answer, and costs no mask a token
        return Shape(stop=(calls.close,) if use.one else ())

    def _constraint(
        self, prompt_end: str, grammar: Grammar, answers: list[str], schema: Any, mode: str = "auto"
    ) -> Constraint:
        """One of the answers, or a JSON that fits the schema, after reasoning if the prompt lets the model reason."""
        before = self._before(prompt_end, grammar)
        if schema is not None and mode != "required":
            if not answers and not before:
                return Constraint("json_schema", json.dumps({**schema, "x-guidance": FLEXIBLE}))
            answers = [*answers, grammar.json(schema)]
        return Constraint("lark", grammar.source(f"{before} {either(answers)}"))

    def _before(self, prompt_end: str, grammar: Grammar) -> str:
        """An expression for what may stand before the answer; empty if nothing may."""
        tags = self._reasoning
        if tags is None or tags.closed_by(prompt_end):
            return ""
        thought = f"{grammar.until(tags.close)} {GAP}"
        return thought if tags.left_open_by(prompt_end) else f"({grammar.tag(tags.open)} {thought})?"


def call_list(grammar: Grammar, calls: ToolFormat, use: ToolUse) -> str:
    """A rule for one call or, if allowed, several, and nothing else."""
    tools = list(use.tools.values())
    call = grammar.rule(f"{grammar.tag(calls.open)} {calls.rule(grammar, tools, use.one)}")
    return call if use.one or calls.several else grammar.rule(f'{call} ("\\n" {call})*')


def text_with_calls(grammar: Grammar, calls: ToolFormat, use: ToolUse) -> str:
    """A rule for any text with calls in it; the arguments of strict tools fit their schemas."""
    tools = [tool if tool.strict else Tool(tool.name) for tool in use.tools.values()]
    call = f"{grammar.until(calls.open)} {calls.rule(grammar, tools, use.one)}"
    return grammar.rule(f"({call}){'?' if use.one else '*'} {grammar.text()}")


def _known(setting: str, name: str, table: Mapping[str, object]) -> str:
    if name not in ("auto", "none", *table):
        raise ConfigError(f"{setting} is {name!r}, must be one of auto, none, {', '.join(table)}")
    return name
