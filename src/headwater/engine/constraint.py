"""Outputs held to a JSON schema, a regular expression or a grammar; the automata are llguidance's.

V: the logits of a row, which may be more than the tokenizer has tokens.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from headwater.errors import ConstraintError
from headwater.request import Constraint

log = logging.getLogger("headwater.engine")

MAX_SOURCE = 256 * 1024  # characters of a schema or grammar
MAX_CACHED = 64  # compiled constraints that are kept
NOT_TEXT = "\ue000"  # private use
NAMED_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*|<[^<>\s\[\]]+>'
)  # or a string, a regex, a comment
MESSAGE = 500  # characters of the compiler's message that are passed on

# What a hostile source may cost, found by trying (decision 010): about a second to compile, on the request's thread,
# and 10 MB; a token of a schema some milliseconds. The library's own limits allowed 8 s and 135 MB.
LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=3_000,
    max_lexer_states=20_000,
    max_grammar_size=30_000,
    verbose_errors=False,
)

GRAMMAR: dict[str, Callable[[str], str]] = {
    "json_schema": LLMatcher.grammar_from_json_schema,
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}


class ConstraintMachine:
    """State of one request's constraint."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        never: Sequence[int] = (),
        param: str | None = None,
        seconds: float = math.inf,
    ) -> None:
        self._matcher = matcher
        self._seconds, self._spent = seconds, 0.0  # of the thread that steps, for which other requests wait
        self._spent_on_drafts = 0.0
        self._vocab_size = vocab_size
        self._param = param
        self._never = list(never)  # ids that the library takes for end tokens and the model does not

    def allowed(self) -> torch.Tensor:
        """Return the tokens that may come next, bool [V]: end tokens only if the output is complete.

        Raises ConstraintError if that cannot be computed within the limits, or no token may come next.
        """
        with self._timed():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed_V = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        allowed_V[self._never] = 0
        if not allowed_V.any():
            raise ConstraintError("no token of the model can continue the answer within its constraint", self._param)
        return torch.from_numpy(allowed_V).view(torch.bool)

    def take(self, token: int) -> None:
        """`token` was appended. Raises ConstraintError if it was not allowed, or what follows is beyond the limits."""
        with self._timed():
            self._matcher.consume_token(token)

    def forced(self) -> list[int]:
        """Return the tokens of the only text that may follow, as the tokenizer writes it. Raises ConstraintError."""
        tokens: list[int] = self._asked(LLMatcher.compute_ff_tokens)
        return tokens

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens are allowed to follow. Raises ConstraintError."""
        length: int = self._asked(lambda matcher: matcher.validate_tokens(list(tokens)))
        return length

    def _asked(self, question: Callable[[LLMatcher], Any]) -> Any:
        """Ask a copy, with limits of its own: no draft may end an answer that would continue without it.

        Raises ConstraintError if the question is beyond the limits, or questions took too long together.
        """
        if self._spent_on_drafts > self._seconds:
            raise ConstraintError(f"drafts have taken {self._spent_on_drafts:.1f} s of the constraint", self._param)
        copy, before = self._matcher.deep_copy(), time.thread_time()
        answer = question(copy)
        self._spent_on_drafts += time.thread_time() - before
        _check(copy, self._param)
        return answer

    @property
    def finished(self) -> bool:
        """True if the output is complete and no token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time of a call of the library. Raises ConstraintError if the call failed, or all took too long."""
        before = time.thread_time()
        yield
        self._spent += time.thread_time() - before
        _check(self._matcher, self._param)
        if self._spent > self._seconds:
            taken = f"the constraint has taken {self._spent:.1f} s to compute, at most {self._seconds:g} s"
            raise ConstraintError(f"{taken} are given to one answer (constraint_time): use a simpler one", self._param)


class ConstraintCompiler:
    """Makes machines for one tokenizer and model, from any thread; keeps the constraints compiled last.

    The library's view of the tokenizer is made with the first machine (about a second for 150,000 tokens).
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_tokens: tuple[int, ...], seconds: float = math.inf
    ) -> None:
        """`seconds`: limit of the computing time of one answer's constraint."""
        self._tokenizer, self._seconds = tokenizer, seconds
        self._known = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._vocab_size = vocab_size
        self._ends = [token for token in end_tokens if token < self._known]
        self._wrapped: LLTokenizer | None = None
        # by namespace: how long a schema takes must not tell one tenant that another one sent it
        self._compiled = lru_cache(MAX_CACHED)(lambda namespace, constraint: self._compile(constraint))
        self._wrapping = threading.Lock()

    def machine(self, constraint: Constraint, namespace: str = "") -> ConstraintMachine:
        """A machine at the start. Raises ConstraintError with the compiler's message."""
        try:
            return self._start(self._compiled(namespace, constraint), constraint.param)
        except ConstraintError as error:
            raise ConstraintError(str(error), constraint.param) from error

    def _start(self, matcher: LLMatcher, param: str | None = None) -> ConstraintMachine:
        never = () if self._ends else self._tokens().eos_tokens  # without any it guesses, and needs one
        return ConstraintMachine(matcher.deep_copy(), self._vocab_size, never, param, self._seconds)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        """Compile the constraint, or its fallback if that fails. Raises ConstraintError if neither can be compiled."""
        try:
            return self._compile_one(constraint)
        except ConstraintError:
            if constraint.fallback is None:
                raise
            log.warning("%s: schemas cannot be compiled; names and valid JSON are enforced instead", constraint.param)
            return self._compile(constraint.fallback)

    def _compile_one(self, constraint: Constraint) -> LLMatcher:
        """The first tokens are asked for at once: what cannot give them is refused before anything runs."""
        if constraint.kind not in GRAMMAR:
            known = ", ".join(sorted(GRAMMAR))
            raise ConstraintError(f"a constraint of kind {constraint.kind!r} is not one of {known}")
        if len(constraint.source) > MAX_SOURCE:
            size = len(constraint.source)
            raise ConstraintError(f"the constraint has {size:,} characters, at most {MAX_SOURCE:,} are taken")
        try:
            lark = constraint.kind == "lark"
            source = _tags_by_id(constraint.source, self._tokenizer) if lark else constraint.source
            grammar = GRAMMAR[constraint.kind](source)
        except ValueError as error:
            raise ConstraintError(_first_lines(str(error))) from error
        matcher = LLMatcher(self._tokens(), grammar, log_level=0, limits=LIMITS)
        _check(matcher)
        self._start(matcher).allowed()
        return matcher

    def _tokens(self) -> LLTokenizer:
        with self._wrapping:
            if self._wrapped is None:
                size = max(self._vocab_size, self._known)  # ids beyond the tokenizer have no bytes: never allowed
                source, ends = without_tags(self._tokenizer), self._ends or None
                self._wrapped = LLTokenizer(source, n_vocab=size, eos_token=ends)
            return self._wrapped


def without_tags(tokenizer: Tokenizer) -> str:
    """Return the tokenizer's JSON, with names for the tokens of tags that no text holds.

    To the library such a token is never text. If a constraint leaves one text, which spells a tag, the library would
    still propose the tag's token for it, and then refuse that token.
    """
    source = json.loads(tokenizer.to_str())
    names = {}
    for token in source["added_tokens"]:
        if token["special"] or (token["content"][:1] == "<" and token["content"][-1:] == ">"):
            names[token["content"]] = token["content"] = f"<{NOT_TEXT}{token['id']}>"
    if isinstance(vocabulary := source["model"]["vocab"], dict):
        source["model"]["vocab"] = {names.get(text, text): id_ for text, id_ in vocabulary.items()}
    return json.dumps(source)


def _tags_by_id(source: str, tokenizer: Tokenizer) -> str:
    """Replace the names of tokens in a grammar by their ids."""
    ids = {token.content: id_ for id_, token in tokenizer.get_added_tokens_decoder().items()}
    return NAMED_TOKEN.sub(lambda found: f"<[{ids[found[0]]}]>" if found[0] in ids else found[0], source)


def _check(matcher: LLMatcher, param: str | None = None) -> None:
    if matcher.is_error():
        raise ConstraintError(_first_lines(matcher.get_error()), param)


def _first_lines(message: str) -> str:
    """The compiler's words without the traces that it may append."""
    return message.partition("\n<")[0].strip()[:MESSAGE]
