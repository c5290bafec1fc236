"""Walks of the index that admitting a request takes: one, unless the index changes before its first leg is reserved."""

import pytest

from headwater.cache.index import Index
from headwater.cache.node import Node, Root
from headwater.errors import OutOfPages
from headwater.plan import Draft, Match, Plan
from headwater.schedule.kinds.request import Request
from headwater.schedule.planner import LADDER
from headwater.schedule.sequence import Phase
from tests.schedule.ledger import Lab, words
from tests.schedule.test_segments_that_wait import LEADING, Rig

HEAD = words(40, "head")


class Walks:
    """Each walk of any index: the node where it began, and the key that it followed."""

    def __init__(self) -> None:
        self.walks: list[tuple[Node, bytes]] = []

    def of(self, *keys: bytes) -> list[tuple[Node, bytes]]:
        return [walk for walk in self.walks if walk[1] in keys]


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Walks:
    seen, walk = Walks(), Index.walk

    def noted(self: Index, node: Node, key: bytes, limit: int) -> tuple[Node, int]:
        seen.walks.append((node, key))
        return walk(self, node, key, limit)

    monkeypatch.setattr(Index, "walk", noted)
    return seen


def admit(it: Lab, seen: Walks, prompt: list[int]) -> Request:
    """Plan the step in which the request begins."""
    seq = it.submit(prompt)
    seen.walks.clear()
    it.scheduler.plan_step()
    assert seq.phase is Phase.PREFILL
    return seq


def test_a_cold_prompt_takes_one_walk(walks: Walks) -> None:
    it = Lab()
    it.ask(words(40, "other"))
    assert len(walks.of(admit(it, walks, HEAD).key)) == len(walks.walks) == 1


def test_a_hit_takes_one_walk(walks: Walks) -> None:
    it = Lab()
    it.ask(HEAD)
    seq = admit(it, walks, [*HEAD, 1, 2])
    assert seq.account is not None
    assert seq.account.resumed_at > 0
    assert len(walks.walks) == 1


def test_a_learning_placement_sees_the_path_without_another_walk_before_it_places(walks: Walks) -> None:
    it = Lab(placement="optimal(2)")
    it.ask(HEAD)
    admit(it, walks, [*HEAD, *words(20, 1)])
    assert len(walks.walks) <= 2, "one, and one to note the path once the leg is reserved"


def test_segments_prompt_makes_one_walk_if_its_prefix_precedes_the_marks(walks: Walks) -> None:
    rig = Rig()
    rig.ask(LEADING, range(1, 4))
    rig.run()
    seq = rig.ask(range(3000, 3064), range(9000, 9040))
    walks.walks.clear()
    rig.scheduler.plan_step()
    assert seq.account is not None
    assert seq.account.segments == 1
    assert len(walks.walks) == 1


def test_segments_prompt_makes_one_walk_from_the_root_and_one_from_marks(walks: Walks) -> None:
    rig = Rig()
    rig.ask(LEADING, range(1, 4))
    rig.run()
    seq = rig.ask(LEADING, range(9000, 9040))
    walks.walks.clear()
    rig.scheduler.plan_step()
    assert seq.account is not None
    assert seq.account.segments + bool(seq.account.approximate_tokens) > 0
    assert sum(isinstance(node, Root) for node, _ in walks.walks) == 1
    assert len(walks.walks) == 2


def test_request_waiting_for_a_leader_makes_one_walk_per_index_change(walks: Walks) -> None:
    it = Lab(tokens_per_step=128)
    it.ask(words(40, "other"))
    leader, follower = it.submit(HEAD + words(40, 1)), it.submit(HEAD + words(40, 2))
    walks.walks.clear()
    it.step()
    assert (leader.phase, follower.phase, follower.waited) == (Phase.DONE, Phase.WAITING, True)
    assert len(walks.of(follower.key)) == 1
    it.scheduler.plan_step()
    assert follower.phase is Phase.PREFILL
    assert len(walks.of(follower.key)) == 2, "the leader's commit changed the index"


def test_nothing_is_walked_again_while_the_index_stays_as_it_is(walks: Walks) -> None:
    it = Lab()
    it.ask(words(40, "other"))
    seq = Request(it.scheduler.new_id(), it.submit(HEAD).generation)
    walks.walks.clear()
    first = it.scheduler.planner.match(seq)
    assert it.scheduler.planner.match(seq) is first
    assert len(walks.walks) == 1


def test_less_ambitious_plans_after_out_of_pages_take_no_other_walk(walks: Walks) -> None:
    it = Lab(n_pages=14, checkpoint_pages=2, placement="every_block(1)")
    it.ask(words(8, "other"))
    seq = admit(it, walks, words(44, "long"))
    assert seq.account is not None
    assert len(walks.of(seq.key)) == 1


def test_retry_after_a_dropped_answer_walks_again_if_the_index_changed(
    walks: Walks, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Lab(tokens_per_step=20)
    first = it.submit(words(20, 1), max_tokens=30)
    while first.phase is not Phase.DONE:
        it.step()
    it.step()  # its answer is being prefilled
    seq, reserve, versions = it.submit(words(100, 2)), it.cache.reserve, []

    def short(draft: Draft, match: Match | None = None) -> Plan:
        versions.append(it.cache.version)
        if len(it.scheduler.running) and draft.request == seq.id:
            raise OutOfPages(1, 0, 0)
        return reserve(draft, match)

    monkeypatch.setattr(it.cache, "reserve", short)
    walks.walks.clear()
    it.scheduler.plan_step()
    assert list(it.scheduler.running.values()) == [seq], "the answer was dropped"
    assert len(versions) > len(LADDER)
    assert len(walks.of(seq.key)) == len(set(versions[1:]))
