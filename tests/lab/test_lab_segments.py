"""Prompts made of segments in the lab: three methods of reuse, counted by hand, storage and eviction."""

from dataclasses import replace

import pytest

from headwater.errors import ConfigError
from headwater.lab.cost import StepCost, load_device, load_of
from headwater.lab.replay import replay
from headwater.lab.report import write_report
from headwater.lab.row import Result
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.plan import Build, Composed, Plan, Run
from headwater.request import Boundaries, Fidelity, Generation, SamplingParams, SegmentEviction, Span
from headwater.schedule.kinds.request import Request as Answered
from headwater.schedule.step import Leg, Step
from headwater.traces.arrivals import Poisson, natural
from headwater.traces.read import make_trace
from headwater.traces.request import Request, Trace
from tests.lab.workload import Texts

RING = load_profile("ring-mini-linear-2.0")
AMPLE = Setup(RING, 40 * 10**9)
LEAD, QUESTION, ANSWER, SEAM = 128, 70, 30, 8
LENGTHS = (200, 300)
MADE = sum(length - SEAM for length in LENGTHS)
INTERIORS = sum(length - 2 * SEAM for length in LENGTHS)
WAYS = ("prefix", "segments", "both")


@pytest.fixture
def trace() -> Trace:
    """Two documents in both orders, then the next question of the first session."""
    texts = Texts()
    lead, documents = texts.new(LEAD), [texts.new(length) for length in LENGTHS]
    requests = []
    for session, order in enumerate((documents, documents[::-1])):
        ids, spans = lead[:], []
        for document in order:
            spans.append(Span(len(ids), len(ids) + len(document)))
            ids += document
        for turn in range(2 - session):
            asked = len(ids) if turn else LEAD
            ids += texts.new(QUESTION)
            parts = Boundaries(LEAD, asked, len(ids) - 1)
            ids += texts.new(ANSWER)
            known = len(ids) - ANSWER, ANSWER, len(ids)
            made = Request(str(session), b"", *known, 100.0 * turn + session, None, parts, "", tuple(spans))
            requests.append((made, ids[:]))
    read = [replace(made, text=ids.tobytes(), fidelity=Fidelity.FAST) for made, ids in requests]
    return Trace("made", [read[0], read[2], read[1]])


def run(trace: Trace, setup: Setup, load=None, engine: Engine | None = None) -> Result:
    return replay(trace, setup, (load or natural(trace)).over(trace, 0), engine)


def test_each_reuse_method_counts_its_tokens(trace: Trace) -> None:
    found = {way: run(trace, replace(AMPLE, reuse=way)) for way in WAYS}
    resumed = {way: [one.resumed_at for one in result.outcomes] for way, result in found.items()}
    composed = {way: [one.composed_tokens for one in result.outcomes] for way, result in found.items()}
    end = LEAD + sum(LENGTHS) + QUESTION + ANSWER
    known = end // 64 * 64  # prompts with segments resume at pages
    assert resumed == {"prefix": [0, LEAD, end], "segments": [0, LEAD, LEAD], "both": [0, LEAD, known]}
    assert composed == {"prefix": [0, 0, 0], "segments": [INTERIORS] * 3, "both": [INTERIORS, INTERIORS, 0]}
    made = {way: result.row.segments.made_tokens for way, result in found.items()}
    assert made == {"prefix": 0, "segments": MADE, "both": MADE}
    seams = {way: [one.seam_tokens for one in result.outcomes] for way, result in found.items()}
    assert seams["both"] == [4 * SEAM, 4 * SEAM, 0]
    for way, result in found.items():
        row = result.row
        assert row.hit_tokens == sum(resumed[way]) + sum(composed[way]) - made[way]
        assert row.token_hit_rate == round(row.hit_tokens / row.prompt_tokens, 6)
        assert row.segments.stored == (0 if way == "prefix" else 2)
        assert row.segments.uses == {"prefix": 0, "segments": 6, "both": 4}[way]


def test_saved_flops_are_interiors_in_place_less_builds(trace: Trace) -> None:
    first = replace(trace, requests=trace.requests[:1])
    row = run(first, AMPLE).row
    flops = RING.flops.between
    saved = sum(flops(span.start + SEAM, span.end - SEAM) for span in first.requests[0].segments)
    spent = sum(flops(0, length - SEAM) for length in LENGTHS)
    assert row.flops_saved == pytest.approx(saved - spent, rel=1e-12)


def test_prefix_reuse_equals_a_trace_without_segments(trace: Trace) -> None:
    """The scheduler's hits equal the planner's."""
    drawn = make_trace("rag(sessions=60, documents=40, turns=2)")
    for one in (trace, drawn):
        plain = replace(one, requests=[replace(request, segments=()) for request in one.requests])
        for memory in (2 * 10**9, 40 * 10**9):
            marked = run(one, replace(AMPLE, memory=memory, reuse="prefix"))
            bare = run(plain, replace(AMPLE, memory=memory))
            assert marked.outcomes == bare.outcomes
            assert marked.row.evictions == bare.row.evictions
            assert bare.row.segments is None


def test_only_leading_parts_are_cached(trace: Trace) -> None:
    alone, both = (run(trace, replace(AMPLE, reuse=way)).held[-1] for way in ("segments", "both"))
    assert alone.kv == LEAD // 64
    assert both.kv > alone.kv
    assert both.segments == alone.segments > 0


@pytest.mark.parametrize("way", ["segments", "both"])
@pytest.mark.parametrize("eviction", list(SegmentEviction))
def test_short_memory_evicts_segments_and_builds_them_again(way: str, eviction: SegmentEviction) -> None:
    drawn = make_trace("rag(sessions=60, documents=100, most=8)")
    rows = {
        memory: run(drawn, Setup(RING, memory, reuse=way, segment_eviction=eviction)).row
        for memory in (10**9, 40 * 10**9)
    }
    scarce, ample = (rows[memory].segments for memory in rows)
    assert ample.evicted == 0
    assert scarce.evicted > 0
    assert scarce.made_tokens > ample.made_tokens
    assert scarce.bytes <= 10**9
    assert (scarce.eviction, scarce.reuse) == (eviction, way)


@pytest.mark.parametrize("memory", [5 * 10**8, 10**9, 2 * 10**9])
def test_short_memory_favours_segments_that_save_most_over_young_ones(memory: int) -> None:
    drawn = make_trace("rag(sessions=60, documents=100, most=8)")
    age, cost = (run(drawn, Setup(RING, memory, segment_eviction=way)).row.token_hit_rate for way in SegmentEviction)
    assert cost > age + 0.03
    assert run(drawn, Setup(RING, memory)).row.token_hit_rate == cost, "it is the default"


def test_share_of_segments_is_hard_in_a_split_pool_only() -> None:
    drawn = make_trace("rag(sessions=60, documents=100, most=8)")
    memory = 4 * 10**9
    soft = Setup(RING, memory, reuse="segments", segment_share=0.2)
    hard = replace(soft, pool="split", state_fraction=0.7)
    most = {setup.pool: max(held.segments for held in run(drawn, setup).held) for setup in (soft, hard)}
    share = round(0.2 * soft.layout(drawn).n_pages)
    assert most["split"] <= share < most["unified"]


def test_under_a_clock_warm_segments_take_less_time(trace: Trace) -> None:
    engine = Engine(StepCost(RING, load_device("h100")))
    drawn = make_trace("rag(sessions=80, documents=20, most=8, tokens=2000)")
    prefix, both = (run(drawn, replace(AMPLE, reuse=way), Poisson(0.5), engine).row for way in ("prefix", "both"))
    assert both.ttft_ms.p50 < prefix.ttft_ms.p50
    by_clock, alone = (run(trace, AMPLE, engine=one).row.segments for one in (engine, None))
    assert by_clock == alone


def test_composing_step_costs_its_computation_and_its_bytes() -> None:
    """A leg [64, 400) whose 200 tokens from 108 on are taken from a segment, and one that ends a segment."""
    runs = Run(64, 108, ()), Run(308, 400, (0,))
    composing = Plan(1, 1, 64, 400, (), (), 0, (), composed=(Composed(100, 8, 208, (), (), ()),), runs=runs)
    making = Plan(2, 2, 0, 300, (), (), 0, (), build=Build(8, (), (), True))
    step = Step(
        tuple(Leg(Answered(plan.id, Generation((), SamplingParams())), plan) for plan in (composing, making)), ()
    )
    load = load_of(step)
    assert load.prefill_tokens == (108 - 64) + (400 - 308) + 300
    assert load.prefill_squares == 108**2 - 64**2 + 400**2 - 308**2 + 300**2
    assert (load.prefix_tokens, load.moved_tokens, load.segments) == (64 + 200, 200, 2)
    cost = StepCost(RING, load_device("h100"))
    still = replace(load, moved_tokens=0, segments=0)
    moved = 2 * 200 * RING.kv_bytes_per_token + 2 * (RING.checkpoint_bytes + RING.transition.bytes)
    assert cost.sides(load)[1] - cost.sides(still)[1] == pytest.approx(moved / (0.8 * load_device("h100").bandwidth))


def test_clairvoyant_policy_is_refused_with_segments(trace: Trace) -> None:
    with pytest.raises(ConfigError, match="segments"):
        run(trace, replace(AMPLE, eviction="clairvoyant"))


def test_a_model_that_cannot_compose_computes_segments_as_text(trace: Trace) -> None:
    row = run(trace, Setup(load_profile("marconi-7b"), 40 * 10**9)).row
    assert (row.segments.composed_tokens, row.segments.made_tokens) == (0, 0)
    assert row.hit_tokens > 0


def test_without_a_cache_nothing_is_made(trace: Trace) -> None:
    row = run(trace, replace(AMPLE, eviction="none")).row
    assert (row.hit_tokens, row.segments.made_tokens) == (0, 0)


def test_request_larger_than_memory_is_refused_and_others_continue(trace: Trace) -> None:
    small = RING.bytes_of_page(64) * (12 + 2 * RING.layout(10**9).checkpoint_pages)
    drawn = make_trace("rag(sessions=5, documents=20, tokens=40, most=4)")
    both = replace(trace, requests=[*drawn.requests, replace(trace.requests[0], session="x", at=None)])
    long = [replace(request, prompt_tokens=1 << 20, output_tokens=0) for request in drawn.requests[:1]]
    outcomes = run(replace(both, requests=[*long, *both.requests[1:]]), Setup(RING, small)).outcomes
    assert [one.reason for one in outcomes].count("too_large") == 1


def test_the_report_has_columns_and_a_use_of_memory_for_segments(trace: Trace, tmp_path) -> None:
    page = tmp_path / "report.html"
    write_report(page, "made", "ring", (), [run(trace, replace(AMPLE, reuse=way)) for way in WAYS])
    text = page.read_text()
    for said in ("Composed tokens", "Made tokens", "Seam tokens", "both, cost", "Segments"):
        assert said in text
