"""Pages with the states after their last token: each cached one has the bits of a prefill of its prefix."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from headwater.cache.prefix_cache import PrefixCache
from headwater.cache.segments.compose import is_marked
from headwater.memory.slots import StateMemory
from headwater.plan import Draft, Match, Plan
from headwater.schedule.sequence import tokens_of
from tests.covering import cells
from tests.exactness.rig import DOCUMENTS, FAST, Answer, Make, Rig, prompt_of, words
from tests.exactness.scenarios import AMPLE, SCENARIOS
from tests.support import Bench

PAGE = 64
SOME = ("chat_turn", "after_preemption")


@dataclass(frozen=True)
class Kept(Make):
    """A maker that keeps its rigs, whose pages are read once they have stopped."""

    rigs: list[Rig] = field(default_factory=list)

    def __call__(self, pages: int, **settings) -> Rig:
        self.rigs.append(super().__call__(pages, **settings))
        return self.rigs[-1]


def states_of(rig: Rig) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the tokens before each cached page's end that have no mark, and the states in the page."""
    index, spec = rig.engine.scheduler.cache.index, rig.engine.spec
    for node in index:
        key = index.key_of(node)
        for end in range(node.end - len(node.pages) + 1, node.end + 1):
            if end >= node.gap_end and not is_marked(key[: 4 * PAGE * end]):
                page = rig.engine.runner.arena.pages[node.pages[end - node.end - 1]]
                yield tokens_of(key[: 4 * PAGE * end]), page[spec.state_place[1]][: spec.state.bytes]


def prefilled(make: Make, tokens: tuple[int, ...], known: dict[tuple[int, ...], torch.Tensor]) -> torch.Tensor:
    """Return the states after tokens, computed page by page in other memory."""
    if tokens not in known:
        bench = Bench(make.loaded.model, n_pages=len(tokens) // PAGE)
        seq = bench.sequence(len(tokens))
        for at in range(0, len(tokens), PAGE):
            bench.step([(seq, list(tokens[at : at + PAGE]))])
            known[tokens[: at + PAGE]] = bench.states.bytes_RB[seq.slot, : make.loaded.spec.state.bytes].clone()
    return known[tokens]


def equal_states(make: Kept) -> list[bool]:
    """Return of each page of the maker's rigs whether it has the states of a prefill."""
    known: dict[tuple[int, ...], torch.Tensor] = {}
    found = [one for rig in make.rigs for one in states_of(rig)]
    found.sort(key=lambda one: -len(one[0]))
    assert found
    return [torch.equal(states, prefilled(make, tokens, known)) for tokens, states in found]


@pytest.mark.parametrize("recipe", ["lfm2", pytest.param("lfm2_moe_odd", marks=pytest.mark.full)])
@pytest.mark.parametrize("scenario", cells(tuple(SCENARIOS), lambda name: name in SOME))
def test_each_cached_page_has_the_states_of_a_prefill(load, recipe, scenario):
    make = Kept(*load(recipe, "float32", 2))
    SCENARIOS[scenario](make)
    assert all(equal_states(make))


def test_pages_of_composed_and_exact_prompts_have_the_states_of_a_prefill(load):
    """Composed prompts share pages with exact ones only up to their first segment's interior."""
    make = Kept(*load("lfm2", "float32", 2), {"healing": "off"})
    prompt, spans = prompt_of(DOCUMENTS, lead=words(123, "lead"))
    with make(AMPLE) as rig:
        rig.ask(prompt, 70, segments=spans, **FAST)
        rig.settle()
        again = rig.ask(prompt + words(70, "turn"), segments=spans, **FAST)
        assert again.account.resumed_at == len(prompt) // PAGE * PAGE, "where the composed leg ends or later"
        cut = rig.ask(prompt[:400] + words(80, "other"), segments=spans[:1], **FAST)
        assert cut.account.resumed_at == 128, "no page within an interior has states"
        rig.ask(prompt)
    assert all(equal_states(make))


def test_pages_that_decoding_filled_have_states_with_reuse_raw(load):
    make = Kept(*load("lfm2", "float32", 2), {"decode_reuse": "raw"})
    SCENARIOS["chat_turn"](make)
    assert all(equal_states(make)), "the convolution comes before attention, whose bits are those of decoding"


# -- controls: the comparison of answers must fail


def resumed_at_a_page(make: Make) -> Answer:
    """A prompt that shares ten pages with one before, and no token more."""
    with make(AMPLE) as rig:
        shared = words(640, "shared")
        rig.ask(shared + words(200, "own"), 80)
        rig.settle()
        answer = rig.ask(shared + words(100, "other"), 4)
    assert answer.account.cached_tokens == 640
    return answer


def of_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the states of the page before."""
    reserve = PrefixCache.reserve

    def before(cache: PrefixCache, draft: Draft, match: Match | None = None) -> Plan:
        plan, at = reserve(cache, draft, match), draft.resumes_at // PAGE
        return replace(plan, restore=plan.table[at - 2 : at - 1]) if len(plan.restore) else plan

    monkeypatch.setattr(PrefixCache, "reserve", before)


def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save no states: pages have what they had before."""
    monkeypatch.setattr(StateMemory, "save", lambda *given: None)


def one_row_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the inputs without the last one."""
    save = StateMemory.save

    def early(memory: StateMemory, row: int, arena_PB: torch.Tensor, page_ids: tuple[int, ...]) -> None:
        inputs_2B = memory.bytes_RB[row, : 2 * 64 * 4].view(2, -1)
        inputs_2B[:] = inputs_2B.flip(0)
        save(memory, row, arena_PB, page_ids)
        inputs_2B[:] = inputs_2B.flip(0)

    monkeypatch.setattr(StateMemory, "save", early)


@pytest.mark.parametrize("broken", [of_neighbour, stale, one_row_early])
def test_wrong_states_in_a_page_are_seen(
    load, same_bits_as_without_a_cache, monkeypatch, broken: Callable[[pytest.MonkeyPatch], None]
):
    make = Make(*load("lfm2", "float32", 2))
    right = resumed_at_a_page(make)
    with monkeypatch.context() as patched:
        broken(patched)
        wrong = resumed_at_a_page(replace(make))
    assert list(same_bits_as_without_a_cache(make, [right, wrong])) == [True, False]
