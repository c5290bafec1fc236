"""Routing rules of other projects, with their inputs, formulas and default options.

They count blocks of KV and know no recurrent states: where a worker has KV and no state, they expect a hit, and the
worker computes everything. Formulas were read at the commits that the docstrings name. `CHOICES` has all rules.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from headwater.cache.spelling import build
from headwater.cluster.cost import Candidate, Choice, LeastCost, LeastLoaded, Prompt, RoundRobin, Turns, preferred

CHARACTERS = 4  # of a token


class Sent:
    """Prefixes that a router has sent to each worker, by block: its estimate of the worker's cache.

    A worker keeps at most `limit` blocks; those that were sent least recently are forgotten, ends of prefixes first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: defaultdict[str, OrderedDict[int, None]] = defaultdict(OrderedDict)

    def add(self, name: str, blocks: Sequence[int]) -> None:
        """Note that a prompt was sent to a worker."""
        sent = self._blocks[name]
        for block in reversed(blocks):
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self._limit:
            sent.popitem(last=False)

    def matched(self, name: str, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks of a prompt that were sent to a worker."""
        sent = self._blocks[name]
        return next((at for at, block in enumerate(blocks) if block not in sent), len(blocks))

    def forget(self, name: str) -> None:
        """Forget a worker."""
        self._blocks.pop(name, None)

    def size(self, name: str) -> int:
        """Return the number of blocks that a worker is assumed to have."""
        return len(self._blocks[name])


class SessionAffinity(Choice):
    """One worker for all requests of a session; those without a session by their first block."""

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> int:
        names = [one.name for one in candidates]
        first = prompt.blocks[0] if prompt.blocks else prompt.tokens
        return names.index(preferred(names, prompt.session or first))


class ApproximateTree(Choice):
    """SGLang's router with `cache_aware`: the worker that was sent most of the prompt, if it is more than a threshold.

    Otherwise the worker with the smallest tree is chosen; if loads are out of balance, the one with the fewest
    requests. The tree has all sent prompts, evicted or not. It consists of characters there, and of blocks here; there
    the order of a hash table decides between equal matches.
    Source: sgl-router/src/policies/cache_aware.rs at 026f853. Trees are cut each minute there, here at each request.
    """

    def __init__(
        self,
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
        max_tree_size: int = 2**26,
    ) -> None:
        self._threshold, self._characters = cache_threshold, max_tree_size
        self._absolute, self._relative = balance_abs_threshold, balance_rel_threshold
        self._sent: Sent | None = None

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> int:
        if self._sent is None:
            self._sent = Sent(self._characters // CHARACTERS // prompt.block_tokens)
        at = self._choose(prompt, candidates, self._sent)
        self._sent.add(candidates[at].name, prompt.blocks)
        return at

    def left(self, name: str) -> None:
        if self._sent is not None:
            self._sent.forget(name)

    def _choose(self, prompt: Prompt, candidates: Sequence[Candidate], sent: Sent) -> int:
        loads = [one.load for one in candidates]
        if max(loads) - min(loads) > self._absolute and max(loads) > min(loads) * self._relative:
            return loads.index(min(loads))
        matched = {one.name: sent.matched(one.name, prompt.blocks) for one in candidates}
        most = max(matched.values())
        if most * prompt.block_tokens > self._threshold * prompt.tokens:
            best = preferred((name for name, blocks in matched.items() if blocks == most), prompt.blocks[most - 1])
        else:
            best = min(matched, key=sent.size)
        return list(matched).index(best)


class ConsecutiveBlocks(Choice):
    """llm-d with its precise prefix scorer: the highest weighted sum of three scores between 0 and 1.

    They are the number of consecutive blocks cached from the prompt's begin, by events, between the lowest and the
    highest of the workers that have any; the free share of the memory; and the shortness of the queue.
    Sources: llm-d/llm-d, guides/precise-prefix-cache-aware/scheduler/precise-prefix-cache-aware.values.yaml at 019a3f3
    (weights 2, 1, 1 with version 0.8.0-rc.1; 3, 2, 2 before), and the scorers of llm-d-inference-scheduler.
    """

    def __init__(self, prefix: float = 2.0, memory: float = 1.0, queue: float = 1.0) -> None:
        self._prefix, self._memory, self._queue = prefix, memory, queue
        self._turns = Turns()

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> int:
        found = [one.cached for one in candidates if one.cached]
        low, high = min(found, default=0), max(found, default=0)
        longest, shortest = max(one.waiting for one in candidates), min(one.waiting for one in candidates)

        def score(one: Candidate) -> float:
            prefix = float(one.cached > 0) if low == high else max(0, one.cached - low) / (high - low)
            queue = 1.0 if longest == shortest else (longest - one.waiting) / (longest - shortest)
            return self._prefix * prefix + self._memory * (1 - one.memory_held) + self._queue * queue

        return self._turns.least([-score(one) for one in candidates])


@dataclass(slots=True)
class _Active:
    """Active requests of a worker, as Dynamo's router counts them."""

    blocks: Counter[int]  # of prompts
    prefill_tokens: int = 0

    def new(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks no active request has."""
        return sum(block not in self.blocks for block in blocks)


class DynamoCost(Choice):
    """NVIDIA Dynamo's KV router: the least sum of blocks to prefill, weighted, and active blocks.

    Blocks to prefill are those of the prompt without the cached ones, by events, and of earlier requests until their
    first token; active blocks are the distinct ones of open requests' prompts and of this one. The temperature is 0.
    Sources: ai-dynamo/dynamo, lib/llm/src/kv_router/config.rs at 0435b58 (weight 1.0), and the formula in
    docs/components/router of version 0.8.1.
    """

    def __init__(self, overlap_score_weight: float = 1.0) -> None:
        self._weight = overlap_score_weight
        self._active: defaultdict[str, _Active] = defaultdict(lambda: _Active(Counter()))
        self._prefills: dict[Prompt, int] = {}  # tokens of open requests without a first token
        self._turns = Turns()

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> int:
        at = self._turns.least([self._cost(prompt, one) for one in candidates])
        one = candidates[at]
        active = self._active[one.name]
        active.blocks.update(prompt.blocks)
        self._prefills[prompt] = prompt.tokens - one.cached
        active.prefill_tokens += prompt.tokens - one.cached
        return at

    def _cost(self, prompt: Prompt, one: Candidate) -> float:
        active = self._active[one.name]
        prefill = (active.prefill_tokens + prompt.tokens - one.cached) / prompt.block_tokens
        return self._weight * prefill + len(active.blocks) + active.new(prompt.blocks)

    def begun(self, prompt: Prompt, name: str) -> None:
        self._active[name].prefill_tokens -= self._prefills.pop(prompt, 0)

    def ended(self, prompt: Prompt, name: str) -> None:
        self.begun(prompt, name)
        blocks = self._active[name].blocks
        blocks.subtract(prompt.blocks)
        for block in prompt.blocks:
            if not blocks[block]:
                del blocks[block]

    def left(self, name: str) -> None:
        self._active.pop(name, None)


class Aibrix(Choice):
    """AIBrix's prefix-cache routing: the longest match by per cent, of workers that are not overloaded.

    A worker is overloaded if it has more requests than mean + `stddev_factor` x standard deviation. Without a match,
    the fewest requests decide. If the most requests are above `imbalance_factor` times one more than the mean, and at
    least `min_gap` above the fewest, only workers with the fewest are matched. By default it matches sent prompts,
    not events.
    Source: vllm-project/aibrix, pkg/plugins/gateway/algorithms/prefix_cache.go at 01de8a5. Blocks are smaller there and
    forgotten after 20 minutes; its 200,000 blocks are those of all workers, here of each.
    """

    def __init__(self, stddev_factor: float = 1.0, imbalance_factor: float = 2.0, min_gap: int = 8) -> None:
        self._deviations, self._imbalance, self._gap = stddev_factor, imbalance_factor, min_gap
        self._sent = Sent(200_000)
        self._turns = Turns()

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> int:
        at = self._choose(prompt, candidates)
        self._sent.add(candidates[at].name, prompt.blocks)
        return at

    def left(self, name: str) -> None:
        self._sent.forget(name)

    def _choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> int:
        loads = [one.load for one in candidates]
        mean, least = fmean(loads), min(loads)
        is_skewed = max(loads) > self._imbalance * (mean + 1) and max(loads) - least >= self._gap
        matches = [self._percent(prompt, one) if not is_skewed or one.load == least else None for one in candidates]
        most = mean + self._deviations * (stdev(loads) if len(loads) > 1 else 0.0)
        ranks = {
            at: (percent, -loads[at]) for at, percent in enumerate(matches) if percent is not None and loads[at] <= most
        }
        if not ranks:
            return self._turns.least(loads)
        best = max(ranks.values())
        return self._turns.of([at for at, rank in ranks.items() if rank == best])

    def _percent(self, prompt: Prompt, one: Candidate) -> int | None:
        """Return the share of a prompt that was sent to a worker, in whole per cent; None if no block was."""
        matched = self._sent.matched(one.name, prompt.blocks)
        return 100 * matched // len(prompt.blocks) if matched else None


CHOICES: dict[str, Callable[..., Choice]] = {
    "least_cost": LeastCost,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "session_affinity": SessionAffinity,
    "approximate_tree": ApproximateTree,
    "consecutive_blocks": ConsecutiveBlocks,
    "dynamo_cost": DynamoCost,
    "aibrix": Aibrix,
}


def make_choice(spelling: str) -> Choice:
    """Build the rule that `spelling` names, like `approximate_tree(cache_threshold=0.5)`. Raises ConfigError."""
    return build("router", spelling, CHOICES)
