"""Dialect of the served model: its formats of reasoning and calls, and the sampling that a request's answer needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from headwater.config import ServeConfig
from headwater.request import Constraint, SamplingParams, Thought
from headwater.server.answer import formats
from headwater.server.answer.formats.grammar import Grammar, either, tag_tokens
from headwater.server.answer.formats.parser import AnswerParser, ToolFormat
from headwater.server.http.errors import BadRequest
from headwater.server.requests.tools import FunctionDefinition, ToolUse

BAN_BIAS = -100.0  # added to a logit: OpenAI's way to ban a token
REASONING_GAP = "/\\n{0,2}/"  # line ends after reasoning
PROMPT_END_TOKENS = 64  # tokens of a prompt's end that show whether it leaves the reasoning open


class Dialect:
    """Formats of a model. With the setting "none", or a template without a known format, all text is content."""

    def __init__(self, template: str, config: ServeConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tag_tokens = tag_tokens(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token.content: id_ for id_, token in added.items() if token.special}
        self._reasoning = formats.reasoning_format(config.reasoning_format, template)
        self._calls = formats.tool_format(config.tool_format, template)
        self._free = config.tool_calls == "free"

    @property
    def capabilities(self) -> list[str]:
        """Names, as Ollama has them, of the parts that are separated from an answer's text."""
        formats_ = {"tools": self._calls, "thinking": self._reasoning}
        return [name for name, known in formats_.items() if known is not None]

    @property
    def reasoning_close(self) -> str:
        """Tag that ends reasoning; empty if none is known."""
        return self._reasoning.close if self._reasoning else ""

    def end_of(self, prompt: Sequence[int]) -> str:
        """Return the text of a prompt's last tokens, which shows whether it leaves the reasoning open."""
        return self._tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)

    def parser(self, prompt_end: str, use: ToolUse) -> AnswerParser:
        """Return a parser for one answer to a prompt with this end. It looks for calls unless `use` forbids them."""
        thinking = self._reasoning is not None and self._reasoning.left_open_by(prompt_end)
        return AnswerParser(self._reasoning, thinking, self._calls, None if use.mode == "none" else use.tools)

    def shaped(self, params: SamplingParams, prompt_end: str, use: ToolUse, form: Constraint | None) -> SamplingParams:
        """Return sampling whose answer uses the tools as allowed, and fits the form.

        Raises BadRequest if a call is required and the model's format is unknown.
        """
        params = replace(
            params, shown_tokens=self._shown(use), thought=self._thought(prompt_end) if params.stop else None
        )
        calls = self._calls if use.tools else None
        if use.mode == "required" and calls is None:
            raise BadRequest("tool_choice requires a call, but the model's tool format is unknown", "tool_choice")
        if calls is None or use.mode == "none":
            banned = None if calls is None else self._tag_tokens.get(calls.open)
            if banned is not None:
                params = replace(params, logit_bias=(*params.logit_bias, (banned, BAN_BIAS)))
            return params if form is None else self._constrained(params, prompt_end, None, form)
        if use.mode == "required" or form is not None:
            return self._constrained(params, prompt_end, use, None if use.mode == "required" else form)
        if use.one and not calls.several:
            params = replace(params, stop=(*params.stop, calls.close))
        # in a format whose tags hold several calls no text marks the end of the first
        if self._free and not any(tool.strict for tool in use.tools.values()) and not (use.one and calls.several):
            return params
        return replace(params, constraint=self._held(prompt_end, use, calls))

    def _thought(self, prompt_end: str) -> Thought | None:
        """Return the reasoning that an answer to a prompt with this end may begin with."""
        tags = self._reasoning
        if tags is None or tags.closed_by(prompt_end):
            return None
        return Thought(tags.open, tags.close, tags.left_open_by(prompt_end))

    def _shown(self, use: ToolUse) -> tuple[int, ...]:
        """Return the special tokens among the tags that this answer's parser looks for."""
        tags: tuple[str, ...] = (self._reasoning.open, self._reasoning.close) if self._reasoning else ()
        if self._calls is not None and use.tools and use.mode != "none":
            tags += self._calls.tags
        return tuple(self._special[tag] for tag in tags if tag in self._special)

    def _constrained(
        self, params: SamplingParams, prompt_end: str, use: ToolUse | None, form: Constraint | None
    ) -> SamplingParams:
        """Constrain to the form or to calls, whichever are given, after reasoning if the prompt allows it."""
        grammar = Grammar(self._tag_tokens)
        before, answers = self._before(prompt_end, grammar), []
        if use is not None and self._calls is not None:
            answers.append(call_list(grammar, self._calls, use))
        if form is not None:
            if not answers and not before:
                return replace(params, constraint=form)
            answers.append(grammar.fitting(form))
        param = "tools" if form is None else form.param
        source = grammar.source(f"{before} {either(answers)}")
        return replace(params, constraint=Constraint("lark", source, param))

    def _held(self, prompt_end: str, use: ToolUse, calls: ToolFormat) -> Constraint:
        """Constrain calls in the answer to known tools, and their arguments to the schemas.

        A tool that is not strict accepts any object if its schema cannot be compiled, with `strict: false` always, and
        with the setting `tool_calls` "free" always.
        """
        tools = list(use.tools.values())
        loose = [tool if tool.strict else FunctionDefinition(name=tool.name) for tool in tools]
        last = Constraint("lark", self._with_calls(prompt_end, calls, loose, use.one), "tools")
        dropped = [tool.strict is False or (self._free and not tool.strict) for tool in tools]
        held = [other if drop else tool for tool, other, drop in zip(tools, loose, dropped, strict=True)]
        if held == loose:
            return last
        return Constraint("lark", self._with_calls(prompt_end, calls, held, use.one), "tools", last)

    def _with_calls(self, prompt_end: str, calls: ToolFormat, tools: Sequence[FunctionDefinition], one: bool) -> str:
        """Return the grammar of any answer whose calls fit the tools; reasoning before it is free of constraints."""
        grammar = Grammar(self._tag_tokens, lenient=not any(tool.strict for tool in tools))
        answer, tags = text_with_calls(grammar, calls, tools, one), self._reasoning
        if tags is None or tags.closed_by(prompt_end):
            return grammar.source(answer)
        thought = f"({grammar.anything_until(tags.close)} {answer} | {grammar.anything(tags.close)})"
        if tags.left_open_by(prompt_end):
            return grammar.source(thought)
        return grammar.source(f"({grammar.opening(tags.open)} {thought} | {answer})")

    def _before(self, prompt_end: str, grammar: Grammar) -> str:
        """Return an expression for the reasoning before the answer; empty if there can be none."""
        tags = self._reasoning
        if tags is None or tags.closed_by(prompt_end):
            return ""
        thought = f"{grammar.until(tags.close)} {REASONING_GAP}"
        return thought if tags.left_open_by(prompt_end) else f"({grammar.tag(tags.open)} {thought})?"


def call_list(grammar: Grammar, calls: ToolFormat, use: ToolUse) -> str:
    """Add a rule for one call or, if allowed, several, without other text."""
    tools = list(use.tools.values())
    call = grammar.rule(f"{grammar.tag(calls.open)} {calls.rule(grammar, tools, use.one)}")
    return call if use.one or calls.several else grammar.rule(f'{call} ("\\n" {call})*')


def text_with_calls(grammar: Grammar, calls: ToolFormat, tools: Sequence[FunctionDefinition], one: bool) -> str:
    """Add a rule for any text with calls in it, or, if there may be one call only, for text that ends with it."""
    call = f"{grammar.anything_until(calls.open)} {calls.rule(grammar, tools, one)}"
    text = grammar.anything(calls.open)
    return grammar.rule(f"{call} | {text}" if one else f"({call})* {text}")
