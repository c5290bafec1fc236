"""The chat in a browser: answers, branches, files, thoughts, calls, and conversations that survive a reload."""

from __future__ import annotations

import re
import socket

import pytest

from headwater.config import ServeConfig
from headwater.server.app import create_app
from tests.browser import all_of, chromium, errors, text, until
from tests.server.fake_engine import FakeEngine
from tests.server.routes.test_serving import Server

QUESTION = " ".join(["Which river passes Ravkeld?"] * 8)  # longer than a page of the cache


@pytest.fixture
def engine():
    fake = FakeEngine(model_name="<b>fake</b>")
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def url(engine):
    with socket.create_server(("127.0.0.1", 0)) as sock, Server(create_app(engine, ServeConfig()), sock):
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile"), "--window-size=1280,800") as driver:
        yield driver


@pytest.fixture
def page(chrome, url):
    """Open the chat; each server has a port, and so a storage, of its own."""
    errors(chrome)
    chrome.get(f"{url}/chat")
    until(chrome, lambda: text(chrome, "#model"))
    yield chrome
    chrome.get("about:blank")
    chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def ask(page, question=QUESTION):
    """Send a message by Enter, and wait for the end of its answer."""
    sent = page.find_element("css selector", "#text")
    sent.send_keys(question)
    sent.send_keys("\n")
    ended(page)


def ended(page):
    until(page, lambda: text(page, "#send") == "Send" and all_of(page, ".assistant"))


def press(page, name, place=-1):
    """Press a button of a message, by default the last one with this name."""
    [button for button in all_of(page, "#messages button") if button.accessible_name == name][place].click()


def texts(page, role="assistant"):
    return [part.text for part in all_of(page, f".{role} .text")]


def shown_account(page):
    return all_of(page, ".account")[-1].text


def test_answer_is_streamed_with_an_account_of_its_cache(page, engine):
    ask(page)
    assert texts(page, "user") == [QUESTION]
    assert texts(page) == [engine.script]
    assert re.match(r"0 of \d+ tokens known \(cold\) · ", shown_account(page))
    ask(page, "And then?")
    shown = r"[\d,]+ of [\d,]+ tokens known.* · [\d.]+ m?s to the first token, about [\d.]+ m?s saved · .*path"
    assert re.fullmatch(shown, shown_account(page))
    assert text(page, "#conversations b") == QUESTION[:60].strip()
    assert text(page, "#model") == "<b>fake</b>"
    assert errors(page) == []
