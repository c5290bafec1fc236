"""Suffix drafts: what most often followed the last tokens, in the prompt, this answer and past answers.

After Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975), section 3: several lengths of context are tried, each
gives the chain of the most frequent tokens, and the chain of which most tokens are expected to be right is taken. A
draft is at most twice as long as its context, and ends where it is likely wrong. In place of a suffix tree the
occurrences of the last three tokens are looked at, at most 32 in each text.

Cost of a proposal: at most 96 occurrences, 32 tokens of each, and one vote a drafted token and length of context.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from headwater.draft.drafter import NO_DRAFT, Draft
from headwater.draft.runs import NO_TOKEN, WIDTH, Runs, key_of

PLACES = 32  # occurrences that are looked at in each text
LONGEST = 32  # tokens of context
CONTEXTS = 4  # lengths of context that are tried
REACH = 2  # drafted tokens for a token of context
LEAST = 0.1  # chance that all tokens of a chain are right, below which it ends


class PastAnswers:
    """Answers that were given, by namespace: one namespace's answers are drafts of its own requests alone.

    Bounded: a namespace keeps two parts of `part` tokens, of which the older one goes when the newer one is full; of
    more than `namespaces` the one that was least recently answered in goes.
    """

    def __init__(self, part: int = 32_768, namespaces: int = 64) -> None:
        self._part, self._most = part, namespaces
        self._parts: OrderedDict[str, tuple[Runs, Runs]] = OrderedDict()

    def add(self, namespace: str, answer: Sequence[int]) -> None:
        """Keep an answer, its last tokens if it is longer than a part."""
        older, newer = self._parts.pop(namespace) if namespace in self._parts else (Runs(), Runs())
        if len(newer) + len(answer) > self._part:
            older, newer = newer, Runs()
        newer.extend((*answer[-self._part :], NO_TOKEN))
        self._parts[namespace] = older, newer
        if len(self._parts) > self._most:
            self._parts.popitem(last=False)

    def texts(self, namespace: str) -> tuple[Runs, ...]:
        """Return the answers of a namespace."""
        return self._parts.get(namespace, ())


class SuffixDrafter:
    """Drafter of one sequence of a namespace."""

    def __init__(self, past: PastAnswers, namespace: str = "", tokens: Iterable[int] = ()) -> None:
        self._past, self._namespace = past, namespace
        self._own = Runs(tokens)

    def take(self, tokens: Iterable[int]) -> None:
        """Add tokens that the sequence has now."""
        self._own.extend(tokens)

    def propose(self, most: int) -> Draft:
        """Return the chain that promises most."""
        text = self._own.tokens
        if len(text) < WIDTH or most < 1:
            return NO_DRAFT
        key = key_of(text[-WIDTH:])
        found = [
            (runs.agreement(end, text, LONGEST), runs.tokens, end)
            for runs in (self._own, *self._past.texts(self._namespace))
            for end in runs.places(key, PLACES)
        ]
        contexts = sorted({agreed for agreed, _, _ in found}, reverse=True)[:CONTEXTS]
        best, most_right = NO_DRAFT, 0.0
        for context in contexts:
            places = [(tokens, end) for agreed, tokens, end in found if agreed >= context]
            chain, right = _chain(places, min(most, REACH * context))
            if right > most_right:
                best, most_right = Draft(chain, context), right
        return best


def _chain(places: list[tuple[array[int], int]], most: int) -> tuple[list[int], float]:
    """Return the most frequent tokens after these places, one after the other, and how many should be right."""
    chain: list[int] = []
    chance, right, tried = 1.0, 0.0, len(places) + 1
    while len(chain) < most:
        if len(places) < tried:  # perhaps the same follows at all that are left
            tried, left = len(places), most - len(chain)
            (tokens, at), *others = places
            rest = tokens[at : at + left]
            if all(tokens[at : at + left] == rest for tokens, at in others):
                if NO_TOKEN in rest:
                    rest = rest[: rest.index(NO_TOKEN)]
                return [*chain, *rest], right + chance * len(rest)
        following = [(tokens, at, tokens[at]) for tokens, at in places if at < len(tokens) and tokens[at] != NO_TOKEN]
        if not following:
            break
        # of equally frequent ones the first: places are in the order of texts, the last occurrence first
        (token, votes), *_ = Counter(token for _, _, token in following).most_common(1)
        chance *= votes / len(places)
        if chance < LEAST:
            break
        chain.append(token)
        right += chance
        places = [(tokens, at + 1) for tokens, at, follows in following if follows == token]
    return chain, right
