"""Dialect of the served model: its formats of reasoning and calls, and the sampling that a request's answer needs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from llguidance import LLMatcher
from tokenizers import Tokenizer

from headwater.config import ServeConfig
from headwater.errors import ConstraintError
from headwater.request import Constraint, SamplingParams, Thought
from headwater.server.answer import formats
from headwater.server.answer.formats.grammar import Grammar, either, tag_tokens
from headwater.server.answer.formats.harmony import Harmony
from headwater.server.answer.formats.parser import AnswerParser, ToolFormat
from headwater.server.http.errors import BadRequest
from headwater.server.requests.structured import Outcome, compiled, known_keywords, with_known_patterns
from headwater.server.requests.tools import FunctionDefinition, ToolUse

BAN_BIAS = -100.0  # added to a logit: OpenAI's way to ban a token
REASONING_GAP = "/\\n{0,2}/"  # line ends after reasoning
MAX_COMPILED = 4096  # tools whose schemas are known to compile, or not to
PROMPT_END_TOKENS = 64  # tokens of a prompt's end that show whether it leaves the reasoning open

log = logging.getLogger("headwater.server")


@dataclass(frozen=True, slots=True)
class Start:
    """Start of an answer: the end of its prompt, and the tokens after which its reasoning is closed, if at all."""

    prompt_end: str
    thought_tokens: int | None = None


class Dialect:
    """Formats of a model. With the setting "none", or a template without a known format, all text is content."""

    def __init__(self, template: str, config: ServeConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tag_tokens = tag_tokens(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token.content: id_ for id_, token in added.items() if token.special}
        self._reasoning = formats.reasoning_format(config.reasoning_format, template)
        own = self._reasoning.calls if self._reasoning and config.tool_format != "none" else None
        self._calls = own or formats.tool_format(config.tool_format, template)
        self._free = config.tool_calls == "free"
        # by namespace, as compiled constraints are
        self._compiled = lru_cache(MAX_COMPILED)(
            lambda namespace, source: compiled(LLMatcher.grammar_from_lark(source))
        )

    @property
    def capabilities(self) -> list[str]:
        """Names, as Ollama has them, of the parts that are separated from an answer's text."""
        formats_ = {"tools": self._calls, "thinking": self._reasoning}
        return [name for name, known in formats_.items() if known is not None]

    @property
    def reasoning_close(self) -> str:
        """Tag that ends reasoning; empty if none is known."""
        return self._reasoning.close if self._reasoning else ""

    @property
    def limits_reasoning(self) -> bool:
        """True if reasoning can be closed after a number of tokens: the tag that ends it is a token."""
        return self.reasoning_close in self._tag_tokens

    def end_of(self, prompt: Sequence[int]) -> str:
        """Return the text of a prompt's last tokens, which shows whether it leaves the reasoning open."""
        return self._tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)

    def parser(self, prompt_end: str, use: ToolUse) -> AnswerParser:
        """Return a parser for one answer to a prompt with this end. It looks for calls unless `use` forbids them."""
        thinking = self._reasoning is not None and self._reasoning.left_open_by(prompt_end)
        tools = None if use.mode == "none" else use.tools
        return AnswerParser(self._reasoning, thinking, self._calls, tools, use.mode == "required", use.one)

    def enforced(self, use: ToolUse, namespace: str) -> tuple[ToolUse, list[str]]:
        """Return the tools with the schemas that calls are held to, and the parts of schemas that are not enforced.

        A tool that is not strict accepts any object if its schema cannot be compiled. If no call is required, so does a
        tool with `strict: false`, and with the setting `tool_calls` "free" each that is not strict.
        Raises ConstraintError for a strict tool whose schema cannot be compiled.
        """
        if self._calls is None or use.mode == "none":
            return use, []
        by_choice, held, missing = use.mode != "required", dict[str, FunctionDefinition](), list[str]()
        for number, (name, tool) in enumerate(use.tools.items(), 1):
            if by_choice and (tool.strict is False or (self._free and not tool.strict)):
                held[name] = without_schema(tool)
                continue
            held[name], keywords = self._as_far_as_possible(self._calls, tool, namespace)
            if keywords:
                log.warning("of tool %d of %d is not enforced: %s", number, len(use.tools), known_keywords(keywords))
                missing.append(f"{', '.join(keywords)} of tool {name!r}")
        return replace(use, tools=held), missing

    def _as_far_as_possible(
        self, calls: ToolFormat, tool: FunctionDefinition, namespace: str
    ) -> tuple[FunctionDefinition, tuple[str, ...]]:
        """Return the tool with the schema that is enforced, and the keywords that are not."""
        part, outcome = calls.unwritable(tool), self._outcome(calls, tool, namespace)
        if tool.strict and (part or outcome.message):
            reason = f"{part} cannot be written in the model's format of calls" if part else outcome.message
            raise ConstraintError(f"tool {tool.name!r} is strict, and its schema cannot be enforced: {reason}", "tools")
        if part:
            return without_schema(tool), (part,)
        if not outcome.message:
            return tool, outcome.keywords
        kept = tool.model_copy(update={"parameters": with_known_patterns(tool.parameters)})
        again = self._outcome(calls, kept, namespace)
        keywords = tuple(dict.fromkeys((*outcome.keywords, *again.keywords)))
        return without_schema(tool) if again.message else kept, keywords

    def _outcome(self, calls: ToolFormat, tool: FunctionDefinition, namespace: str) -> Outcome:
        grammar = Grammar(self._tag_tokens)
        return self._compiled(namespace, grammar.source(calls.call(grammar, tool)))

    def shaped(self, params: SamplingParams, start: Start, use: ToolUse, form: Constraint | None) -> SamplingParams:
        """Return sampling whose answer uses the tools as allowed, and fits the form.

        Raises BadRequest if a call is required and the model's format is unknown.
        """
        params = replace(
            params, shown_tokens=self._shown(use), thought=self._thought(start.prompt_end) if params.stop else None
        )
        calls = self._calls if use.tools else None
        if use.mode == "required" and calls is None:
            raise BadRequest("tool_choice requires a call, but the model's tool format is unknown", "tool_choice")
        params = self._with_limited_thought(params, start)
        if calls is None or use.mode == "none":
            banned = None if calls is None else self._tag_tokens.get(calls.open)
            if banned is not None:
                params = replace(params, logit_bias=(*params.logit_bias, (banned, BAN_BIAS)))
            return params if form is None else self._constrained(params, start, None, form)
        if use.mode == "required" or form is not None:
            return self._constrained(params, start, use, None if use.mode == "required" else form)
        if self._free and not use.one and not any(tool.strict for tool in use.tools.values()):
            return params
        return replace(params, constraint=self._held(start, use, calls))

    def _grammar(self, start: Start) -> Grammar:
        limited = self._reasoning is not None and start.thought_tokens is not None
        return Grammar(self._tag_tokens, {self.reasoning_close: start.thought_tokens or 0} if limited else {})

    def _with_limited_thought(self, params: SamplingParams, start: Start) -> SamplingParams:
        """Constrain the reasoning to its limit, and the answer after it to nothing; other constraints replace this."""
        if start.thought_tokens is None or self._reasoning is None:
            return params
        grammar = self._grammar(start)
        before = self._before(start, grammar)
        if not before:
            return params
        after = grammar.anything(self._reasoning.open)
        if isinstance(self._reasoning, Harmony):
            before, after = "", self._reasoning.free_answer(grammar, start.prompt_end, [])
        source = grammar.source(f"{before} {after}")
        return replace(params, constraint=Constraint("lark", source, "thinking_token_budget"))

    def _thought(self, prompt_end: str) -> Thought | None:
        """Return the reasoning that an answer to a prompt with this end may begin with."""
        tags = self._reasoning
        if tags is None or tags.closed_by(prompt_end):
            return None
        return Thought(tags.open, tags.close, tags.left_open_by(prompt_end))

    def _shown(self, use: ToolUse) -> tuple[int, ...]:
        """Return the special tokens among the tags that this answer's parser looks for."""
        tags = self._reasoning.tags if self._reasoning else ()
        if self._calls is not None and use.tools and use.mode != "none":
            tags += self._calls.tags
        return tuple(self._special[tag] for tag in tags if tag in self._special)

    def _constrained(
        self, params: SamplingParams, start: Start, use: ToolUse | None, form: Constraint | None
    ) -> SamplingParams:
        """Constrain to the form or to calls, whichever are given, after reasoning if the prompt allows it."""
        source, param = self._answers(start, use, form), "tools" if form is None else form.param
        if source is None:
            return replace(params, constraint=form)
        constraint = Constraint("lark", source, param)
        if use is not None and (other := self._answers(start, without_schemas(use), form)) != source:
            assert other is not None
            constraint = replace(constraint, fallback=Constraint("lark", other, param))
        return replace(params, constraint=constraint)

    def _answers(self, start: Start, use: ToolUse | None, form: Constraint | None) -> str | None:
        """Return the grammar of answers that are calls or fit the form; None if the form itself is the constraint."""
        grammar = self._grammar(start)
        if isinstance(self._reasoning, Harmony):
            tools = list(use.tools.values()) if use is not None and self._calls is not None else []
            return grammar.source(self._reasoning.answer(grammar, start.prompt_end, tools, form))
        before, answers = self._before(start, grammar), []
        if use is not None and self._calls is not None:
            answers.append(call_list(grammar, self._calls, use))
        if form is not None:
            if not answers and not before:
                return None
            answers.append(grammar.fitting(form))
        return grammar.source(f"{before} {either(answers)}")

    def _held(self, start: Start, use: ToolUse, calls: ToolFormat) -> Constraint:
        """Constrain calls in the answer to known tools, and their arguments to the schemas."""
        last, source = (self._with_calls(start, calls, tools) for tools in (without_schemas(use), use))
        weaker = None if last == source else Constraint("lark", last, "tools")
        return Constraint("lark", source, "tools", weaker)

    def _with_calls(self, start: Start, calls: ToolFormat, use: ToolUse) -> str:
        """Return the grammar of any answer whose calls fit the tools; reasoning before it is free of constraints."""
        grammar = self._grammar(start)
        if isinstance(self._reasoning, Harmony):
            return grammar.source(self._reasoning.free_answer(grammar, start.prompt_end, list(use.tools.values())))
        answer, tags = text_with_calls(grammar, calls, list(use.tools.values()), use.one), self._reasoning
        if tags is None or tags.closed_by(start.prompt_end):
            return grammar.source(answer)
        thought = f"({grammar.anything_until(tags.close)} {answer} | {grammar.anything(tags.close)})"
        if tags.left_open_by(start.prompt_end):
            return grammar.source(thought)
        return grammar.source(f"({grammar.opening(tags.open)} {thought} | {answer})")

    def _before(self, start: Start, grammar: Grammar) -> str:
        """Return an expression for the reasoning before the answer; empty if there can be none."""
        tags = self._reasoning
        if tags is None or tags.closed_by(start.prompt_end):
            return ""
        if isinstance(tags, Harmony):
            return tags.before(grammar, start.prompt_end)
        thought = f"{grammar.until(tags.close)} {REASONING_GAP}"
        return thought if tags.left_open_by(start.prompt_end) else f"({grammar.tag(tags.open)} {thought})?"


def without_schema(tool: FunctionDefinition) -> FunctionDefinition:
    """Return a tool of the same name that accepts any object."""
    return FunctionDefinition(name=tool.name)


def without_schemas(use: ToolUse) -> ToolUse:
    """Return a use in which only strict tools have schemas."""
    tools = {name: tool if tool.strict else without_schema(tool) for name, tool in use.tools.items()}
    return replace(use, tools=tools)


def call_list(grammar: Grammar, calls: ToolFormat, use: ToolUse) -> str:
    """Add a rule for one call or, if allowed, several, without other text."""
    tools = list(use.tools.values())
    call = grammar.rule(f"{grammar.tag(calls.open)} {calls.rule(grammar, tools, use.one)}")
    return call if use.one or calls.between is not None else grammar.rule(f'{call} ("\\n" {call})*')


def text_with_calls(grammar: Grammar, calls: ToolFormat, tools: Sequence[FunctionDefinition], one: bool) -> str:
    """Add a rule for any text with calls in it, or, if there may be one call only, for text that ends with it."""
    call = f"{grammar.anything_until(calls.open)} {calls.rule(grammar, tools, one)}"
    text = grammar.anything(calls.open)
    return grammar.rule(f"{call} | {text}" if one else f"({call})* {text}")
