"""The report: every figure of every row stands in it, whatever names and runs it is made of."""

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from headwater.chart import Shape, round_steps
from headwater.lab.report import environment, write_report
from headwater.lab.report.lines import Lines
from headwater.lab.row import Result, Row, Spread
from headwater.lab.tally import Held, Outcome
from tests.browser import chromium

EVIL = "</script><img src=x onerror=document.title='broken'>\"'&"
POLICIES = (("structural", "lru"), ("structural", "seglen(w=0.85)"), ("branch", "marconi"), ("none", "none"))
REASONS = ("full", "cold", "diverged", "no_checkpoint", "evicted")
VOID = frozenset({"meta", "link", "input", "br"})  # elements without an end
SECTIONS = ("rows", "memory", "ttft", "length", "held", "reasons", "reuse", "notes")


def outcomes(n, salt=0, timed=True):
    """Prompts of 100 to 50,000 tokens; a fixed sequence."""
    made = []
    for i in range(n):
        prompt = 100 + (i * 7919 + salt) % 49_901
        hit = prompt * ((i * 31 + salt) % 80) // 100
        reason = REASONS[(i + salt) % len(REASONS)]
        ttft = 0.02 + (prompt - hit) / 20_000 if timed else None
        made.append(Outcome(i, f"s{i % 9}", prompt, 10, hit, hit // 10, reason, prompt * 9 // 10, ttft, float(i)))
    return tuple(made)


def result(memory, placement, eviction, requests, pool="unified", **fields):
    """A row that goes with its requests."""
    prompts, hits = sum(one.prompt_tokens for one in requests), sum(one.resumed_at for one in requests)
    times = [one.ttft for one in requests if one.ttft is not None]
    reuse = {0: 5_213, 1: 300, 2: 41, 3: 40, 9: 7} if requests else {}
    row = Row(
        memory=memory,
        pool=pool,
        placement=placement,
        eviction=eviction,
        requests=len(requests),
        prompt_tokens=prompts,
        hit_tokens=hits,
        token_hit_rate=round(hits / max(1, prompts), 6),
        ideal_hit_rate=round(sum(one.ideal for one in requests) / max(1, prompts), 6),
        stranded_tokens=sum(one.stranded_tokens for one in requests),
        flops_saved=hits * 1.7e10,
        flops_saved_share=round(0.97 * hits / max(1, prompts), 6),
        checkpoints_taken=sum(reuse.values()),
        checkpoints_hit=sum(reuse.values()) - reuse.get(0, 0),
        evictions={"checkpoint": 1_234, "kv_page": 56_789},
        misses_by_reason=dict(Counter(one.reason for one in requests)),
        ttft_ms=Spread.of(times),
        queue_depth=1.25 if times else None,
        alpha=1.1 if eviction == "marconi" else None,
        seconds=3.21,
        peak_rss_mb=812.3,
    )
    held = tuple(Held(1 + i, 10 * i, 4 * i, i, 3, 4_000 - 15 * i - 3) for i in range(240 if requests else 0))
    return replace(Result(row, requests, held, memory // 4_000, reuse), **fields)


def grid(n=60, memories=(10**10, 43 * 10**9), timed=True):
    pairs = [(memory, *policies) for memory in memories for policies in POLICIES]
    return [result(*pair, outcomes(n, salt, timed)) for salt, pair in enumerate(pairs)]


class Page(HTMLParser):
    """Parsed report: cells of tables, sections with their texts, attributes. Tags must pair."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.data, self.rows = [], [], [], []
        self.texts = {name: [] for name in SECTIONS}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append((tag, attributes.get("id")))
        if tag == "tr":
            self.rows.append((self.section, []))
        if tag == "data":
            self.rows[-1][1].append(attributes["value"])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.section:
            self.texts[self.section].append(data)

    @property
    def section(self):
        return next((name for tag, name in self.open if tag == "section"), None)

    def text(self, section):
        return " ".join(self.texts[section])


@pytest.fixture
def report(tmp_path):
    """Writes a report and reads it."""

    def write(results, trace="mini.jsonl", model="qwen3.5-9b", notes=("Sessions come interleaved.",)):
        path = tmp_path / "report.html"
        write_report(path, trace, model, notes, results)
        assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
        return path.read_text(encoding="utf-8")

    return write


def test_every_section_stands_in_the_page_and_each_picture_has_a_name(report):
    page = Page(report(grid()))
    assert [attributes["id"] for tag, attributes in page.tags if tag == "section"] == list(SECTIONS)
    pictures = [attributes for _, attributes in page.tags if attributes.get("role") == "img"]
    assert len(pictures) > 40
    assert all(attributes.get("aria-label") for attributes in pictures)


def test_every_rows_figures_stand_in_the_table_exact_and_as_printed(report):
    results = grid()
    page = Page(report(results))
    written = [values for section, values in page.rows if section == "rows" and values]
    assert len(written) == len(results)
    for values, made in zip(written, results, strict=True):
        row = made.row
        spread = row.ttft_ms
        of_row = [row.memory, row.token_hit_rate, row.ideal_hit_rate, row.flops_saved_share]
        of_row += [spread.mean, spread.p5, spread.p50, spread.p95, spread.p99, row.queue_depth]
        of_row += [row.requests, row.prompt_tokens, row.hit_tokens, row.stranded_tokens]
        of_row += [row.recomputed_tokens, row.flops_saved]
        of_row += [row.checkpoints_taken, row.checkpoints_hit, *row.evictions.values()]
        of_row += [*([] if row.alpha is None else [row.alpha]), row.seconds, row.peak_rss_mb]
        assert values == list(map(str, of_row))
    text = page.text("rows")
    for row in (made.row for made in results):
        assert f"{row.token_hit_rate:.2%}" in text
        assert f"{row.prompt_tokens:,}" in text
        assert f"{row.ttft_ms.p95:,.1f}" in text
        assert row.placement in text
        assert row.eviction in text


def test_best_row_of_each_memory_is_marked_except_a_bound(report):
    weak, strong = outcomes(40, 3), tuple(replace(one, resumed_at=one.ideal) for one in outcomes(40, 3))
    half = tuple(replace(one, resumed_at=one.prompt_tokens // 2) for one in weak)
    rows = [result(10**10, "branch", "lru", weak), result(10**10, "branch", "clairvoyant", strong)]
    rows += [result(10**10, "branch", "seglen", half), result(2 * 10**10, "branch", "lru", weak)]
    text = report(rows)
    marked = [f">{name}</td>" in part.split("</tr>")[0] for name in ("seglen", "lru") for part in _best(text)]
    assert marked == [True, False, False, True]


def _best(text):
    return re.split(r'<tr class="best">', text)[1:]


def test_misses_and_reuse_stand_as_figures(report):
    made = result(10**10, "branch", "lru", outcomes(50))
    page = Page(report([made]))
    for reason in REASONS:
        tokens = sum(one.prompt_tokens - one.resumed_at for one in made.outcomes if one.reason == reason)
        assert f"{made.row.misses_by_reason[reason]:,} / {tokens:,}" in page.text("reasons")
    for figure in ("5,213", "300", "81", "0", "7"):  # resumed 0, 1, 2-3, 4-7 and 8-15 times
        assert figure in page.texts["reuse"]


def test_hit_rates_by_length_add_up_over_their_prompts(report):
    lengths = {1_000: (4, 250), 3_000: (2, 1_500), 20_000: (1, 20_000)}  # prompts of a length, and each one's hit
    made = [(length, hit) for length, (prompts, hit) in lengths.items() for _ in range(prompts)]
    requests = tuple(Outcome(i, "s", n, 1, hit, 0, "full", n, None, 0.0) for i, (n, hit) in enumerate(made))
    page = Page(report([result(10**10, "branch", "lru", requests)]))
    assert [text for text in page.texts["length"] if text in ("25.0%", "50.0%", "100.0%")] == [
        "25.0%",
        "50.0%",
        "100.0%",
    ]
    assert [text for text in page.texts["length"] if text in ("4", "2", "1")] == ["4", "2", "1"]


def test_segments_that_cost_more_than_they_save_have_bars_without_width(report):
    made = result(10**10, "branch", "lru", outcomes(5))
    text = report([replace(made, row=replace(made.row, token_hit_rate=-0.013, flops_saved=-2.5e12))])
    assert 'width="-' not in text
    assert ">-1.30%<" in text
    assert ">-2.5T<" in text


def test_names_of_traces_and_policies_are_escaped(report):
    row = result(10**10, EVIL, EVIL, tuple(replace(one, reason=EVIL) for one in outcomes(20)))
    text = report([row, result(2 * 10**10, EVIL, EVIL, outcomes(20))], trace=EVIL, model=EVIL, notes=[EVIL])
    page = Page(text)
    assert "<img" not in text
    assert [name for name, _ in page.tags].count("script") == 1
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert EVIL in page.text("rows")
    assert EVIL in page.text("notes")


def test_markup_is_escaped_once_and_attributes_without_value_are_left_out():
    drawn = environment().get_template("blocks.html.jinja").module.shape
    one = Shape("b", {"class": 'a"b', "data-tip": None, "title": "&"}, "1 < 2")
    assert drawn(one).strip() == '<b class="a&#34;b" title="&amp;">1 &lt; 2</b>'


def test_the_page_needs_nothing_but_itself(report):
    text = report(grid())
    page = Page(text)
    for name, attributes in page.tags:
        for key in ("src", "href"):
            assert attributes.get(key, "#").startswith(("#", "data:")), (name, attributes)
    assert not re.search(r"https?://(?!www\.w3\.org)|@import|@font-face", text)
    policy = next(attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'; ")


@pytest.mark.parametrize("results", [[], grid(0), [result(10**10, "none", "none", ())]], ids=["none", "grid", "one"])
def test_report_names_a_run_without_rows_or_requests(report, results):
    page = Page(report(results, notes=()))
    assert ("No row was run" in page.text("rows")) == (not results)
    for section in ("memory", "length", "reasons"):
        assert "No request was replayed." in page.text(section)
    assert "Nothing took time" in page.text("ttft")
    assert "No row held anything" in page.text("held")
    assert "No checkpoint was taken." in page.text("reuse")


def test_report_without_times_has_no_columns_of_times(report):
    page = Page(report(grid(timed=False)))
    assert "TTFT" not in page.text("rows")
    assert "Queue" not in page.text("rows")
    assert "Nothing took time" in page.text("ttft")


@pytest.mark.parametrize("requests", [outcomes(1), (Outcome(0, "s", 0, 0, 0, 0, "too_short", 0, 0.0),)])
def test_one_request_is_enough(report, requests):
    one = result(10**10, "branch", "lru", requests)
    page = Page(report([replace(one, held=one.held[:1], reuse={0: 1})]))
    assert f"{one.row.token_hit_rate:.2%}" in page.text("rows")
    assert "KV" in page.text("held")


def test_pools_and_memories_are_named_only_where_they_differ(report):
    requests = outcomes(20)
    same = report([result(10**10, "branch", "lru", requests, "split")])
    assert "branch · lru · split" not in same
    two = [
        result(memory, "branch", "lru", requests, pool) for memory in (10**10, 10**9) for pool in ("split", "unified")
    ]
    differ = report(two)
    assert "branch · lru · split, 10 GB" in differ
    assert "branch · lru · unified, 1 GB" in differ


def test_lines_differ_in_more_than_their_colour():
    """Lines of one colour differ in dash and mark, and so do neighbours."""
    requests = outcomes(2)
    rows = [result(10**10, f"every_block({number})", "lru", requests) for number in range(40)]
    lines = Lines(rows)
    looks = [(line.look.split()[:2], line.mark) for line in (lines.of(made.row) for made in rows)]
    for i, ((colour, dash), mark) in enumerate(looks):
        for (other_colour, other_dash), other_mark in looks[:i]:
            assert (colour, dash) != (other_colour, other_dash)
            assert colour != other_colour or mark != other_mark


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (1, [0, 1]),
        (3, [0, 1, 2, 3]),
        (7, [0, 2, 4, 6]),
        (1_283, [0, 500, 1_000]),
        (40_000, [0, 10_000, 20_000, 30_000, 40_000]),
    ],
)
def test_scales_have_round_steps(most, ticks):
    assert round_steps(most, 4) == ticks


def test_a_report_that_cannot_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("the old one")
    monkeypatch.setattr("pathlib.Path.replace", _refused)
    with pytest.raises(OSError, match="no room"):
        write_report(path, "trace", "model", (), grid(5))
    assert path.read_text() == "the old one"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def _refused(*_):
    raise OSError("no room")


def test_a_large_run_makes_a_small_page(tmp_path):
    requests = outcomes(25_000)
    rows = [
        result(memory * 10**9, f"balanced({placement})", "lru", requests)
        for memory in (10, 20, 43, 80)
        for placement in range(6)
    ]
    write_report(tmp_path / "large.html", "trace", "model", (), rows)
    assert (tmp_path / "large.html").stat().st_size < 3_000_000


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def test_a_browser_sorts_the_rows_chooses_lines_and_tells_figures(browser, tmp_path):
    from selenium.webdriver import Keys

    results = grid()
    write_report(tmp_path / "report.html", EVIL, "qwen3.5-9b", (), results)
    browser.get((tmp_path / "report.html").as_uri())

    def all_of(selector):
        return browser.find_elements("css selector", selector)

    def column(number):
        return [cell.text for cell in all_of(f"#rows tbody td:nth-child({number})")]

    as_given = column(5)
    button = next(button for button in all_of("#rows th button") if button.text.startswith("Hit rate"))
    rates = sorted((made.row.token_hit_rate for made in results), reverse=True)
    for order, expected in (("descending", rates), ("ascending", rates[::-1])):
        button.click()
        assert [text.lstrip("★ \n") for text in column(5)] == [f"{rate:.2%}" for rate in expected]
        assert all_of("#rows th[aria-sort]")[0].get_attribute("aria-sort") == order
    assert column(5) != as_given
    next(button for button in all_of("#rows th button") if button.text.startswith("Eviction")).click()
    assert column(3) == sorted(made.row.eviction for made in results)

    assert len([path for path in all_of("#memory path.line.of-0") if path.is_displayed()]) == 1
    all_of("#memory input[value='0']")[0].click()
    assert not [path for path in all_of("#memory path.line.of-0") if path.is_displayed()]

    plot = all_of("#held .plot")[0]  # scrolling hides the tooltip, so it comes first
    shown = "arguments[0].scrollIntoView({block: 'center'}); const done = arguments[1];"
    browser.execute_async_script(shown + "requestAnimationFrame(() => requestAnimationFrame(() => done()))", plot)
    plot.send_keys(Keys.ARROW_RIGHT)
    tip = browser.find_element("id", "tip")
    assert tip.text.startswith("after 1 requests\nFree ")
    all_of("#held .plot")[0].send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()

    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    assert not browser.execute_script("return document.documentElement.scrollWidth > window.innerWidth")
    assert browser.title == f"Replay of {EVIL} with qwen3.5-9b"
    assert browser.get_log("browser") == []
