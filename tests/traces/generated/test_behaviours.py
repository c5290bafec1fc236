"""Each behaviour has the property that its docstring claims."""

from collections import Counter
from itertools import pairwise
from statistics import mean

import pytest

from headwater.traces.generated.behaviours import SLOTS, STUB, Agents, Behaviour, Chats, Documents, Scans, Templates
from headwater.traces.generated.conversation import HOUR, SECOND, TokenIds, Words, milliseconds
from headwater.traces.generated.dice import Dice
from headwater.traces.generated.traffic import Kind, Source, drawn
from headwater.traces.request import Request
from tests.traces.shared import shared_tokens

END = 24 * HOUR


def words() -> Words:
    return Words(TokenIds(), 0)


def sessions(behaviour: Behaviour, count: int, at: int = 0, end: int = END) -> list[list[Request]]:
    """Draw sessions that share their texts."""
    shared = words()
    return [behaviour.session(str(n), at, end, Dice(n), shared) for n in range(count)]


def gaps(session: list[Request]) -> list[int]:
    return [milliseconds(b) - milliseconds(a) for a, b in pairwise(session)]


# -- chats -----------------------------------------------------------------------------


def test_a_chat_ends_after_a_drawn_number_of_turns() -> None:
    lengths = [len(one) for one in sessions(Chats(turns=5, query=8, answer=8), 400)]
    assert mean(lengths) == pytest.approx(5, rel=0.15)
    assert min(lengths) == 1


def test_a_chat_that_lives_on_ends_with_the_traffic() -> None:
    for session in sessions(Chats(living=1000, query=4, answer=4, pause=60 * SECOND), 5, end=4 * HOUR):
        assert len(session) > 100
        assert 4 * HOUR - milliseconds(session[-1]) < 20 * 60 * SECOND


def test_each_turn_of_a_chat_continues_the_whole_previous_turn() -> None:
    for session in sessions(Chats(turns=6), 20):
        for a, b in pairwise(session):
            assert shared_tokens(a, b) == a.prompt_tokens
            assert b.text[: a.known_tokens * 4] == a.text[: a.known_tokens * 4]


def test_a_chat_returns_after_hours() -> None:
    pauses = [gap for one in sessions(Chats(turns=10, returns=300, absence=4 * HOUR), 60) for gap in gaps(one)]
    away = [gap for gap in pauses if gap > HOUR]
    assert len(away) / len(pauses) == pytest.approx(0.3, abs=0.08)
    assert sorted(away)[len(away) // 2] == pytest.approx(4 * HOUR, rel=0.2)
    assert not [gap for one in sessions(Chats(turns=10), 60) for gap in gaps(one) if gap > HOUR]


def test_edited_chat_returns_to_the_end_of_an_earlier_turn() -> None:
    back = 0
    for session in sessions(Chats(turns=12, edits=300), 20):
        ends = [one.known_tokens for one in session]
        for number, (a, b) in enumerate(pairwise(session)):
            if shared_tokens(a, b) < a.prompt_tokens:
                back += 1
                assert shared_tokens(a, b) in ends[: number + 1]
                assert b.prompt_tokens > shared_tokens(a, b)
    assert back > 10


def test_a_chat_is_compacted_at_its_limit() -> None:
    chats = Chats(living=1000, limit=2000, system=100, pause=60 * SECOND)
    compacted = 0
    for session in sessions(chats, 3):
        assert max(one.prompt_tokens for one in session) <= 2000
        for a, b in pairwise(session):
            if b.prompt_tokens < a.prompt_tokens:
                compacted += 1
                assert shared_tokens(a, b) == a.boundaries.system_end
    assert compacted > 10


def test_chats_with_one_system_prompt_share_it_and_nothing_else() -> None:
    first, *others = (one[0] for one in sessions(Chats(systems=1, system=300), 10))
    assert {shared_tokens(first, other) for other in others} == {first.boundaries.system_end}


# -- documents -------------------------------------------------------------------------


def test_questions_follow_the_document_or_each_other() -> None:
    for follow in (False, True):
        for session in sessions(Documents(questions=4, follow=follow, tokens=500), 20):
            for a, b in pairwise(session):
                assert a.boundaries.query_start is not None
                assert shared_tokens(a, b) == (a.prompt_tokens if follow else a.boundaries.query_start)


def test_popular_documents_come_in_proportion_to_their_rank() -> None:
    documents = Documents(count=50, exponent=100, tokens=100, system=0)
    counts = Counter(one[0].text[:4] for one in sessions(documents, 3000))
    first, second, *_, last = (count for _, count in counts.most_common())
    assert first / second == pytest.approx(2, rel=0.2)
    assert first / last > 20


def test_ranks_drift_by_one_at_a_time() -> None:
    documents = Documents(count=10, drift=60 * SECOND)
    for minute in range(25):
        at = minute * 60 * SECOND
        assert [documents.at_rank(rank + 1, at + 60 * SECOND) for rank in range(9)] == [
            documents.at_rank(rank, at) for rank in range(9)
        ]
    assert len({documents.at_rank(0, minute * 60 * SECOND) for minute in range(10)}) == 10
    assert {Documents(count=10).at_rank(0, at) for at in (0, END)} == {0}


# -- templates -------------------------------------------------------------------------


def test_requests_share_a_template_up_to_the_first_different_slot() -> None:
    templates, shared = Templates(templates=1, parts=3, part=200, slot=10, values=2), words()
    asked = [templates.session(str(n), 0, END, Dice(n), shared)[0] for n in range(60)]
    first, second, third = (len(shared.named(0, part, median=200)) for part in range(3))
    slots = [[len(shared.named(0, SLOTS + part, value, median=10)) for value in (0, 1)] for part in (0, 1)]
    ends = {first}  # the first slot differs, or the second, or only the new value at the end
    ends |= {first + a + second for a in slots[0]}
    ends |= {first + a + second + b + third for a in slots[0] for b in slots[1]}
    assert {shared_tokens(a, b) for a in asked[:20] for b in asked[20:]} == ends
    assert asked[0].boundaries.system_end == first


# -- agents ----------------------------------------------------------------------------


def prompts(**parameters: int) -> list[list[Request]]:
    usual = {"steps": 14, "task": 100, "action": 30, "observation": 80, "system": 200}
    return sessions(Agents(**usual | parameters), 30)


def test_an_agent_only_appends_unless_it_collapses() -> None:
    for session in prompts():
        for a, b in pairwise(session):
            assert b.text[: a.known_tokens * 4] == a.text[: a.known_tokens * 4]


def test_a_collapsed_history_shares_all_up_to_the_observation_that_was_collapsed() -> None:
    """Step t collapses observation t - 5: of the prompt before, what stands in front of it is shared."""
    collapsed = 0
    for session in prompts(keeps=5):
        for step, (a, b) in enumerate(pairwise(session), 1):
            if step <= 5:
                assert shared_tokens(a, b) == a.prompt_tokens
                continue
            collapsed += 1
            old = step - 6  # number of the observation that is collapsed now
            actions = [one.known_tokens - one.prompt_tokens for one in session[: old + 1]]
            assert session[0].boundaries.query_end is not None
            assert shared_tokens(a, b) == session[0].prompt_tokens + sum(actions) + old * STUB
    assert collapsed > 50


def test_the_last_five_observations_stay_whole() -> None:
    long = Agents(steps=14, observation=500, keeps=5, action=30)
    session = max(sessions(long, 10), key=len)
    assert len(session) > 12
    growth = [b.prompt_tokens - a.prompt_tokens for a, b in pairwise(session)]
    assert max(one.prompt_tokens for one in session) < session[0].prompt_tokens + sum(growth[:5]) * 4
    assert mean(growth[5:]) < mean(growth[:5]) / 2


def test_sub_agent_has_its_own_prompt_and_its_parent_waits() -> None:
    helped = 0
    for made in prompts(subagents=200):
        parent = [one for one in made if "/" not in one.session]
        for name in {one.session for one in made} - {parent[0].session}:
            helper = [one for one in made if one.session == name]
            helped += 1
            assert shared_tokens(helper[0], parent[0]) == 0
            step = int(name.rpartition("/")[2])
            assert milliseconds(parent[step]) <= milliseconds(helper[0])
            if step + 1 < len(parent):
                assert milliseconds(helper[-1]) <= milliseconds(parent[step + 1])
    assert helped > 20


def test_a_fork_shares_the_history_up_to_where_it_leaves_it() -> None:
    forks = 0
    for made in prompts(forks=200, branches=3):
        parent = [one for one in made if "/" not in one.session]
        for name in {one.session for one in made} - {parent[0].session}:
            fork = next(one for one in made if one.session == name)
            step = int(name.rpartition("/")[2].partition(".")[0])
            forks += 1
            assert shared_tokens(fork, parent[step]) == parent[step].prompt_tokens
            if step + 1 < len(parent):
                assert shared_tokens(fork, parent[step + 1]) == parent[step].known_tokens
    assert forks > 20


# -- scans, retries, tenants, phases --------------------------------------------------------


def test_a_scan_shares_nothing() -> None:
    shared = words()
    scans = [one for n in range(3) for one in Scans(tokens=100, run=20).session(str(n), 0, END, Dice(n), shared)]
    seen = [token for one in scans for token in memoryview(one.text).cast("i")]
    assert len(scans) > 10
    assert len(set(seen)) == len(seen)
    assert len({one.session for one in scans}) == len(scans)


def kind(*phases: int, **parameters: int) -> Kind:
    one = Source("chats", Chats(query=8, answer=8), 500, (0,), True)
    other = Source("scans", Scans(tokens=50), 500, tuple(range(1, len(phases))) or (0,), False)
    return Kind((one, other), phases, **parameters)


def test_a_retry_is_the_same_prompt_within_a_minute() -> None:
    requests = drawn(kind(HOUR, retries=200), 1000, 0)
    retries = [one for one in requests if " again " in one.session]
    assert len(retries) / len(requests) == pytest.approx(0.2 / 1.2, abs=0.04)
    for retry in retries:
        session = [one for one in requests if one.session == retry.session.partition(" again ")[0]]
        first = next(one for one in session if one.prompt_tokens == retry.prompt_tokens)
        assert shared_tokens(retry, first) == first.prompt_tokens
        assert 0 <= milliseconds(retry) - milliseconds(first) < 60 * SECOND


def test_tenants_are_of_unlike_size_and_a_session_has_one() -> None:
    requests = drawn(kind(HOUR, tenants=4), 2000, 0)
    tenants = Counter(one.namespace for one in requests)
    assert [name for name, _ in tenants.most_common()] == [f"tenant {n}" for n in range(4)]
    assert tenants["tenant 0"] > 2 * tenants["tenant 1"]
    of = {(one.session, one.namespace) for one in requests}
    assert len(of) == len({one.session for one in requests})
    assert {one.namespace for one in drawn(kind(HOUR), 100, 0)} == {""}


def test_phases_change_at_once() -> None:
    requests = drawn(kind(HOUR, 2 * HOUR), 1000, 0)
    before, after = (
        {one.session.partition(".")[0] for one in requests if (milliseconds(one) < HOUR) == first}
        for first in (True, False)
    )
    assert (before, after) == ({"0"}, {"1"})


def test_boundaries_are_known_or_not_by_source() -> None:
    for one in drawn(kind(HOUR), 200, 0):
        assert one.boundaries.known == one.session.startswith("0.")
