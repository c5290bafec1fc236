"""Disaggregation: the rule by which one worker prefills a prompt for another one that decodes its answer.

The worker that prefills also samples the first token. The other one continues after it, as after a lost worker, and
pulls the prefix from the first one's memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headwater.account import CacheAccount
from headwater.cluster.cost import Candidate, Prompt, Role, expected_seconds, prefill_speeds
from headwater.events import FinishedEvent
from headwater.request import Generation
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.tiers.store import PEER


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The name of the worker that prefilled a prompt, and its account."""

    name: str
    account: CacheAccount
    queued_seconds: float | None

    def whole(self, end: FinishedEvent) -> FinishedEvent:
        """Return the end of the answer, from the worker that decoded it, with the account of the whole request."""
        pulled = end.account.loaded_tokens if PEER in (end.account.loaded_from or "").split(",") else 0
        account = replace(
            self.account,
            preemptions=self.account.preemptions + end.account.preemptions,
            prefilled_by=self.name,
            handed_over_tokens=pulled,
        )
        return replace(end, account=account, queued_seconds=self.queued_seconds)


def may_be_apart(generation: Generation) -> bool:
    """Return whether a worker can prefill a request's prompt for another one.

    A scored prompt is computed whole by the worker that ends the answer; segments of a composed one are not pulled.
    """
    params = generation.params
    return params.max_tokens > 1 and params.prompt_logprobs is None and not generation.segments


def prefill_of(generation: Generation) -> Generation:
    """Return the request for the worker that prefills: for one token, which it does not cache."""
    return replace(generation, params=replace(generation.params, max_tokens=1), keep_output=False, ended=False)


def decode_of(generation: Generation) -> Generation:
    """Return a handed-over request for the worker that decodes: the router chooses where its answer is cached."""
    return replace(generation, keep_output=False)


def decoders(candidates: Sequence[Candidate]) -> list[int]:
    """Return the workers that accept whole requests and continue answers; all workers if each only prefills."""
    prefills = Role.PREFILL
    return [i for i, one in enumerate(candidates) if one.role is not prefills] or [*range(len(candidates))]


def prefiller(prompt: Prompt, candidates: Sequence[Candidate]) -> int | None:
    """Return the worker to prefill a prompt for another one; None: its decoder prefills it.

    Both are compared in seconds, as in `LeastCost`:

    - at the decoder: the cost there, and the seconds of its computing for each running request, which waits meanwhile;
    - apart: the cost at a worker that only prefills, and the costs of the pull and of the rest at the decoder.

    `candidates`: workers whose reads are priced.
    """
    decoding = decoders(candidates)
    if len(decoding) == len(candidates):
        return None
    speeds = prefill_speeds(candidates)
    whole, after = math.inf, dict[str, float]()  # the least cost of decoding after a prefill apart, by pool
    for i in decoding:
        one, speed = candidates[i], speeds[i]
        whole = min(whole, _with_delays(prompt, one, speed))
        if one.pull is not None:
            cost = _with_delays(prompt, handed_over(prompt, one), speed)
            after[one.pool] = min(after.get(one.pool, math.inf), cost)
    apart = {
        i: expected_seconds(prompt, one, speeds[i]) + after[one.pool]
        for i, one in enumerate(candidates)
        if one.role == Role.PREFILL and one.pool in after
    }
    cheapest = min(apart, key=apart.__getitem__, default=None)
    return cheapest if cheapest is not None and apart[cheapest] < whole else None


def decoder_after(prompt: Prompt, prefilling: Candidate, candidates: Sequence[Candidate]) -> int:
    """Return the worker to continue after a prefill apart, which it reads while it is computed."""
    speeds = prefill_speeds(candidates)
    costs = {
        i: _with_delays(prompt, handed_over(prompt, candidates[i]), speeds[i])
        for i in decoders(candidates)
        if candidates[i].pull is not None and candidates[i].pool == prefilling.pool
    }
    return min(costs, key=costs.__getitem__)


def kept(prompt: Prompt, tokens: int) -> Prompt | None:
    """Return a prompt and its answer, `tokens` together, to be prefilled after the answer; None if that is empty."""
    return Prompt(tokens, prompt.blocks, prompt.block_tokens) if tokens > prompt.tokens else None


def keeper(answer: Prompt, candidates: Sequence[Candidate], decoded: str) -> int | None:
    """Return the worker to prefill a finished answer (decision 002); None without candidates.

    The cost is that of a prompt, in seconds, with the delay of the requests that run there. The worker that has
    `decoded` it still counts its request, and reads what another one computes before the next turn.

    `candidates`: the workers that have prefilled and decoded it and accept requests.
    """
    reading = 0.0
    for one in candidates:
        if one.name == decoded:
            one.running -= 1
            reading = math.inf if one.pull is None else one.pull.seconds(answer.tokens - one.cached)
    costs = [
        _with_delays(answer, one, speed) + (0.0 if one.name == decoded else reading)
        for one, speed in zip(candidates, prefill_speeds(candidates), strict=True)
    ]
    return costs.index(min(costs)) if costs else None


def note_prefilled(prompt: Prompt, name: str, candidates: Sequence[Candidate]) -> None:
    """Note that a worker has all of a prompt, whose events may not have come yet."""
    for one in candidates:
        if one.name == name:
            one.reusable = max(one.reusable, resumable(prompt))
            one.cached = max(one.cached, one.reusable)


def resumable(prompt: Prompt) -> int:
    """Return the leading tokens of a prompt that a worker has states for once it has computed it: its full blocks."""
    return max(0, prompt.tokens - 1) // prompt.block_tokens * prompt.block_tokens


def handed_over(prompt: Prompt, one: Candidate) -> Candidate:
    """Return a worker as a candidate after another one has prefilled the prompt: it pulls the tokens it lacks."""
    end = resumable(prompt)
    if one.pull is None or end <= one.own:
        return one
    return replace(one, read=end, read_seconds=one.pull.seconds(end - min(end, one.cached)), is_loaded=False)


def _with_delays(prompt: Prompt, one: Candidate, speed: PrefillSpeed) -> float:
    """Return a worker's cost, with the delay of the requests that run there."""
    delay = speed.between(prompt.tokens - one.uncached(prompt), prompt.tokens)
    return expected_seconds(prompt, one, speed) + one.running * delay
