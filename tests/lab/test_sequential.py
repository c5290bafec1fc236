"""Requests one by one: what they hit, counted by hand; and the bound that no policy passes."""

from array import array
from dataclasses import replace

import pytest

from headwater.lab.replay import replay
from headwater.lab.row import Result
from headwater.lab.setup import SYSTEMS, Setup
from headwater.models.profiles import load_profile
from headwater.traces.loads import make_arrivals
from headwater.traces.request import Request, Trace

PROFILE = load_profile("marconi-7b")  # 65,536 bytes of KV a token, 409 pages of one token a checkpoint
PAGE = 16
CHECKPOINT_PAGES = -(-PROFILE.checkpoint_bytes // (PAGE * PROFILE.kv_bytes_per_token))


def ids(*runs: tuple[int, int]) -> bytes:
    """Token ids: (first, count) of each run; runs with other first ids share nothing."""
    return b"".join(array("i", range(1000 * first, 1000 * first + count)).tobytes() for first, count in runs)


def chat(name: str, system: int, turns: int, said: int = 40, answer: int = 24) -> list[Request]:
    """A session whose turns append to each other, after a system prompt of 64 tokens that others may share."""
    number = sum(map(ord, name))
    text = ids((system, 64), *((number * 10 + turn, said + answer) for turn in range(turns)))
    ends = [64 + turn * (said + answer) + said for turn in range(turns)]
    return [Request(name, text, end, answer, end + answer, at=float(i)) for i, end in enumerate(ends)]


def run(requests: list[Request], pages: int = 10_000, **changes: object) -> Result:
    setup = Setup(PROFILE, pages * PAGE * PROFILE.kv_bytes_per_token, page_size=PAGE)
    trace = Trace("made", requests)
    return replay(trace, replace(setup, **changes), make_arrivals(trace))  # type: ignore[arg-type]


def hits(result: Result) -> list[int]:
    return [outcome.resumed_at for outcome in result.outcomes]


def test_a_chat_resumes_where_its_last_answer_ended() -> None:
    result = run(chat("a", 1, turns=4))
    ends = [64 + 64 * turn for turn in range(1, 4)]  # whole pages of prompt and answer before each turn
    assert hits(result) == [0, *ends]
    assert result.row.token_hit_rate == pytest.approx(sum(ends) / (104 + 168 + 232 + 296), abs=1e-6)
    assert result.row.hit_tokens == result.row.prompt_tokens * result.row.token_hit_rate == pytest.approx(sum(ends))
    assert result.row.token_hit_rate == result.row.ideal_hit_rate
    assert result.row.misses_by_reason == {"cold": 1, "diverged": 3}


def test_a_shared_prefix_hits_on_its_second_request() -> None:
    sessions = [replace(chat(name, 1, turns=1)[0], at=float(at)) for at, name in enumerate("abc")]
    assert hits(run(sessions)) == [0, 64, 64]
    assert hits(run(sessions, placement="branch")) == [0, 0, 64]  # Marconi: from the third on


def test_unknown_answers_are_not_cached() -> None:
    known = chat("a", 1, turns=2)
    unknown = [replace(request, known_tokens=request.prompt_tokens) for request in known]
    assert hits(run(known)) == [0, 128]
    assert hits(run(unknown)) == [0, 104]  # the end of the first prompt
    assert hits(run(known, decode_reuse="none")) == [0, 104]
    assert hits(run(unknown, tails=False)) == [0, 96]  # its last page


def test_answer_within_the_prompts_last_page_is_resumed() -> None:
    short = chat("a", 1, turns=2, said=40, answer=4)  # 104 and 4 tokens: both end within page 7, at 96
    for placement in ("branch", "structural", "every_block(1)"):
        assert hits(run(short, placement=placement)) == [0, 108]
        assert hits(run(short, placement=placement, tails=False)) == [0, 96]


def test_kv_without_checkpoints_hits_nothing() -> None:
    row = run(chat("a", 1, turns=3), placement="none").row
    assert (row.hit_tokens, row.checkpoints_taken) == (0, 0)
    assert row.stranded_tokens > 0


def test_blocks_stand_in_answers_too() -> None:
    result = run(chat("a", 1, turns=2), placement="every_block(3)")  # 48, 96 in the prompt, and 144 is beyond 128
    assert hits(result) == [0, 104]  # a tail after 96
    assert result.row.checkpoints_taken == 2 + 2  # and 144, 192 of the second, which ends at 192


def test_without_a_cache_nothing_hits() -> None:
    row = run(chat("a", 1, turns=3), eviction="none").row
    assert (row.hit_tokens, row.flops_saved, row.checkpoints_taken) == (0, 0, 0)
    assert row.misses_by_reason == {"cache_off": 3}
    assert row.ideal_hit_rate > 0


def test_flops_saved_are_those_of_the_tokens_that_were_not_computed() -> None:
    result = run(chat("a", 1, turns=3))
    flops = PROFILE.flops
    assert result.row.flops_saved == sum(flops.between(0, hit) for hit in hits(result))
    everything = sum(flops.between(0, outcome.prompt_tokens) for outcome in result.outcomes)
    assert result.row.flops_saved_share == pytest.approx(result.row.flops_saved / everything, abs=1e-6)


def test_request_that_does_not_fit_is_counted_and_others_continue() -> None:
    big = Request("big", ids((9, 60 * PAGE)), 59 * PAGE, 8, 59 * PAGE + 8, at=0.5)
    small = chat("a", 1, turns=2)
    result = run([small[0], big, small[1]], pages=CHECKPOINT_PAGES + 40)
    assert [outcome.reason for outcome in result.outcomes][1] == "too_large"
    assert result.row.misses_by_reason["too_large"] == 1
    assert result.row.requests == 3


def test_unused_checkpoints_are_counted_apart() -> None:
    result = run(chat("a", 1, turns=3), placement="branch")
    assert result.reuse == {0: 1, 1: 2}  # the end of each answer; the last one was not used
    assert (result.row.checkpoints_taken, result.row.checkpoints_hit) == (3, 2)


@pytest.mark.parametrize("name", [*SYSTEMS])
@pytest.mark.parametrize("pages", [CHECKPOINT_PAGES * 6, 10_000])
def test_no_system_passes_the_ideal(name: str, pages: int) -> None:
    requests = sorted((r for s in "abcdefgh" for r in chat(s, ord(s) % 2, turns=4)), key=lambda r: (r.at, r.session))
    system = SYSTEMS[name]
    result = run(requests, pages, placement=system.placement, eviction=system.eviction)
    assert all(outcome.resumed_at <= outcome.ideal < outcome.prompt_tokens for outcome in result.outcomes)
    assert result.row.requests == 32


def test_the_same_run_gives_the_same_row() -> None:
    requests = [r for s in "abcd" for r in chat(s, 1, turns=3)]
    rows = [replace(run(requests, 100).row, seconds=0.0, peak_rss_mb=0.0) for _ in range(2)]
    assert rows[0] == rows[1]


def test_samples_of_memory_add_up() -> None:
    result = run([r for s in "abcd" for r in chat(s, 1, turns=3)], pages=120)
    assert result.held
    for held in result.held:
        assert held.kv + held.checkpoints + held.stranded + held.private + held.free + held.tails == 120


def test_recorded_blocks_count_whole_ones_only() -> None:
    text = array("q", range(10)).tobytes()
    requests = [Request(str(i), text, 5 * 512 - 100, 10, 5 * 512 - 100, at=float(i)) for i in range(3)]
    trace = Trace("blocks", requests, block_tokens=512)
    setup = Setup(PROFILE, 4 * 10**9, page_size=64)
    result = replay(trace, setup, make_arrivals(trace))
    assert hits(result) == [0, 4 * 512, 4 * 512]
    assert result.row.ideal_hit_rate == result.row.token_hit_rate
    assert (result.row.tails, result.row.recomputed_tokens) == (False, 0)


def test_known_tokens_of_the_page_where_prompts_part_count_as_recomputed() -> None:
    first = Request("a", ids((1, 110)), 110, 1, 110, at=0.0)
    parts = Request("b", ids((1, 100), (2, 60)), 160, 1, 160, at=1.0)  # after 4 tokens of the page from 96
    again = replace(first, session="c", at=2.0)
    with_tails, without = run([first, parts, again]), run([first, parts, again], tails=False)
    assert hits(without) == [0, 96, 96]
    assert [one.recomputed_tokens for one in without.outcomes] == [0, 4, 14]
    assert without.row.recomputed_tokens == 18
    assert hits(with_tails) == [0, 100, 110]
    assert with_tails.row.recomputed_tokens == 0


def test_recorded_pages_with_segments_have_no_tails() -> None:
    """All tokens of a recorded page have one id, so ids say nothing of where prompts part within it."""
    setup = Setup(PROFILE, 10**9, page_size=PAGE)
    trace = Trace("made", chat("a", 1, turns=2))
    assert setup.layout(trace).tail_pages
    assert not setup.layout(replace(trace, has_token_ids=False)).tail_pages


def test_split_pools_and_published_systems_have_no_tails() -> None:
    assert not run(chat("a", 1, turns=2), pool="split").row.tails
    assert [name for name, known in SYSTEMS.items() if known.tails] == ["headwater"]
