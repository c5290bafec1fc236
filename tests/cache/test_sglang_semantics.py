"""Observed behaviour of a production engine's tree, next to ours. Ids are those of its table.

sys is 1,000 tokens, a and b 500 each, A = sys + a, B = sys + b. Behaviour that the table marks as bad is better here
where the tree itself can improve it. Pages have 64 tokens.
"""

import pytest

from headwater.cache import PrefixCache
from headwater.cache.eviction.base.policy import Room
from headwater.plan import CacheLayout, Draft, Match, Plan, Saving
from tests.cache.toy import Tokens, evict, key_of, words

SYS = words(1, 1000)
A, B = SYS + words(2, 500), SYS + words(3, 500)
C = words(4, 2048)


class Tree:
    """Insertions with a state at the end of the whole pages, in two regions so that each is evicted for itself."""

    def __init__(self) -> None:
        self.cache = PrefixCache(CacheLayout(n_pages=400, slot_pages=0, state_fraction=0.25))
        self.requests = 0

    def draft(self, tokens: Tokens, namespace: str = "") -> Draft:
        end = len(tokens) // 64 * 64
        start = self.match(tokens, namespace).checkpoint_tokens
        self.requests += 1
        return Draft(self.requests, namespace, key_of(tokens), start, end, end, Saving((end,)))

    def insert(self, tokens: Tokens, namespace: str = "") -> None:
        draft = self.draft(tokens, namespace)
        if draft.start < draft.end:
            self.cache.commit(self.cache.reserve(draft))
            self.cache.release(draft.request)
        self.cache.check()

    def lock(self, tokens: Tokens) -> Plan:
        """A request that runs at the end of `tokens`."""
        self.requests += 1
        end = self.match((*tokens, 0)).checkpoint_tokens
        return self.cache.reserve(Draft(self.requests, "", key_of((*tokens, 0)), end, end + 1))

    def hit(self, tokens: Tokens) -> None:
        """A request that resumed at the end of `tokens` and is gone."""
        plan = self.lock(tokens)
        self.cache.abandon(plan)
        self.cache.release(plan.request)

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        return self.cache.match(key_of(tokens), len(tokens) + 1, namespace)

    def evict(self, room: Room, times: int = 1) -> None:
        for _ in range(times):
            evict(self.cache, room)
            self.cache.check()

    @property
    def kv_tokens(self) -> int:
        return self.cache.stats().pages_kv * 64

    @property
    def states(self) -> int:
        return self.cache.stats().checkpoints


@pytest.fixture
def tree() -> Tree:
    return Tree()


def test_s01_whole_pages_and_one_state_are_kept(tree: Tree) -> None:
    tree.insert(A)
    assert (tree.kv_tokens, tree.states) == (1472, 1)


def test_s02_an_extension_hits_the_whole_pages(tree: Tree) -> None:
    tree.insert(A)
    assert tree.match(A + words(9, 200)).checkpoint_tokens == 1472


def test_s05_a_match_that_ends_inside_an_edge_changes_nothing(tree: Tree) -> None:
    tree.insert(A)
    assert tree.match(B).kv_tokens == 960
    assert tree.cache.stats().nodes == 1
    assert tree.match(A).checkpoint_tokens == 1472


def test_s06_inserting_the_same_again_keeps_one_copy(tree: Tree) -> None:
    tree.insert(A)
    tree.insert(A)
    assert (tree.kv_tokens, tree.states) == (1472, 1)
    assert tree.cache.stats().pages_free == 400 - 23 - 1


def test_s07_an_overlap_is_kept_once(tree: Tree) -> None:
    tree.insert(A)
    tree.insert(B)
    assert (tree.kv_tokens, tree.states) == (1984, 2)


def test_s08_evicting_a_state_leaves_the_leafs_kv(tree: Tree) -> None:
    tree.insert(A)
    tree.insert(B)
    tree.evict(Room.STATE)
    assert tree.kv_tokens == 1984
    assert (tree.match(A).checkpoint_tokens, tree.match(A).kv_tokens) == (0, 1472)


def test_s09_an_inner_state_is_evicted_without_its_kv(tree: Tree) -> None:
    tree.insert(C[:1024])
    tree.insert(C)
    tree.insert(C + words(9, 64))
    tree.evict(Room.STATE)
    assert tree.match(C[:1500]).checkpoint_tokens == 0
    assert tree.match(C).checkpoint_tokens == 2048
    assert tree.kv_tokens == 2112


def test_s10_dead_kv_is_counted_and_evicted_first(tree: Tree) -> None:
    tree.insert(A)
    tree.insert(B)
    tree.evict(Room.STATE, 2)
    assert tree.cache.stats().dead_kv_tokens == 1984
    tree.insert(words(8, 640))
    tree.evict(Room.KV, 31)
    assert tree.kv_tokens == 640
    assert tree.states == 1


def test_s11_a_tombstone_gets_a_state_again_and_no_kv(tree: Tree) -> None:
    tree.insert(C[:1024])
    tree.insert(C)
    tree.insert(C + words(9, 64))
    tree.evict(Room.STATE)
    tree.insert(C[:1024])
    assert tree.kv_tokens == 2112
    assert tree.match(C[:1500]).checkpoint_tokens == 1024


def test_s12_a_hit_refreshes_only_the_state_that_it_uses(tree: Tree) -> None:
    tree.insert(C[:1024])
    tree.insert(C)
    tree.insert(words(5, 512))
    tree.hit(C)
    tree.evict(Room.STATE)
    assert tree.match(words(5, 512)).checkpoint_tokens == 512
    assert tree.match(C[:1500]).checkpoint_tokens == 0


def test_s13_a_leaf_is_trimmed_not_dropped(tree: Tree) -> None:
    tree.insert(C)
    tree.evict(Room.KV, 2)  # its state, then one page
    assert tree.match(C).kv_tokens == 2048 - 64


def test_s14_the_least_recent_leaf_is_evicted_up_to_its_branch_point(tree: Tree) -> None:
    tree.insert(A)
    tree.insert(B)
    tree.evict(Room.KV, 1 + 8)
    assert tree.match(A).kv_tokens == 960
    assert tree.match(B).checkpoint_tokens == 1472


def test_s15_evicting_everything_leaves_an_empty_tree(tree: Tree) -> None:
    tree.insert(A)
    tree.insert(B)
    tree.evict(Room.KV, 31 + 2)
    stats = tree.cache.stats()
    assert (stats.nodes, stats.namespaces, stats.pages_free) == (0, 0, 400)


def test_s16_a_locked_path_stays(tree: Tree) -> None:
    tree.insert(A)
    tree.insert(B)
    tree.lock(A)
    tree.evict(Room.KV, 1 + 8)
    assert tree.match(A).checkpoint_tokens == 1472
    with pytest.raises(AssertionError, match="finds nothing to evict"):
        tree.evict(Room.KV)


def test_s17_a_lock_keeps_all_kv_and_one_state(tree: Tree) -> None:
    tree.insert(C[:1024])
    tree.insert(C)
    tree.lock(C)
    tree.evict(Room.STATE)
    assert tree.match(C).checkpoint_tokens == 2048
    assert tree.match(C[:1500]).checkpoint_tokens == 0
    with pytest.raises(AssertionError, match="finds nothing to evict"):
        tree.evict(Room.STATE)


def test_s18_namespaces_do_not_see_each_other(tree: Tree) -> None:
    tree.insert(A, "lora1")
    assert [tree.match(A, name).checkpoint_tokens for name in ("", "lora1", "lora2")] == [0, 1472, 0]


def test_s19_less_than_a_page_is_not_kept(tree: Tree) -> None:
    assert tree.match(()).kv_tokens == 0
    tree.insert(A[:63])
    assert (tree.kv_tokens, tree.cache.stats().namespaces) == (0, 0)


def test_s20_kv_is_matched_in_whole_pages(tree: Tree) -> None:
    tree.insert(A[:100] + words(8, 156))
    match = tree.match(A[:100] + words(9, 50))
    assert (match.checkpoint_tokens, match.kv_tokens) == (0, 64)


def test_s21_locked_content_is_not_evicted(tree: Tree) -> None:
    tree.insert(C[:1024])
    tree.insert(C)
    tree.lock(C[:1024])
    tree.lock(C)
    for room in (Room.STATE, Room.KV):
        with pytest.raises(AssertionError, match="finds nothing to evict"):
            tree.evict(room)


def test_s22_an_older_tip_is_evicted_before_the_turn_above(tree: Tree) -> None:
    tree.insert(C[:1024])
    tree.insert(C)
    tree.hit(C[:1024])
    tree.evict(Room.STATE)
    assert (tree.match(C).checkpoint_tokens, tree.match(C).kv_tokens) == (1024, 2048)
