"""Speculation in the lab: which drafts are right is a law's, and how many there are the server's choice."""

from dataclasses import replace

import pytest

from headwater.errors import ConfigError
from headwater.lab.cost import StepCost, load_device
from headwater.lab.replay import replay
from headwater.lab.row import Row
from headwater.lab.serving import Engine, Serving
from headwater.lab.setup import Setup
from headwater.lab.speculation import Law, uniform
from headwater.models.profiles import load_profile
from headwater.schedule.sequence import Purpose
from headwater.traces.loads import make_arrivals
from headwater.traces.request import Trace
from tests.lab.test_sequential import PAGE, PROFILE, chat

COST = StepCost(PROFILE, load_device("cpu"))


def sessions(count: int) -> Trace:
    return Trace("made", [request for i in range(count) for request in chat(chr(97 + i), 1, 2, 400, 300)])


def served(law: str, arrival: str = "poisson(rate=0.2, think=1)", pages: int = 20_000, seed: int = 0) -> Row:
    setup = Setup(
        PROFILE, pages * PAGE * PROFILE.kv_bytes_per_token, page_size=PAGE, speculation=Law.read(law), running=16
    )
    trace = sessions(4)
    return replay(trace, setup, make_arrivals(trace, arrival, seed=3), Engine(COST, max_running=16, seed=seed)).row


def test_numbers_of_a_counter_are_uniform_and_depend_on_each_part() -> None:
    drawn = [uniform(7, request, position) for request in range(100) for position in range(100)]
    assert 0.49 < sum(drawn) / len(drawn) < 0.51
    assert [sum(i / 10 <= x < (i + 1) / 10 for x in drawn) / len(drawn) for i in range(10)] == pytest.approx(
        [0.1] * 10, abs=0.012
    )
    assert len({uniform(1, 2, 3), uniform(2, 1, 3), uniform(1, 3, 2), uniform(1, 2, 4), uniform(1, 2, 3)}) == 4


def test_share_of_right_leading_drafts_follows_the_law() -> None:
    law = Law(4, 0.7)
    counts = [law.right(5, request, 1, 4) for request in range(20_000)]
    for n in range(5):
        wanted = 0.7**n * (0.3 if n < 4 else 1)
        assert counts.count(n) / len(counts) == pytest.approx(wanted, abs=0.01)
    assert law.right(5, 0, 1, 4) == next(n for n in range(5) if n == 4 or uniform(5, 0, 1 + n) >= 0.7)


def test_right_drafts_save_steps_and_answers_stay_as_long() -> None:
    def run(law: str) -> Serving:
        trace = sessions(4)
        setup = Setup(PROFILE, 10**10, page_size=PAGE, speculation=Law.read(law), running=16)
        serving = Serving(trace, setup, Engine(COST, max_running=16))
        serving.run(make_arrivals(trace, "poisson(rate=0.2, think=1)", seed=3))
        return serving

    right = run("4@1")
    outputs = sum(request.output_tokens for request in sessions(4).requests)
    accepted, rejected = right.scheduler.speculation.accepted, right.scheduler.speculation.rejected
    assert rejected == 0
    steps = right.scheduler.computed[Purpose.DECODE] - accepted
    assert steps + accepted == outputs - len(sessions(4).requests)
    assert steps < 0.35 * outputs


def test_likelier_drafts_save_time_and_failing_ones_cost_little() -> None:
    rows = [served(law) for law in ("off", "4@0", "4@0.5", "4@0.9")]
    times = [row.tpot_ms.p50 for row in rows if row.tpot_ms is not None]
    off, never, half, often = times
    assert off <= never < 1.03 * off
    assert often < half < 0.95 * off
    assert rows[1].accepted_drafts == 0 < rows[1].rejected_drafts
    assert [row.speculation for row in rows] == ["off", "4@0", "4@0.5", "4@0.9"]


def test_a_seed_gives_the_same_run_and_another_one_another() -> None:
    one, again, other = (replace(served("4@0.6", seed=seed), seconds=0, peak_rss_mb=0) for seed in (1, 1, 2))
    assert one == again
    assert one.accepted_drafts != other.accepted_drafts


def test_slots_take_memory_that_checkpoints_would_have() -> None:
    """With little memory and many at once, states for drafts cost hits; what replay keeps costs none to speak of."""
    crowded = "poisson(rate=50, think=0.1)"
    plain, replayed, slots = (served(law, crowded, pages=500) for law in ("off", "4@0.7", "4@0.7/slots"))
    assert slots.token_hit_rate < replayed.token_hit_rate
    assert replayed.token_hit_rate > 0.9 * plain.token_hit_rate


def test_head_takes_memory_with_each_page() -> None:
    """Qwen3.5-0.8B: 6 attention layers of 2 heads of 256; bfloat16."""
    profile, trace = load_profile("qwen3.5-0.8b"), sessions(1)
    plain, with_head = (
        Setup(profile, 10**9, speculation=Law.read(law), running=4).layout(trace) for law in ("4@0.7", "4@0.7/mtp")
    )
    page, head = 64 * 6 * 2 * 256 * 2 * 2, 64 * 2 * 256 * 2 * 2 + profile.hidden_size * 2
    memory = 10**9 - 4 * 4 * profile.draft_bytes
    assert plain.n_pages == memory // page
    assert with_head.n_pages == memory // (page + head)
    with pytest.raises(ConfigError, match="has no attention"):
        Setup(load_profile("mamba2-2.7b"), 10**9, speculation=Law.read("4@0.7/mtp")).layout(trace)


@pytest.mark.parametrize("text", ["on", "4", "4@", "0@0.5", "17@0.5", "4@1.5", "4@0.5/copies"])
def test_other_laws_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="speculation is"):
        Law.read(text)


def test_memory_filled_by_drafts_is_refused() -> None:
    law = Law.read("16@0.5")
    setup = Setup(load_profile("qwen3.5-0.8b"), 10**9, speculation=law, running=1000)
    with pytest.raises(ConfigError, match="drafts of 1,000 requests take"):
        setup.layout(sessions(1))
