"""The default placement: positions of `structural`, and those at which prompts of about this length were left."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from headwater.account import Reason
from headwater.cache import PrefixCache
from headwater.cache.eviction.headwater import Headwater
from headwater.cache.eviction.headwater.rates import DEPTH_CLASSES, LEARNED_CLASS, PRIOR_USES
from headwater.cache.placement import make_placement
from headwater.cache.placement.base import Placement, PlacementQuery
from headwater.errors import ConfigError
from headwater.plan import Match
from headwater.request import Boundaries
from tests.cache.toy import LAYOUT, PAGE, Tokens, Toy, words
from tests.contract.test_placement import GRIDS, lessons_and_query
from tests.support import examples


def query(length: int, branch: int = 0, is_first: bool = False, checkpoint: int = 0) -> PlacementQuery:
    """Return a query whose prompt ends with the last user's query, as a chat's does."""
    match = Match(branch, checkpoint, branch, Reason.NO_CHECKPOINT, is_first=is_first)
    return PlacementQuery(length, match, Boundaries(query_end=length), 64)


def raw(asked: PlacementQuery) -> PlacementQuery:
    """Return the query of the same prompt with no boundary known."""
    return replace(asked, boundaries=Boundaries())


def taught(lessons: list[PlacementQuery], options: str = "", policy: str = "headwater") -> Placement:
    placement = make_placement(f"{policy}({options})" if options else policy)
    for lesson in lessons:
        placement.learn(lesson)
    return placement


def documents(count: int) -> list[PlacementQuery]:
    """Documents of 7,900 to 8,300 tokens, a question of 100, and for each a second one, which leaves at its end."""
    lessons = []
    for number in range(count):
        length = 7900 + 400 * number // count
        lessons += [query(length + 100), query(length + 100, length // 64 * 64, is_first=True)]
    return lessons


def test_untaught_positions_are_those_of_structural() -> None:
    asked = query(8101)
    lessons = [query(8101, 4096) for _ in range(30)]
    assert taught(lessons).place(asked) == make_placement("structural").place(asked)


def test_first_question_gets_a_checkpoint_at_its_documents_end() -> None:
    placed = taught(documents(20)).place(query(8201))
    assert placed.learned == (8064, 8128)  # the document's 8,100 tokens: 1 or 2 pages before the last one, by rounding
    assert placed.checkpoints == (8064, 8128, 8192)
    assert make_placement("structural").place(query(8201)).checkpoints == (8192,)


def test_ends_of_template_parts_are_learned() -> None:
    lessons = [query(3000)] + [query(3000, depth, is_first=True) for depth in (640, 1280, 640, 1280, 640, 1280)]
    assert taught(lessons).place(query(3001)).learned == (640, 1280)


def test_prompts_that_resume_deeper_do_not_lower_a_chance() -> None:
    """An agent's turns, of the same length, compute only their ends."""
    turns = [query(8201, 7936, checkpoint=7936) for _ in range(200)]
    placed = taught([one for pair in zip(documents(100), turns, strict=True) for one in pair]).place(query(8201))
    assert placed.learned == (8064, 8128)


def test_rare_departures_get_no_checkpoint() -> None:
    lessons = [query(3000) for _ in range(100)] + [query(3000, 640, is_first=True) for _ in range(3)]
    assert taught(lessons).place(query(3000)).learned == ()
    assert taught(lessons, "least=0.03").place(query(3000)).learned == (640,)


def test_depth_that_saves_most_is_chosen_first() -> None:
    # 10 of 12 prompts are left at 2,560 or below; next to that, 2 x 1,600 tokens are saved at 4,160, 2 x 640 at 640
    depths = [2560, 640, 2560, 4160, 2560, 2560] * 2
    lessons = [one for depth in depths for one in (query(9000), query(9000, depth, is_first=True))]
    for most, expected in enumerate(((), (2560,), (2560, 4160), (640, 2560, 4160))):
        assert taught(lessons, f"most={most}, beta=1").place(query(9000)).learned == expected


def test_raw_prompt_also_gets_optimal_positions() -> None:
    lessons = [raw(query(8101, depth)) for depth in (640, 1280, 2560, 5120) * 10]
    asked = raw(query(8101))
    structural, optimal = (taught(lessons, policy=name).place(asked) for name in ("structural", "optimal(2)"))
    assert optimal.checkpoints == (2560, 5120, 8064)
    placed = taught(lessons).place(asked)
    assert (placed.checkpoints, placed.learned, placed.optional) == (optimal.checkpoints, (), (2560, 5120))
    assert placed.speculative == structural.speculative
    assert taught(lessons, "k=4").place(asked).checkpoints == (640, 1280, 2560, 5120, 8064)
    chat = query(8101)
    assert taught(lessons).place(chat) == make_placement("structural").place(chat), "its boundaries say where"
    chats = [replace(one, boundaries=chat.boundaries) for one in lessons]
    assert taught(chats).place(asked) == structural, "chats do not teach it"


@pytest.mark.parametrize("answered", [False, True])
def test_optimal_positions_exclude_the_last_page(answered: bool) -> None:
    lessons = [raw(query(8101, depth)) for depth in (1280, 2560, 5120, 8064) * 10]
    placed = taught(lessons).place(replace(raw(query(8101)), answered=answered))
    assert (placed.checkpoints, placed.optional) == ((2560, 5120, 8064), (2560, 5120))


def test_optimal_positions_need_an_overlap_of_about_this_length() -> None:
    structural, new = make_placement("structural"), raw(query(8101))
    assert taught([new] * 30).place(new) == structural.place(new)
    lessons = [raw(query(1000, depth)) for depth in (128, 256, 512, 640, 768) * 4]
    assert taught(lessons).place(new) == structural.place(new)
    assert taught(lessons).place(raw(query(1010))).optional
    assert taught([new] * 30).place(raw(query(8101, 4096))).optional, "this prompt overlaps"


def test_learned_positions_exclude_those_of_structural() -> None:
    lessons = documents(20)
    asked = query(8201, 8064)
    placed = taught(lessons).place(asked)
    assert 8064 in make_placement("structural").place(asked).checkpoints
    assert placed.learned == (8128,)


@settings(max_examples=examples(100))
@given(case=lessons_and_query(GRIDS))
def test_all_positions_of_structural_are_kept(case: tuple[list[PlacementQuery], PlacementQuery]) -> None:
    """So its promises hold: a shared prefix hits on its second request, at n - prompt/8 - 64 or deeper."""
    lessons, asked = case
    lessons = [replace(one, match=replace(one.match, is_first=True)) for one in lessons]
    placed, before = taught(lessons).place(asked), make_placement("structural").place(asked)
    kinds = before.checkpoints, placed.learned, placed.optional
    assert placed.checkpoints == tuple(sorted(at for kind in kinds for at in kind))
    assert len({*placed.checkpoints}) == len(placed.checkpoints), "each is of one kind"
    assert {*placed.speculative} == {*before.speculative} - {*placed.checkpoints}
    assert not (asked.boundaries.known and placed.optional)


def test_options_are_checked() -> None:
    for options in ("least=0", "beta=0", "beta=1.5", "prior=0", "every=0", "most=-1", "k=0"):
        with pytest.raises(ConfigError):
            make_placement(f"headwater({options})")


def serve(toy: Toy, placement: Placement, tokens: Tokens) -> int:
    """Place, reserve, learn and commit, as the planner does; return where the request resumed."""
    match = toy.match(tokens)
    asked = PlacementQuery(len(tokens), match, Boundaries(query_end=len(tokens)), PAGE)
    placed = placement.place(asked)
    draft = toy.draft(tokens, match.checkpoint_tokens, checkpoints=placed.checkpoints, learned=placed.learned)
    plan = toy.reserve(draft)
    placement.learn(asked)
    toy.commit(plan, draft)
    toy.release(draft.request)
    return match.checkpoint_tokens


def second_questions(policy: str) -> list[int]:
    """Return where the second question about each of 40 documents resumes."""
    toy, placement = Toy(replace(LAYOUT, n_pages=400), "headwater"), make_placement(policy)
    found = []
    for number in range(40):
        document = words(number, 80)
        serve(toy, placement, document + words(100 + number, 10))
        found.append(serve(toy, placement, document + words(200 + number, 10)))
    return found


def test_second_question_hits_at_learned_document_end() -> None:
    assert second_questions("structural") == [0] * 40  # no memory is free for speculative ones: none are drafted
    found = second_questions("headwater(every=1)")
    assert found[0] == 0
    assert set(found[10:]) == {80}


def test_used_learned_checkpoints_keep_their_position_learned() -> None:
    # where all second questions hit, none is left without a checkpoint; still the position is taken for ever
    toy, placement = Toy(replace(LAYOUT, n_pages=400), "headwater"), make_placement("headwater(every=1, beta=0.9)")
    for number in range(150):
        document = words(number, 80)
        serve(toy, placement, document + words(1000 + number, 10))
        resumed = serve(toy, placement, document + words(2000 + number, 10))
    assert resumed == 80


def classes(cache: PrefixCache) -> dict[int, int]:
    """Return the class of uses of each checkpoint in the eviction policy, by its position."""
    policy = cache.policy
    assert isinstance(policy, Headwater)
    unit, kept = cache.layout.unit_tokens, policy.candidates
    return {node.end * unit: kept.kind[row] // DEPTH_CLASSES % len(PRIOR_USES) for row, node in enumerate(kept.keys)}


def test_unused_learned_checkpoint_keeps_its_class_after_a_restart() -> None:
    toy, document = Toy(replace(LAYOUT, n_pages=400), "headwater"), words(1, 80)
    asked = document + words(2, 20)
    draft = toy.draft(asked, 0, checkpoints=(80, 96), learned=(80,))
    toy.commit(toy.reserve(draft), draft)
    toy.release(draft.request)
    restarted = PrefixCache(toy.layout, "headwater", toy.cache.snapshot())
    for cache in (toy.cache, restarted):
        assert classes(cache) == {80: LEARNED_CLASS // DEPTH_CLASSES, 96: 0}
    assert serve(toy, make_placement("headwater"), document + words(3, 20)) == 80
    assert classes(toy.cache)[80] not in (LEARNED_CLASS // DEPTH_CLASSES, 0)
    assert classes(restarted)[80] == LEARNED_CLASS // DEPTH_CLASSES


def test_first_departure_has_no_earlier_departure_or_resumption() -> None:
    toy, document = Toy(replace(LAYOUT, n_pages=400), "headwater"), words(1, 80)
    draft = toy.draft(document + words(2, 20), 0, checkpoints=(80,), learned=(80,))
    toy.commit(toy.reserve(draft), draft)
    toy.release(draft.request)
    assert toy.match(document[:40] + words(3, 20)).is_first, "it leaves in the middle of an edge"
    assert toy.match(document + words(3, 20)).is_first, "nobody has resumed at what was learned"
    assert not toy.match(words(4, 20)).is_first, "it shares nothing"
    serve(toy, make_placement("headwater"), document + words(3, 20))
    assert not toy.match(document + words(5, 20)).is_first
