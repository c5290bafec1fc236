"""Every table of a command at 80, 100 and 140 columns, held to the checked-in texts in `tables/`.

TABLES=write pytest tests/cli/test_table_widths.py writes them again. Wide figures are used, as a long run has them.
"""

import importlib.util
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from headwater.account import Reason
from headwater.cli import doctor, downloads, inspect, replay_tables, report, size
from headwater.evaluate import tables
from headwater.evaluate.divergence import Divergence
from headwater.evaluate.perplexity import Perplexity
from headwater.evaluate.summary import Comparison, Estimate, Summary
from headwater.lab.cost import DEVICES, StepCost
from headwater.lab.fidelity import figures
from headwater.lab.fidelity.figures import Deviation, Distance, MeanFidelity
from headwater.lab.fit import Observation, Point, fit, observe, prefill_loads
from headwater.lab.report.day import Day
from headwater.lab.row import Routing, Row, Segments, Share, Spread
from headwater.lab.setup import Setup
from headwater.lab.size import Size
from headwater.load import report as load_report
from headwater.load.results import Result, Slo
from headwater.load.results import Summary as LoadSummary
from headwater.load.scenario import Phase
from headwater.models.families import read_folder
from headwater.models.files import embedded
from headwater.models.profiles import PROFILES
from headwater.table import Table
from headwater.traces.request import Trace
from papers import FIGURES
from papers.__main__ import _table as figure_table

WIDTHS = (80, 100, 140)
FROZEN = Path(__file__).parent / "tables"
DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
FIGURE = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?%?")


def of_bench() -> Iterator[Table]:
    """Tables of a run whose answers took minutes, with refusals and two tenants."""
    results = [
        Result(
            number=n, session=f"s{n}", turn=0, tenant=("quiet", "noisy neighbour")[n % 2],
            outcome="refused" if n % 17 == 0 else "ok", due=n * 1.5, sent=n * 1.5, ended=n * 1.5 + 1146.25,
            detail="queue_full: 256 requests are waiting, at most 256 may" if n % 17 == 0 else "",
            ttft=None if n % 17 == 0 else 26.5 + 10 * n, gaps=(1.25, 2.5) * (n % 17 > 0),
            prompt_tokens=131_072, cached_tokens=98_304, output_tokens=1024, reason=("full", "no_checkpoint")[n % 2],
        )
        for n in range(100)
    ]  # fmt: skip
    phase = Phase("overload 4x", "open loop, gamma arrivals of 12.5 requests a second, cv 2", results)
    yield from load_report.phase_tables(phase, Slo())
    yield load_report.comparison_table("phase", {"closed loop": LoadSummary.of(results, Slo())})


def of_models() -> Iterator[Table]:
    spec = read_folder(embedded())
    yield from (inspect.cost_table(spec), inspect.flops_table(spec), inspect.sizes_table(list(PROFILES.values())))
    profile = PROFILES["kimi-linear-48b-a3b"]
    yield from (inspect.layers_table(profile), inspect.profile_flops_table(profile))
    yield inspect.sources_table([profile, PROFILES["marconi-7b"]])
    cost = StepCost(PROFILES["qwen3.5-9b"], DEVICES["l4"])
    lengths = range(40, 120_000, 9000)
    seconds = {n: sum(map(cost.seconds, prefill_loads(Point(n, n // 3, 1.0), 1024))) for n in lengths}
    points: list[Observation] = observe([Point(n, n // 3, seconds[n]) for n in lengths], 1024)
    fitted = fit(PROFILES["qwen3.5-9b"], DEVICES["l4"], points)
    yield from (inspect.parameters_table(fitted), inspect.residuals_table(fitted))


def of_a_day() -> Iterator[Table]:
    yield downloads.fitting_table(16 * 10**9)
    misses = {reason.value: 12_345_678 // n for n, reason in enumerate(Reason, 1)}
    yield report.misses_table(Day("day.trace", "2031-05-01", 123_456_789, 1, 1, misses, ()))


def of_evaluation() -> Iterator[Table]:
    wide = Estimate(0.3333, 0.0, 1.0)
    summary = Summary(1200, 300, wide, wide, wide, 12, 12_345_678, 9_876_543)
    slices: Any = {
        "all": {"": summary},
        "kind": {kind: summary for kind in ("single", "two_hop", "absent", "persona", "tool")},
        "documents": {n: summary for n in (0, 4, 16)},
        "context": {n: summary for n in (256, 16_384)},
    }
    yield tables.sliced_table("served", slices)
    comparison = Comparison(1200, 1195, 1190, Estimate(-0.0125, -0.105, 0.0875), 12_345_678, 9_876_543)
    yield tables.comparison_table("cold", {"prefix, again": comparison, "composed, balanced": comparison})
    yield tables.perplexity_table(1024, {"http://192.168.100.200:8000": Perplexity(12_345_678, 45_678_901, 3e7)})
    divergence = Divergence(12_345, Estimate(1.23e-05, 1.01e-05, 1.44e-05), 1e-6, 1.23e-4, 12.3, 12_300, {"x": 12})
    yield tables.divergence_table("http://192.168.100.200:8000", divergence)
    far = Distance(1.23e-2, 12.34)
    means = {
        name: MeanFidelity(8, 0.123, 1.2345, 0.875, {0: far, 23: far}, {3: {"keys": far, "values": far}})
        for name in ("fast", "balanced", "careful", "exact", "prefix only")
    }
    yield from (figures.means_table(means), figures.states_table(means), figures.kept_table(means))
    yield figures.deviations_table({3: Deviation(1.23e-1, 1.23e-4, 1.23e-2)}, 8)


def row(**changed: Any) -> Row:
    told: dict[str, Any] = {
        "memory": 1_235 * 10**8, "pool": "elastic", "placement": "structural", "eviction": "seglen(w=0.5)",
        "requests": 20_163, "prompt_tokens": 407_123_456, "hit_tokens": 1, "token_hit_rate": 0.9876,
        "ideal_hit_rate": 0.9912, "stranded_tokens": 123_456_789, "flops_saved": 1.0, "flops_saved_share": 0.9912,
        "checkpoints_taken": 123_456, "checkpoints_hit": 98_765, "evictions": {}, "misses_by_reason": {},
        "ttft_ms": Spread(1, 1, 123_456.0, 1_234_567.0, 1), "queue_depth": 1234.56, "alpha": None, "seconds": 1234.5,
        "peak_rss_mb": 1.0,
    }  # fmt: skip
    return Row(**told | changed)


def of_the_lab() -> Iterator[Table]:
    segments = Segments("both", "cost", 10**8, 10**7, 10**6, 10**6, 1, 1, 1, 1)
    trace = Trace("mini_swe_agent", (), notes=("pages of 64 tokens: only full ones count",))
    for rows in ([row(), row(eviction="lru", pool="unified")], [row(segments=segments, recomputed_tokens=123_456)]):
        results: Any = [SimpleNamespace(row=one) for one in rows]
        yield replay_tables.results_table(trace, PROFILES["qwen3.5-9b"], results)
    rules = ("least_cost", "approximate_tree(cache_threshold=0.7, balance_abs_threshold=8)")
    shares = tuple(Share(12_345, 0.9876) for _ in range(16))
    routed = [row(cluster=Routing(rule, 0.001, shares, 123_456, 12_345, 12_345, 1_234, 1_234)) for rule in rules]
    clustered: Any = [SimpleNamespace(row=one) for one in routed]
    yield from (replay_tables.results_table(trace, PROFILES["qwen3.5-9b"], clustered),)
    yield from replay_tables.cluster_tables(clustered)
    sizing: Any = SimpleNamespace(trace=trace, setup=Setup(PROFILES["qwen3.5-9b"], 0), ideal=0.9912)
    sizes = [Size(10**9, 0.1234, 0.012, 1 / 16, 0.1), Size(2_345 * 10**9, 0.9876, 0.0, 1.0, 0.9)]
    yield size._table(sizing, sizes, {10**9: 0.1357})


def of_the_doctor() -> Iterator[Table]:
    findings = (
        ("cpu", "ok", "AMD EPYC 9R14 96-Core Processor: avx2, avx512f, avx512bw, avx512_bf16", ""),
        ("memory", "FAIL", "135.1 GB in all, 97.3 GB available; --memory 5000.0 GB", "--memory is too large"),
        ("products in bfloat16", "ok", "1024x3072: 1,234 GFLOP/s at 256 rows, 12,345 products/s at 1 row", ""),
    )
    yield doctor.table_of([doctor.Finding(name, level, value, advice) for name, level, value, advice in findings])


def of_figures() -> Iterator[Table]:
    rows = [{"label": "LMSys, 60 GB, P95 of the time to first token", "paper": 12.5, "ours": 123456.7, "unit": "ms"}]
    shapes = [{"says": "SegLen is ahead of LRU at every size of memory", "holds": True}]
    yield figure_table(FIGURES["marconi-11"], {"rows": rows, "shapes": shapes, "seconds": 1234.5})


BUILT = {
    "bench": of_bench,
    "models": of_models,
    "day": of_a_day,
    "evaluation": of_evaluation,
    "lab": of_the_lab,
    "doctor": of_the_doctor,
    "figures": of_figures,
}


def printed(found: Any, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(found)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def held_to(name: str, text: str) -> None:
    frozen = FROZEN / f"{name}.txt"
    if os.environ.get("TABLES") == "write":
        frozen.parent.mkdir(exist_ok=True)
        frozen.write_text(text, encoding="utf-8")
    assert text == frozen.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", BUILT)
def test_tables_fit_and_cut_no_figure(name: str, width: int) -> None:
    texts = []
    for table in BUILT[name]():
        text = printed(table, width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        figures = (str(cell) for column in table.columns for cell in column.cells)
        shown = set(FIGURE.findall(text))
        assert {figure for cell in figures for figure in FIGURE.findall(cell)} <= shown
        texts.append(text)
    held_to(f"{name}-{width}", "\n".join(texts))


@pytest.mark.parametrize("width", WIDTHS)
def test_demo_takes_a_few_lines_a_request(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEMO.parent))
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    demo: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    monkeypatch.setitem(__import__("sys").modules, "demo", demo)
    spec.loader.exec_module(demo)  # type: ignore[union-attr]
    out = io.StringIO()
    monkeypatch.setattr(demo, "console", Console(file=out, width=width))
    account = {"prompt_tokens": 12_345, "cached_tokens": 11_264, "reason": "no_checkpoint", "segments": 0}
    question = "In which room does the thing stand that Berta Wesworth owns?"
    answers = (("the back barn", "the back barn"), ("It is not in the documents [1].", "MK-227"), ("Hello.", None))
    demo.report([demo.Asked("growing chat", question, answer, right, 12.345, account) for answer, right in answers])
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 2 + 4 * len(answers) + 3
    assert out.getvalue().count("12,345 tokens, 11,264 cached (91%, no_checkpoint), first token") == 3
    held_to(f"demo-{width}", "\n".join(line.rstrip() for line in lines) + "\n")


def test_table_becomes_records_if_a_column_fits_next_to_no_label() -> None:
    table = Table("wide", ("name",), ("bytes",), ("note",))
    table.add_row("x" * 30, "1,234,567", "see https://example.org/" + "a" * 30)
    assert "┃" not in printed(table, 50)
    assert printed(table, 60).splitlines()[1:3] == ["x" * 30, "  bytes 1,234,567"]


def test_rows_may_be_short_and_sections_are_kept_in_each_part() -> None:
    table = Table(None, ("name",), [f"figure {n}" for n in range(12)])
    for number in (1, 2):
        table.add_row(f"row {number}", *("1,000,000" for _ in range(6 * number)))
        table.add_section()
    text = printed(table, 80)
    assert text.count("row 2") == text.count("row 1") == 3
    assert text.count("1,000,000") == 18
