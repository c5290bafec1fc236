"""The live page in a browser: requests, zooming, and a server that is away."""

from __future__ import annotations

import re
import socket

import httpx
import pytest
from fastapi.testclient import TestClient

from headwater.config import ServeConfig
from headwater.schedule.tier_load import TierStats
from headwater.server.app import create_app
from headwater.server.observe import overview
from headwater.server.routes.observe import page_files
from tests.browser import PATIENCE, all_of, chromium, errors, resize, text, until, wide
from tests.server.fake_engine import FakeEngine
from tests.server.observe.test_overview import remember
from tests.server.routes.test_serving import Server

SOONER = "const wait = setTimeout; window.setTimeout = (then, ms) => wait(then, ms / 10)"  # the page asks each second
EVIL = "<img src=x onerror=document.title='broken'>"


@pytest.fixture(autouse=True)
def samples_come_sooner(monkeypatch):
    monkeypatch.setattr(overview, "SAMPLE_SECONDS", 0.1)


@pytest.fixture
def engine():
    fake = FakeEngine(model_name=EVIL)
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@pytest.fixture
def url(engine, listener):
    with Server(create_app(engine, ServeConfig(stream_start=0)), listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile"), "--window-size=1280,800") as driver:
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": SOONER})
        yield driver


@pytest.fixture
def driver(chrome):
    """Return a browser without state of earlier tests."""
    errors(chrome)
    yield chrome
    chrome.get("about:blank")
    chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture
def page(driver, url):
    """Open the live page."""
    driver.get(url)
    until(driver, lambda: text(driver, "#status") == "live")
    return driver


def complete(url, prompt="x" * 200, **headers):
    httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 4}, headers=headers).raise_for_status()


def node(driver, start, end):
    """Return the cell of the tree that covers these tokens."""
    label = f"tokens {start} to {end} "
    return until(
        driver,
        lambda: next((cell for cell in all_of(driver, "#tree [data-node]") if label in cell.accessible_name), None),
    )


def zoomed(driver):
    return driver.find_element("css selector", "#tree").get_attribute("data-zoomed")


def test_empty_cache_is_shown_as_such(page):
    assert "Nothing is cached yet" in text(page, "#tree")
    assert "No request has ended yet" in text(page, "#no-requests")
    assert "No prompt has been answered yet" in text(page, "#misses")
    assert text(page, "#tiles dd") == "–"
    until(page, lambda: all_of(page, "#memory .area"))
    assert errors(page) == []


def test_page_shows_where_requests_resumed_and_why(page, url):
    complete(url, **{"x-request-id": "first"})
    complete(url, **{"x-request-id": "again"})
    until(page, lambda: len(all_of(page, "#requests tr")) == 2)
    newest, oldest = (
        [cell.text for cell in row.find_elements("css selector", "td")] for row in all_of(page, "#requests tr")
    )
    assert newest[1:3] + newest[4:6] == ["completion", "200", "192", "full"]
    assert oldest[1:3] + oldest[4:6] == ["completion", "200", "0", "cold"]
    assert all_of(page, "#requests .split")[0].accessible_name == "192 cached, 0 stranded, 8 computed"
    assert text(page, "#tiles dd") == "48.0%"
    assert "cold\n1" in text(page, "#misses")
    assert all_of(page, "#requests tr")[0].get_attribute("data-request") == "again"
    until(page, lambda: all_of(page, "#rate .line[d]"))
    assert errors(page) == []


def tiles(driver):
    """Return each tile's figure and note, by title."""
    told = [
        [part.text for part in tile.find_elements("css selector", "dt, dd")] for tile in all_of(driver, "#tiles > div")
    ]
    return {title: figures for title, *figures in told}


def test_healing_has_a_tile_where_segments_are_in_use(page, engine):
    assert len(tiles(page)) == 6
    assert "Healed" not in tiles(page)
    engine.figures = {
        "segment_tokens": 512, "healings_waiting": 2, "healed": 1234, "healings_superseded": 7,
        "healings_given_up": 3, "healing_tokens": 45_678,
    }  # fmt: skip
    until(page, lambda: "Healed" in tiles(page))
    assert tiles(page)["Healed"] == ["1,234", "2 waiting, 3 given up, 45.7k tokens"]
    assert len({tile.rect["y"] for tile in all_of(page, "#tiles > div")}) == 1, "one row"
    assert errors(page) == []


def test_long_prefill_has_a_bar_until_its_answer_begins(page, url, engine):
    assert not page.find_element("css selector", "#computing").is_displayed()
    engine.computed, engine.hold_after = 1500, 0
    body = {"prompt": "x" * 3000, "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as stream:
        until(page, lambda: "1,500 of 3,000 tokens" in text(page, "#computing"))
        bar = page.find_element("css selector", "#prefills progress")
        assert (bar.get_attribute("value"), bar.get_attribute("max")) == ("1500", "3000")
        engine.was_cancelled.set()
        stream.read()
    until(page, lambda: not page.find_element("css selector", "#computing").is_displayed())
    assert errors(page) == []


def test_drafts_have_a_tile_once_steps_verified_some(page, engine):
    assert "Drafts accepted" not in tiles(page)
    engine.figures = {"accepted_drafts": 1_500, "rejected_drafts": 500}
    until(page, lambda: "Drafts accepted" in tiles(page))
    assert tiles(page)["Drafts accepted"] == ["75.0%", "1,500 of 2,000 tokens"]
    assert errors(page) == []


DISK = TierStats(
    "disk", 900, 12_300_000_000, 100_000_000_000, 12, 34, 5_600_000, 78, 9_000_000, 2, 1, usable=True, states=300,
    other_states=20,
)  # fmt: skip
REDIS = TierStats("redis", 10, 4_000, None, *[0] * 7, usable=False, states=3)


def stores(driver):
    """Return the cells of each store's row."""
    return [[cell.text for cell in row.find_elements("css selector", "td")] for row in all_of(driver, "#tiers tr")]


def test_each_store_has_a_row_where_there_are_tiers(page, engine):
    engine.tiers = ()
    until(page, lambda: not page.find_element("css selector", "#stores").is_displayed())
    engine.tiers = DISK, REDIS
    until(page, lambda: len(stores(page)) == 2)
    assert stores(page) == [
        [
            "disk",
            "12.3 GB of 100.0 GB",
            "300, 20 of other fingerprints",
            "34, 5.60 MB",
            "78, 9.00 MB",
            "12",
            "2",
            "yes",
        ],
        ["redis", "4.00 kB", "3", "0, 0 B", "0, 0 B", "0", "0", "no, after a failure"],
    ]
    assert errors(page) == []


def test_tree_zooms_by_click_and_back(page, engine):
    remember(engine, "a" * 128)
    remember(engine, "a" * 64 + "b" * 64)
    shared = node(page, 0, 64)
    id_, before = shared.get_attribute("data-node"), shared.rect["width"]
    shared.click()
    assert zoomed(page) == id_
    assert node(page, 0, 64).rect["width"] > before
    assert [step.text for step in all_of(page, "#trail button")][-1] == "0–64"
    assert "1 page of KV · checkpoint, resumed 0 times · 192 tokens in 3 branches" in text(page, "#node")
    node(page, 64, 128).click()
    assert len(all_of(page, "#tree [data-node]")) == 1
    all_of(page, "#trail button")[0].click()
    assert zoomed(page) is None
    assert len(all_of(page, "#tree [data-node]")) == 4
    assert errors(page) == []


def test_tree_can_be_used_with_the_keyboard(page, engine):
    from selenium.webdriver import ActionChains, Keys

    remember(engine, "a" * 128)
    remember(engine, "a" * 64 + "b" * 64)
    shared = node(page, 0, 64)
    page.execute_script("document.querySelector('#tree [tabindex=\"0\"]').focus()")

    def press(*keys):
        ActionChains(page).send_keys(*keys).perform()
        return page.switch_to.active_element.accessible_name

    assert press(Keys.ARROW_RIGHT) == shared.accessible_name
    assert "tokens 64 to 128" in press(Keys.ARROW_RIGHT)
    first = press(Keys.ARROW_DOWN)
    assert press(Keys.ARROW_UP) != first
    assert press(Keys.ARROW_LEFT) == shared.accessible_name
    press(Keys.ENTER)
    assert zoomed(page) == shared.get_attribute("data-node")
    press(Keys.ESCAPE, Keys.ESCAPE)
    assert zoomed(page) is None


def test_heights_stand_for_tokens_or_for_branches(page, engine):
    remember(engine, "a" * 128, checkpoints=(128,), namespace="one long branch")
    remember(engine, "b" * 128, checkpoints=(64, 128), namespace="two short ones")
    until(page, lambda: len(all_of(page, "#tree [data-node]")) == 5)
    roots = all_of(page, "#tree .root")
    assert abs(roots[0].rect["height"] - roots[1].rect["height"]) < 3
    all_of(page, "[data-weight]")[1].click()
    heights = sorted(root.rect["height"] for root in all_of(page, "#tree .root"))
    assert heights[1] > 1.8 * heights[0]


def test_page_reports_a_lost_server_and_reconnects(driver, engine, listener):
    port = listener.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with Server(create_app(engine, ServeConfig()), listener):
        driver.get(address)
        until(driver, lambda: text(driver, "#status") == "live")
        complete(address)
        until(driver, lambda: len(all_of(driver, "#requests tr")) == 1)
    until(driver, lambda: "trying again" in text(driver, "#status"))
    assert len(all_of(driver, "#requests tr")) == 1  # earlier rows stay
    with socket.create_server(("127.0.0.1", port)) as again, Server(create_app(engine, ServeConfig()), again):
        until(driver, lambda: text(driver, "#status") == "live")
        until(driver, lambda: not all_of(driver, "#requests tr"))  # another server, another history
        complete(address)
        until(driver, lambda: len(all_of(driver, "#requests tr")) == 1)


def test_page_escapes_text_from_the_server(page):
    assert text(page, "#model") == EVIL
    assert page.title == "Headwater"
    assert not all_of(page, "#model *")


@pytest.mark.parametrize("width", [390, 820, 1280])
def test_page_fits_its_window(page, url, engine, width, tmp_path):
    resize(page, width)
    remember(engine, "a" * 128)
    complete(url)
    engine.tiers = DISK, REDIS
    engine.figures = {"segment_tokens": 1, "healed": 123_456, "healings_waiting": 4_321, "healing_tokens": 10**12}
    until(page, lambda: all_of(page, "#requests tr") and "Healed" in tiles(page) and len(stores(page)) == 2)
    assert page.execute_script("return window.innerWidth") == width
    assert not wide(page)
    badge, name = (page.find_element("css selector", selector).rect for selector in ("#status", "h1"))
    assert badge["x"] + badge["width"] <= width
    assert abs(badge["y"] + badge["height"] / 2 - name["y"] - name["height"] / 2) < 8, "in the line of the name"
    picture = tmp_path / f"live-{width}.png"
    assert page.get_screenshot_as_file(str(picture))
    assert picture.stat().st_size > 10_000


def test_requests_are_cards_on_a_telephone(page, url):
    resize(page, 390)
    complete(url)
    until(page, lambda: all_of(page, "#requests tr"))
    cells = all_of(page, "#requests td")
    assert all(cell.rect["x"] >= 0 and cell.rect["x"] + cell.rect["width"] <= 390 for cell in cells)
    assert [cell.text for cell in cells][1:3] == ["completion", "200"]
    labels = [page.execute_script("return getComputedStyle(arguments[0], '::before').content", cell) for cell in cells]
    assert labels[1:4] == ['"Endpoint"', '"Prompt"', '"Cached, stranded, computed"']


def test_charts_and_requests_have_legends(page):
    for legend, names in {"queue": ["running", "waiting"], "requests": ["cached", "stranded", "computed"]}.items():
        items = all_of(page, f"#{legend}-legend li")
        assert [item.text.partition(":")[0] for item in items] == names
        colours = {item.find_element("css selector", "i").value_of_css_property("background-color") for item in items}
        assert len(colours) == len(names)


def test_node_ages_are_shown_in_seconds(page, engine):
    remember(engine, "a" * 128)
    shared = node(page, 0, 64)
    assert re.search(r"last used \d+ s ago", shared.accessible_name)


def test_every_control_and_picture_has_a_name(page, engine):
    remember(engine, "a" * 128)
    node(page, 0, 64)
    for element in all_of(page, "button, svg[role], section:not([hidden]), [role=treeitem], [tabindex='0']"):
        assert element.accessible_name, element.get_attribute("outerHTML")[:200]


@pytest.mark.parametrize("path", ["/", "/chat"])
def test_page_allows_itself_nothing_but_its_own_files(engine, path):
    client = TestClient(create_app(engine, ServeConfig()))
    answer = client.get(path)
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    for file in re.findall(r'(?:src|href)="(page/[^"]+)"', answer.text):
        assert client.get(f"/{file}").status_code == 200
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|https?://", answer.text)
    assert client.get("/page/__init__.py").status_code == 404
    assert client.get("/page/..%2Fapp.py").status_code == 404


def test_no_script_of_the_pages_writes_markup(engine):
    client = TestClient(create_app(engine, ServeConfig()))
    scripts = [name for name in page_files() if name.endswith(".js")]
    assert {"main.js", "chat.js", "markdown.js"} <= set(scripts)
    for name in scripts:
        script = client.get(f"/page/{name}").text
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script), name
        assert not re.search(r"https?://[\w.]", script.replace("http://www.w3.org/2000/svg", "")), name
