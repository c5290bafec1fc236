"""`headwater size`: estimates against full replays, the model and the samples by hand, and the words at the end."""

import json
import random
from array import array
from itertools import pairwise
from pathlib import Path

import pytest

import headwater.lab.size as sizing_module
from headwater.cli import run
from headwater.errors import ConfigError
from headwater.lab.distances import Weights, distances
from headwater.lab.replay import replay, run_grid
from headwater.lab.sample import Sampled, estimate, groups, parts, student
from headwater.lab.setup import Setup
from headwater.lab.size import Sampling, Size, Sizing, Step, advice, curve, round_up
from headwater.lab.tally import Ideal
from headwater.models.profiles import load_profile
from headwater.plan import CacheLayout
from headwater.traces.loads import make_arrivals
from headwater.traces.request import Request, Trace
from tests.lab.workload import workload

PROFILE = load_profile("qwen3.5-9b")
GB = 10**9


def sizing(trace: Trace, sampling: Sampling, **policies: str) -> Sizing:
    return Sizing(trace, Setup(PROFILE, 0, **policies), make_arrivals(trace), sampling)  # type: ignore[arg-type]


# ---- the whole


@pytest.mark.parametrize("documents", [0, 20])
def test_estimates_are_within_a_point_or_marked_as_uncertain(documents: int) -> None:
    estimator = sizing(workload(200, 3, documents), Sampling(rate=1 / 8, jobs=1))
    memories = [4 * GB, 8 * GB]
    estimates = estimator.sizes(memories)
    assert estimator.replayed_tokens < 0.6 * len(memories) * estimator.prompt_tokens
    full = estimator.replayed(memories)
    for one in estimates:
        assert one.rate == 1 / 8
        bound = 0.01 if not documents else max(0.01, one.error)  # half of all sessions are in 20 groups: few to draw
        assert one.error < 0.04
        assert one.hit_rate == pytest.approx(full[one.memory], abs=bound), f"{one.memory / GB:g} GB"
    assert 0.2 < full[4 * GB] < full[8 * GB] - 0.1, "sizes at which memory decides"


def test_a_rate_of_1_is_a_full_replay() -> None:
    trace = workload(40, 5)
    (one,) = sizing(trace, Sampling(rate=1, jobs=1)).sizes([2 * GB])
    row = replay(trace, Setup(PROFILE, 2 * GB, tails=False), make_arrivals(trace)).row
    assert (one.rate, one.error) == (1, 0)
    assert one.hit_rate == pytest.approx(row.token_hit_rate, abs=1e-6)
    assert sizing(trace, Sampling()).ideal == pytest.approx(row.ideal_hit_rate, abs=1e-6)


def test_wrong_sample_is_replayed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing_module, "TARGET_TOKENS", 1)  # sampled, however short it is
    monkeypatch.setattr(sizing_module, "MIN_GROUPS", 2)
    estimator = sizing(workload(60, 7), Sampling(samples=2, jobs=1), eviction="seglen")
    memories = [3 * GB, 6 * GB]
    assert all(estimator.parts_for(memory) > 1 for memory in memories)
    wrong = {memory: sizing_module.Estimate(0.5, 0.0, 0.1) for memory in memories}
    monkeypatch.setattr(estimator, "_sampled", lambda counts: wrong.items())
    full = estimator.replayed(memories)
    assert [(one.hit_rate, one.rate) for one in estimator.sizes(memories)] == [(full[memory], 1) for memory in memories]


def test_short_traces_and_small_sizes_are_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    short = sizing(workload(60, 7), Sampling())
    assert short.parts_for(1000 * GB) == 1
    monkeypatch.setattr(sizing_module, "TARGET_TOKENS", 1)
    monkeypatch.setattr(sizing_module, "MIN_GROUPS", 1)
    assert short.parts_for(1000 * GB) == 32  # of 60 groups, a power of two
    assert short.parts_for(GB) == 1  # a sixteenth of it has no room for two requests


def test_sizes_go_from_two_requests_to_all_that_is_of_use() -> None:
    trace = workload(60, 7)
    estimator = sizing(trace, Sampling())
    low, high = estimator.range()
    longest = max(request.known_tokens for request in trace.requests)
    assert 2 * longest * PROFILE.kv_bytes_per_token < low < high
    assert estimator.modelled(high) == pytest.approx(estimator.ideal, rel=0.002)


def test_impossible_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="samples are 1, error bars take at least 2"):
        Sampling(samples=1)
    with pytest.raises(ConfigError, match=r"4 samples of 0\.3 of the trace"):
        Sampling(rate=0.3)


# ---- the model

LAYOUT = CacheLayout(n_pages=1000, page_size=2, unit_tokens=2, unit_bytes=8, checkpoint_pages=10, slot_pages=10)


def asked(session: str, *ids: int, answered: int = 0, namespace: str = "") -> Request:
    """A request for all of these tokens but the last `answered`."""
    prompt = len(ids) - answered
    return Request(session, array("i", ids).tobytes(), prompt, answered, len(ids), namespace=namespace)


def test_hit_needs_memory_used_since_and_a_slot() -> None:
    first = asked("a", 1, 2, 3, 4)  # 2 pages, a checkpoint of 10
    other = asked("b", 5, 6, 7, 8, 9, 10)  # 3 and 10
    again = asked("a", 1, 2, 3, 4, 11, 12)
    model = distances(Trace("made", ()), LAYOUT, [first, other, again], checkpoints=1)
    assert (model.pages, model.tokens) == ([2 + 10 + 3 + 10 + 10], [4])
    assert (model.hits(34), model.hits(35)) == (0, 4)
    assert model.pages_for(1) == model.pages_for(4) == 35
    twice = distances(Trace("made", ()), LAYOUT, [first, other, again], checkpoints=1.5)
    assert twice.pages == [35 + 2 * 5]  # either request took half a checkpoint more


def test_shared_prefix_is_newer_than_its_continuations() -> None:
    requests = [asked("a", 1, 2, 3, 4), asked("b", 1, 2, 5, 6), asked("a", 1, 2, 3, 4, 7, 8)]
    model = distances(Trace("made", ()), LAYOUT, requests, checkpoints=1)
    # b finds 1 page, used by a: 2 pages, a checkpoint, a slot. Then a finds that page as b used it (with b's page and
    # checkpoint), and one more as it used it itself (with its own page and checkpoint).
    assert list(zip(model.pages, model.tokens, strict=True)) == [(22, 2), (22, 4), (33, 6)]


def test_model_with_endless_memory_reaches_ideal_hits() -> None:
    trace = workload(60, 11, documents=5)
    layout = Setup(PROFILE, GB).layout(trace)
    ideal = Ideal(trace, layout.unit_tokens)
    model = distances(trace, layout, trace.requests, checkpoints=1.6)
    assert model.ideal == sum(ideal.hit(request).ideal for request in trace.requests) > 0
    assert model.prompt_tokens == sum(request.prompt_tokens for request in trace.requests)
    assert model.pages == sorted(model.pages)


def test_weights_sum_to_the_added_tokens() -> None:
    rng, weights, plain = random.Random(1), Weights(37), [0] * 37
    for _ in range(300):
        position, weight = rng.randrange(37), rng.randint(-5, 9)
        weights.add(position, weight)
        plain[position] += weight
        start = rng.randrange(37)
        assert weights.since(start) == sum(plain[start:])
    assert weights.total == sum(plain)


# ---- the samples


STRANGERS = [asked(f"stranger {number}", 500 + 2 * number, 501 + 2 * number) for number in range(16)]


def test_sessions_group_by_document_and_not_by_system_prompt() -> None:
    requests = [asked(str(number), 1, 2, 100 + number // 3, 4, 1000 + number, 5) for number in range(30)]
    group_of = groups(requests, LAYOUT, 20)
    assert group_of == [number // 3 for number in range(30)]


def test_a_prefix_of_more_than_the_most_makes_no_group() -> None:
    requests = [asked(str(number), 1, 2, 100 + number // 5, 4, 1000 + number, 5) for number in range(30)]
    assert groups(requests, LAYOUT, 5) == [number // 5 for number in range(30)]
    assert groups(requests, LAYOUT, 4) == list(range(30))


def test_other_namespaces_and_partial_units_share_nothing() -> None:
    requests = [asked("a", 1, 2, namespace="x"), asked("b", 1, 2, namespace="y"), asked("c", 3), asked("d", 3)]
    assert groups(requests, LAYOUT, 20) == [0, 1, 2, 3]
    assert groups([asked("a", 1, 2), asked("b", 1, 2, 3), *STRANGERS], LAYOUT, 20)[:2] == [0, 0]


def test_groups_grow_through_sessions_that_share_with_both() -> None:
    requests = [asked("a", 1, 2), asked("b", 3, 4), asked("b", 1, 2, 5, 6), asked("c", 7, 8), asked("d", 3, 4, 9, 9)]
    assert groups([*requests, *STRANGERS], LAYOUT, 20)[:5] == [0, 0, 0, 1, 0]


STARTS = [*range(40), 3, 17]


def test_parts_are_as_crowded_as_the_trace_at_all_times() -> None:
    part_of = parts(STARTS, 8, seed=2)
    assert all(sorted(part_of[at : at + 8]) == list(range(8)) for at in range(0, 40, 8))
    assert part_of[40:] == [part_of[3], part_of[17]]
    assert part_of == parts(STARTS, 8, seed=2) != parts(STARTS, 8, seed=3)


def test_an_estimate_by_hand() -> None:
    # differences 10 of 100, 30 of 200, 0 of 100: 0.1 of all; left over 0, 10, -10
    found = estimate(0.5, [Sampled(100, 40, 30), Sampled(200, 130, 100), Sampled(100, 50, 50)], parts=12)
    assert found.hit_rate == pytest.approx(0.6)
    assert found.correction == pytest.approx(0.1)
    spread = (200 / 2 / 3) ** 0.5 / (400 / 3)
    assert found.error == pytest.approx(4.303 * spread * (1 - 3 / 12) ** 0.5)
    assert student(1) == 12.706
    assert student(30) == pytest.approx(2.042, rel=0.01)


# ---- the words


def test_advice_lists_the_hits_of_each_size() -> None:
    steps = [Step(GB * size, rate) for size, rate in ((10, 0.2), (17.2, 0.41), (33, 0.66), (43, 0.73), (60, 0.776))]
    assert advice(steps, ideal=0.8) == [
        "18 GB reach 51% of infinite memory's hits; 33 GB 82%; 43 GB 91%; 60 GB 97%.",
        "60 GB, the most that was tried, reach 97% of it.",
        "Twice as much as 43 GB would add 4.6 points of hit rate.",
    ]
    assert advice(steps, ideal=0.0) == ["Nothing in this traffic begins like anything before it: no memory would help."]
    assert [round_up(size) for size in (1.01 * GB, 99.1 * GB, 120 * GB)] == [1.1 * GB, 100 * GB, 120 * GB]


def test_between_sizes_the_curve_follows_the_model_and_never_falls() -> None:
    sizes = [Size(GB, 0.3, 0, 1, 0.2), Size(100 * GB, 0.5, 0, 1, 0.5)]
    steps = curve(sizes, lambda memory: 0.2 if memory < 30 * GB else 0.5)
    assert (steps[0].hit_rate, steps[-1].hit_rate) == (0.3, pytest.approx(0.5269, abs=1e-3))  # 0.5 once corrected
    assert {round(step.memory / GB, 3): step.hit_rate for step in steps}[10.0] == pytest.approx(0.3)
    assert all(low.hit_rate <= high.hit_rate for low, high in pairwise(steps))


# ---- the command


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    lines = []
    for request in workload(30, 9).requests:
        ids = array("i", request.text).tolist()
        prompt, output = ids[: request.prompt_tokens], ids[request.prompt_tokens : request.known_tokens]
        lines.append(json.dumps({"t": request.at, "session": request.session, "input": prompt, "output": output}))
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_the_command_prints_a_table_and_advice_and_writes_both(
    recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    options = ["--from", "1GB", "--to", "4GB", "--points", "3", "--rate", "0.25", "--check", "--jobs", "1"]
    assert run(["size", str(recorded), *options, "--json", str(out)]) == 0
    printed = capfd.readouterr().out
    told = json.loads(out.read_text())
    assert [one["memory"] for one in told["sizes"]] == [GB, 2 * GB, 4 * GB]
    assert all(0 <= one["full_hit_rate"] <= told["ideal_hit_rate"] and one["rate"] == 0.25 for one in told["sizes"])
    assert all(line in printed for line in told["advice"])
    assert "of infinite memory's hits" in told["advice"][0]
    assert "3 of 3 sizes from 4 samples each" in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "often"], "--rate is 'often', must be auto or a number above 0 and up to 1"),
        (["--from", "4GB", "--to", "2GB"], "sizes from 4,000,000,000 to 2,000,000,000 bytes"),
        (["--from", "1MB"], "--from is 1,000,000 bytes, must be at least"),
        (["--eviction", "newest"], "newest"),
        (["--samples", "3", "--rate", "0.5"], "3 samples of 0.5 of the trace each"),
    ],
)
def test_impossible_request_is_an_error_of_one_line(
    recorded: Path, capfd: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert run(["size", str(recorded), *options]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("headwater: ")
    assert message in error


def test_a_pilot_decides_which_samples_are_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing_module, "TARGET_TOKENS", 1)
    monkeypatch.setattr(sizing_module, "MIN_GROUPS", 1)
    estimator = sizing(workload(60, 7), Sampling(samples=2, jobs=1))
    memories = [20 * GB, 40 * GB, 80 * GB]
    tried = []

    def sampled(counts: dict[int, int]) -> list[tuple[int, sizing_module.Estimate]]:
        ((memory, count),) = counts.items()
        tried.append(count)
        truth = estimator.replayed([memory])[memory]
        return [(memory, sizing_module.Estimate(truth + (0.02 if count > 4 else 0.0), 0.0, 0.0))]

    monkeypatch.setattr(estimator, "_sampled", sampled)
    found = estimator.forecast(memories)
    assert tried == sorted(tried, reverse=True)
    assert tried[-1] == 4
    assert set(found.counts.values()) == {4}
    assert 0 < found.seconds <= found.most
    assert found.sampled == 3


def test_trace_without_a_good_sample_is_replayed_with_its_time_reported(
    recorded: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--from", "1GB", "--to", "4GB", "--points", "3", "--jobs", "1"]
    assert run(["size", str(recorded), *options]) == 0
    told = capfd.readouterr()
    assert "all 3 sizes are replayed in full" in told.err
    assert "about" in told.err
    assert "all 3 sizes were replayed in full, " in told.out


def test_a_sizing_that_was_cut_short_continues(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["size", str(recorded), "--from", "1GB", "--to", "4GB", "--points", "3", "--jobs", "1"]
    command += ["--json", str(tmp_path / "out.json")]
    ran = []

    def counted(trace: Trace, setups: list[Setup], *others: object, **more: object):
        for number, result in run_grid(trace, setups, *others, **more):  # type: ignore[arg-type]
            ran.append(setups[number].memory)
            yield number, result
            if len(ran) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(sizing_module, "run_grid", counted)
    assert run(command) == 130
    assert run(command) == 0
    assert sorted(ran) == [GB, 2 * GB, 4 * GB]
    assert "2 replays of an earlier run are used again" in capfd.readouterr().err
    assert not list(tmp_path.glob(".*.unfinished"))
