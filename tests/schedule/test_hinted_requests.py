"""Requests with hints: what is kept of them, and what goes first."""

from dataclasses import replace

import pytest

from headwater.cache.eviction.headwater import Headwater
from headwater.plan import Retention
from headwater.request import Boundaries
from tests.schedule.ledger import Lab, words

BOUNDARIES = Boundaries(system_end=640, query_start=640, query_end=1290)
PROMPT = words(1300, "a system prompt of 640 tokens, and a question")


def lab(**sizes) -> Lab:
    return Lab(eviction="headwater", page_size=64, **sizes)


def checkpoints(world: Lab) -> dict[int, bool]:
    """Positions of all checkpoints, and whether they are speculative."""
    index, unit = world.cache.index, world.layout.unit_tokens
    return {node.end * unit: node.speculative for node in index if node.checkpoint is not None}


def test_the_end_of_a_conversation_leaves_its_system_prompt_in_place():
    world = lab(n_pages=1000)
    world.ask(PROMPT, 100, boundaries=BOUNDARIES, ended=True, keep_output=False)
    found = checkpoints(world)
    assert found.pop(640) is False
    assert found
    assert all(found.values())


def test_the_same_request_sent_again_resumes_after_the_end():
    world = lab(n_pages=1000)
    for _ in range(2):
        seq = world.ask(PROMPT, 4, boundaries=BOUNDARIES, ended=True, keep_output=False)
    assert seq.account.cached_tokens == 1280


@pytest.mark.parametrize("tokens_per_step", [64, 10_000])
def test_time_to_live_reaches_the_policy_with_any_leg_length(tokens_per_step):
    world = lab(n_pages=1000, tokens_per_step=tokens_per_step)
    hints = (Retention(640, 300.0), Retention(1290, 3600.0))
    parts = replace(BOUNDARIES, extra=(640, 1290), retained=hints)
    for _ in range(2):  # computed, then matched
        world.ask(PROMPT, 4, boundaries=parts)
        policy = world.cache.policy
        assert isinstance(policy, Headwater)
        kept = policy.candidates
        until = {node.end * world.layout.unit_tokens: kept.until[row] for row, node in enumerate(kept.keys)}
        assert {at: seconds for at, seconds in until.items() if seconds > 0} == {640: 300.0, 1280: 3600.0}


def test_position_with_a_time_to_live_is_kept_below_the_minimum_gap():
    world = lab(n_pages=1000)
    world.ask(PROMPT, 4, boundaries=replace(BOUNDARIES, extra=(1200,), retained=(Retention(1200, 300.0),)))
    assert 1152 in checkpoints(world)  # 128 tokens below the question's end
