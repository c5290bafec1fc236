"""Dialect of the served model: its formats of reasoning and calls, and the sampling that a request's answer needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from headwater.config import ServeConfig
from headwater.request import Constraint, SamplingParams
from headwater.server.answer import formats
from headwater.server.answer.formats.grammar import FLEXIBLE, Grammar, Schema, either, tag_tokens
from headwater.server.answer.formats.parser import AnswerParser, ToolFormat
from headwater.server.http.errors import BadRequest
from headwater.server.requests.tools import FunctionDefinition, ToolUse

NEVER = -100.0  # added to a logit: OpenAI's way to ban a token
GAP = "/\\n{0,2}/"  # line ends after reasoning
END = 64  # tokens of a prompt's end that show whether it leaves the reasoning open


class Dialect:
    """Formats of a model. With the setting "none", or a template without a known format, all text is content."""

    def __init__(self, template: str, config: ServeConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tag_tokens = tag_tokens(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token.content: id_ for id_, token in added.items() if token.special}
        self._reasoning = formats.reasoning_format(config.reasoning_format, template)
        self._calls = formats.tool_format(config.tool_format, template)

    def end_of(self, prompt: Sequence[int]) -> str:
        """Return the text of a prompt's last tokens, which shows whether it leaves the reasoning open."""
        return self._tokenizer.decode(prompt[-END:], skip_special_tokens=False)

    def parser(self, prompt_end: str, use: ToolUse) -> AnswerParser:
        """Return a parser for one answer to a prompt with this end. It looks for calls unless `use` forbids them."""
        thinking = self._reasoning is not None and self._reasoning.left_open_by(prompt_end)
        return AnswerParser(self._reasoning, thinking, self._calls, None if use.mode == "none" else use.tools)

    def shaped(self, params: SamplingParams, prompt_end: str, use: ToolUse, schema: Schema | None) -> SamplingParams:
        """Return sampling whose answer uses the tools as allowed, and fits the schema.

        Raises BadRequest if a call is required and the model's format is unknown.
        """
        params = replace(params, shown_tokens=self._shown(use))
        calls, grammar = self._calls if use.tools else None, Grammar(self._tag_tokens)
        if use.mode == "required" and calls is None:
            raise BadRequest("tool_choice requires a call, but the model's tool format is unknown", "tool_choice")
        if calls is None or use.mode == "none":
            banned = None if calls is None else self._tag_tokens.get(calls.open)
            if banned is not None:
                params = replace(params, logit_bias=(*params.logit_bias, (banned, NEVER)))
            return params if schema is None else self._constrained(params, prompt_end, grammar, [], schema)
        if use.mode == "required" or schema is not None:
            schema = None if use.mode == "required" else schema
            return self._constrained(params, prompt_end, grammar, [call_list(grammar, calls, use)], schema)
        # in a format whose tags hold several calls no text marks the end of the first
        if any(tool.strict for tool in use.tools.values()) or (use.one and calls.several):
            return self._constrained(params, prompt_end, grammar, [text_with_calls(grammar, calls, use)], None)
        # the end of the first call ends the answer, at no cost of a mask for each token
        return replace(params, stop=(*params.stop, calls.close)) if use.one else params

    def _shown(self, use: ToolUse) -> tuple[int, ...]:
        """Return the special tokens among the tags that this answer's parser looks for."""
        tags: tuple[str, ...] = (self._reasoning.open, self._reasoning.close) if self._reasoning else ()
        if self._calls is not None and use.tools and use.mode != "none":
            tags += self._calls.tags
        return tuple(self._special[tag] for tag in tags if tag in self._special)

    def _constrained(
        self, params: SamplingParams, prompt_end: str, grammar: Grammar, answers: list[str], schema: Schema | None
    ) -> SamplingParams:
        """Constrain to one of the answers, or a JSON that fits the schema, after reasoning if the prompt allows it."""
        before = self._before(prompt_end, grammar)
        if schema is not None:
            if not answers and not before:
                source = json.dumps({**schema, "x-guidance": FLEXIBLE})
                return replace(params, constraint=Constraint("json_schema", source))
            answers = [*answers, grammar.json(schema)]
        return replace(params, constraint=Constraint("lark", grammar.source(f"{before} {either(answers)}")))

    def _before(self, prompt_end: str, grammar: Grammar) -> str:
        """Return an expression for the reasoning before the answer; empty if there can be none."""
        tags = self._reasoning
        if tags is None or tags.closed_by(prompt_end):
            return ""
        thought = f"{grammar.until(tags.close)} {GAP}"
        return thought if tags.left_open_by(prompt_end) else f"({grammar.tag(tags.open)} {thought})?"


def call_list(grammar: Grammar, calls: ToolFormat, use: ToolUse) -> str:
    """Add a rule for one call or, if allowed, several, without other text."""
    tools = list(use.tools.values())
    call = grammar.rule(f"{grammar.tag(calls.open)} {calls.rule(grammar, tools, use.one)}")
    return call if use.one or calls.several else grammar.rule(f'{call} ("\\n" {call})*')


def text_with_calls(grammar: Grammar, calls: ToolFormat, use: ToolUse) -> str:
    """Add a rule for any text with calls in it; the arguments of strict tools fit their schemas."""
    tools = [tool if tool.strict else FunctionDefinition(name=tool.name) for tool in use.tools.values()]
    call = f"{grammar.until(calls.open)} {calls.rule(grammar, tools, use.one)}"
    return grammar.rule(f"({call}){'?' if use.one else '*'} {grammar.text()}")
