"""Engine without a model: it answers with its script, on a thread of its own, and matches prompts as a cache would."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headwater.account import CacheAccount, Reason
from headwater.cache import PrefixCache
from headwater.cache.stats import CacheStats
from headwater.cache.view import CacheView
from headwater.engine.detokenizer import TextStream
from headwater.engine.meter import EngineStats
from headwater.errors import EngineStopped, RequestTooLarge
from headwater.events import Event, FailedEvent, FinishedEvent, PromptEvent, TokenEvent, TokenLogprob
from headwater.plan import CacheLayout
from headwater.request import Generation
from headwater.schedule.tier_load import TierStats
from tests.server.templates import SILENT

PAGE = 64
SIZES: dict[str, Any] = {
    "model_type": "fake_hybrid", "dtype_name": "bfloat16", "weights": "auto", "weights_held": "bfloat16",
    "hidden_size": 32, "blocks": (None,) * 4,
    "weight_bytes": 2_400_000, "parameters_by_kind": lambda: {"embedding": 200_000, "mlp": 1_000_000},
}  # fmt: skip
SEAM = 8  # tokens


@cache
def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are bytes, and the special tokens <|im_start|> and <|im_end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


@dataclass
class FakeEngine:
    """Fake with the interface of headwater.engine.engine.Engine; tests may set and read its other fields."""

    script: str = "Grüße 🙂 from the fake."
    computed: int | None = None  # tokens of each prompt, as `prefilled` returns them
    hold_after: int | None = None  # tokens after which a request waits until it is cancelled
    fail: Exception | None = None  # given instead of an answer, or of its rest
    fail_after: int = 0  # tokens
    max_model_len: int = 4096
    draft_bytes: int = 0
    mtp_bytes: int = 0
    memory_tokens: int = 100_000
    chat_template: str | None = SILENT
    model_name: str = "fake"
    special_tokens: dict[str, str] = field(default_factory=lambda: {"eos_token": "<|im_end|>"})
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    seen: list[Generation] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    segments: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)  # warmed ones, how often each
    figures: dict[str, int] = field(default_factory=dict)  # of EngineStats, by name; all others are 0
    tiers: tuple[TierStats, ...] = (TierStats("disk", *[0] * 10, usable=True),)

    def __post_init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        vocab = self.tokenizer.get_vocab_size()
        self.spec = SimpleNamespace(vocab_size=vocab, max_length=4096, page_bytes=1024, **SIZES)
        self.eos_token_ids = frozenset({self.tokenizer.token_to_id("<|im_end|>")})
        self.tree = PrefixCache(CacheLayout(n_pages=1000))
        self.held = threading.Event()  # set when a request has reached `hold_after`
        self.was_cancelled = threading.Event()
        self._prompts: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        self._orders: queue.Queue[tuple[int, Generation, Callable[[Event], None]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._running = False
        self._refusing = False

    def start(self) -> None:
        self._running = True
        self._thread.start()

    def stop(self, left: Callable[[], float] = lambda: 0.0) -> None:
        self._running = False
        self.was_cancelled.set()  # lets a held request go
        self._orders.put(None)
        self._thread.join()

    def refuse_new(self) -> None:
        self._refusing = True

    def health(self) -> dict[str, Any]:
        status = "stopped" if not self._running else "draining" if self._refusing else "ok"
        return {"status": status, "model": self.model_name, "deterministic": "yes"}

    def stats(self) -> EngineStats:
        """Return statistics of a cache that holds whole pages of all prompts."""
        kv = sum(len(prompt) // PAGE for known in list(self._prompts.values()) for prompt in list(known))
        counts = dict.fromkeys((field.name for field in fields(CacheStats)), 0)
        counts |= {"pages_total": 1000, "pages_kv": kv, "pages_free": 1000 - kv, "namespaces": len(self._prompts)}
        counts["tick"] = self.tree.stats().tick
        rest = {field.name: 0 for field in fields(EngineStats) if field.name not in ("cache", "tiers")}
        return EngineStats(cache=CacheStats(**counts), tiers=self.tiers, **rest | self.figures)

    def view(self) -> CacheView:
        """Return a view of `tree`, a cache that a test may fill."""
        return self.tree.view()

    def submit(self, generation: Generation, on_event: Callable[[Event], None]) -> int:
        if not self._running or self._refusing:
            raise EngineStopped("the engine has stopped")
        needed = len(generation.prompt) + generation.params.max_tokens
        if needed > self.memory_tokens:
            raise RequestTooLarge(f"request needs {needed:,} tokens, memory holds {self.memory_tokens:,}")
        self.seen.append(generation)
        self._orders.put((len(self.seen) - 1, generation, on_event))
        return len(self.seen) - 1

    def warm_segments(self, segments: Sequence[tuple[int, ...]], namespace: str) -> list[str]:
        """Store the segments that have more tokens than two seams."""
        if not self._running:
            raise EngineStopped("the engine has stopped")
        return [self._warm((namespace, ids)) for ids in segments]

    def _warm(self, key: tuple[str, tuple[int, ...]]) -> str:
        if len(key[1]) <= 2 * SEAM:
            return "too_short"
        self.segments[key] = self.segments.get(key, 0) + 1
        return "stored" if self.segments[key] == 1 else "held"

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        self.was_cancelled.set()

    def prefilled(self, request_id: int) -> tuple[int, int] | None:
        return None if self.computed is None else (self.computed, len(self.seen[request_id].prompt))

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            self._answer(*order)

    def _answer(self, request_id: int, generation: Generation, on_event: Callable[[Event], None]) -> None:
        account = self.account(generation)
        params = generation.params
        stream = TextStream(self.tokenizer, generation.prompt[-8:], params)
        tokens = self.tokenizer.encode(self.script).ids[: params.max_tokens]
        if params.prompt_logprobs is not None and self.fail is None:
            first, *others = generation.prompt
            told = (self._token_event(token, "", params.prompt_logprobs) for token in others)
            on_event(PromptEvent((TokenEvent(first, ""), *told)))
        for done, token in enumerate(tokens):
            if done == self.hold_after:
                self.held.set()
                self.was_cancelled.wait()
            if request_id in self.cancelled:
                return None
            if self.fail is not None and done == self.fail_after:
                return on_event(FailedEvent(self.fail))
            text, hit = stream.push(token)
            on_event(self._token_event(token, text, params.logprobs))
            if hit is not None:
                return on_event(FinishedEvent("stop", "", account, done + 1, hit))
        reason = "length" if len(tokens) == params.max_tokens else "stop"
        return on_event(FinishedEvent(reason, stream.flush(), account, len(tokens)))

    def _token_event(self, token: int, text: str, logprobs: int | None) -> TokenEvent:
        if logprobs is None:
            return TokenEvent(token, text)
        top = tuple(TokenLogprob((token + i) % 256, -0.5 - i) for i in range(logprobs))
        return TokenEvent(token, text, -0.5, top)

    def account(self, generation: Generation) -> CacheAccount:
        """Return the account of a cache of whole pages that keeps everything."""
        prompt, known = generation.prompt, self._prompts[generation.namespace]
        shared = max((_common(prompt, other) for other in known), default=0)
        cached = min(shared, len(prompt) - 1) // PAGE * PAGE
        others = any(self._prompts.values())
        reason = Reason.DIVERGED if known else Reason.OTHER_NAMESPACE if others else Reason.COLD
        if cached == (len(prompt) - 1) // PAGE * PAGE:
            reason = Reason.FULL if cached else Reason.TOO_SHORT
        known.append(prompt)
        return CacheAccount(len(prompt), cached, cached, 0, reason, segments=len(generation.segments))


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
