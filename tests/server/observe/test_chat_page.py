"""The chat in a browser: answers, branches, files, thoughts, calls, and conversations that survive a reload."""

from __future__ import annotations

import json
import re
import socket

import httpx
import pytest

from headwater.config import ServeConfig
from headwater.errors import EngineStopped
from headwater.server.app import create_app
from tests.browser import all_of, chromium, errors, resize, text, until, wide
from tests.server.fake_engine import FakeEngine
from tests.server.observe.test_overview import remember_tokens
from tests.server.routes.test_serving import Server
from tests.server.templates import HERMES

QUESTION = " ".join(["Which river passes Ravkeld?"] * 8)  # longer than a page of the cache
EVIL = "<img src=x onerror=document.title='broken'>"
KEY = "a-key-of-16-characters"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Ravkeld"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture
def engine():
    fake = FakeEngine(model_name=EVIL, chat_template=HERMES)
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def serve(engine):
    """Return a function that serves the engine with these settings, at the port that it returns."""
    opened = []

    def start(**settings):
        sock = socket.create_server(("127.0.0.1", 0))
        server = Server(create_app(engine, ServeConfig(**settings)), sock)
        server.__enter__()
        opened.append((server, sock))
        return sock.getsockname()[1]

    yield start
    for server, sock in opened:
        server.__exit__(None, None, None)
        sock.close()


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile"), "--window-size=1280,800") as driver:
        yield driver


@pytest.fixture
def driver(chrome):
    """Return a browser; each server has a port, and so a storage, of its own."""
    errors(chrome)
    yield chrome
    chrome.get("about:blank")
    chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture
def page(driver, serve):
    """Open the chat. The fake's script continues the thoughts that the template opens."""
    opened(driver, f"http://127.0.0.1:{serve(stream_start=0)}/chat")
    return driver


def opened(driver, url):
    driver.get(url)
    until(driver, lambda: text(driver, "#model"))


def ask(page, question=QUESTION):
    """Send a message by Enter, and wait for the end of its answer."""
    page.find_element("css selector", "#text").send_keys(question + "\n")
    ended(page)


def ended(page):
    until(page, lambda: text(page, "#send") == "Send" and all_of(page, ".assistant"))


def press(page, name, place=-1):
    """Press a button of a message, by default the last one with this name."""
    [button for button in all_of(page, "#messages button") if button.accessible_name == name][place].click()


def texts(page, role="assistant"):
    return [part.text for part in all_of(page, f".{role} .text")]


def account(page):
    return all_of(page, ".account")[-1].text


def sent(engine, number=-1):
    """Return the prompt of a request as a text."""
    return engine.tokenizer.decode(engine.seen[number].prompt, skip_special_tokens=False)


def test_answer_is_streamed_with_an_account_of_its_cache(page, engine):
    engine.script = f"It\n\nis {EVIL}</think>**Narnon**, {EVIL}"
    ask(page)
    assert texts(page, "user") == [QUESTION]
    assert texts(page) == [f"Narnon, {EVIL}"]
    assert text(page, ".assistant strong") == "Narnon"
    assert re.match(r"0 of \d+ tokens known \(cold\) · ", account(page))
    ask(page, "And then?")
    shown = r"[\d,]+ of [\d,]+ tokens known.* · [\d.]+ m?s to the first token, about [\d.]+ m?s saved · .*path"
    assert re.fullmatch(shown, account(page))
    assert text(page, "#conversations b") == QUESTION[:60].strip()
    assert text(page, "#model") == EVIL
    thoughts = all_of(page, ".assistant .thoughts")[0]
    assert thoughts.get_attribute("open") is None
    thoughts.find_element("css selector", "summary").click()
    ask(page, "And its source?")  # the thoughts stay open
    assert thoughts.text == f"Thoughts\nIt\n\nis {EVIL}"
    assert not all_of(page, "#messages img")
    assert page.title == "Headwater: chat"
    assert errors(page) == []


def test_edits_and_repeated_answers_are_branches_that_survive_a_reload(page, engine):
    for script in ("first", "second"):
        engine.script = f"</think>{script}"
        if script == "first":
            ask(page)
        else:
            press(page, "Answer again")
            ended(page)
    assert texts(page) == ["second"]
    assert text(page, ".assistant .version") == "2/2"
    engine.script = "</think>third"
    press(page, "Edit this message")
    field = page.find_element("css selector", ".edited")
    field.clear()
    field.send_keys("Who lives there?\n")
    until(page, lambda: texts(page) == ["third"])
    ended(page)
    assert texts(page, "user") == ["Who lives there?"]
    assert "Who lives there?" in sent(engine)
    assert "Ravkeld" not in sent(engine)
    press(page, "Previous version")
    assert texts(page, "user") + texts(page) == [QUESTION, "second"]
    press(page, "Previous version")
    page.refresh()
    until(page, lambda: texts(page) == ["first"])
    assert [part.text for part in all_of(page, ".version")] == ["1/2", "1/2"]
    assert errors(page) == []


MARKDOWN = """# Title
Two *kinds* of `code` and snake_case_name,
[a](https://a.example/b) and [b](javascript:alert(1))

1. one
   - inner
2. two

> quoted

```py
<b>x</b>
```
~~~
open"""
ELEMENTS = {
    "h3": ["Title"],
    "em": ["kinds"],
    "p code": ["code"],
    "a": ["a"],
    "ol > li": ["one\ninner", "two"],
    "ul > li": ["inner"],
    "blockquote": ["quoted"],
    "pre": ["<b>x</b>", "open"],
    "b": [],
}


@pytest.mark.full
def test_markdown_of_an_answer_becomes_elements_with_its_text(page, engine):
    engine.script = f"</think>{MARKDOWN}"
    ask(page)
    found = {name: [one.text for one in all_of(page, f".assistant .text {name}")] for name in ELEMENTS}
    assert found == ELEMENTS
    link = page.find_element("css selector", ".assistant .text a")
    assert link.get_attribute("href") == "https://a.example/b"
    assert "noopener" in link.get_attribute("rel")
    assert "snake_case_name" in texts(page)[0]
    assert "[b](javascript:alert(1))" in texts(page)[0]


@pytest.mark.full
def test_quotes_beyond_a_depth_are_shown_as_written(page, engine):
    engine.script = f"</think>{'>' * 500} deep"
    ask(page)
    assert texts(page) == [f"{'>' * 491} deep"]
    assert errors(page) == []


@pytest.mark.full
def test_stopped_answer_keeps_its_text_and_cancels_the_request(page, engine):
    from selenium.webdriver import ActionChains, Keys

    engine.script = "</think>" + "word " * 20
    engine.hold_after = 30
    page.find_element("css selector", "#text").send_keys(QUESTION + "\n")
    until(page, lambda: texts(page) and "word" in texts(page)[0])
    assert text(page, "#send") == "Stop"
    ActionChains(page).send_keys(Keys.ESCAPE).perform()
    ended(page)
    assert account(page) == "stopped"
    assert engine.was_cancelled.wait(10)
    engine.hold_after = None
    engine.script = "</think>whole"
    ask(page, "And then?")
    assert sent(engine).count("word word") == 2  # of 4 that were shown


@pytest.mark.full
def test_error_of_the_server_is_shown_with_a_retry(page, engine):
    engine.fail = EngineStopped("the engine has stopped")
    ask(page)
    assert "the engine has stopped" in text(page, "[role=alert].failure")
    engine.fail = None
    engine.script = "</think>whole"
    press(page, "Retry")
    until(page, lambda: texts(page) == ["whole"])
    assert not all_of(page, "[role=alert].failure")
    assert not all_of(page, ".version")


@pytest.mark.full
def test_file_is_sent_as_a_segment_before_its_message(page, engine, tmp_path):
    (tmp_path / "notes.txt").write_text("Narnon " * 40, encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    choose = page.find_element("css selector", "#files")
    choose.send_keys(str(tmp_path / "picture.png"))
    until(page, lambda: text(page, "#notice span") == "picture.png is not a text in UTF-8.")
    choose.send_keys(str(tmp_path / "notes.txt"))
    until(page, lambda: text(page, "#attached li") == "notes.txt 280 characters ×")
    ask(page, "Which river?")
    assert sent(engine).count("notes.txt:\n\nNarnon Narnon") == 1
    assert not engine.seen[-1].segments  # exact
    assert text(page, ".user .file summary") == "notes.txt 280 characters"
    page.find_element("css selector", "#settings summary").click()
    page.find_element("css selector", "[name=reuse]").click()
    ask(page, "And its source?")
    assert engine.seen[-1].segments
    assert errors(page) == []


@pytest.mark.full
def test_settings_are_sent_and_shown_after_a_reload(page, engine):
    page.find_element("css selector", "#settings summary").click()
    page.find_element("css selector", "[name=system]").send_keys("Answer in one word.")
    page.find_element("css selector", "[name=temperature]").send_keys("0.5")
    page.find_element("css selector", "[name=thinking] [value=none]").click()
    ask(page)
    assert sent(engine).startswith("<|im_start|>system\nAnswer in one word.")
    assert sent(engine).endswith("<think>\n\n</think>\n\n")
    assert engine.seen[-1].params.temperature == 0.5
    page.refresh()
    until(page, lambda: text(page, "#settings-now") == "system, thinking, temperature")


@pytest.mark.full
def test_calls_are_folded_and_their_results_continue_the_answer(page, engine):
    page.find_element("css selector", "#settings summary").click()
    page.find_element("css selector", "[name=tools]").send_keys(json.dumps(TOOLS))
    page.find_element("css selector", "#settings summary").click()
    engine.script = f"</think>\n\n{CALL}"
    ask(page)
    call = page.find_element("css selector", ".assistant details.call")
    assert call.text == "Call of weather"
    call.find_element("css selector", "summary").click()
    assert call.find_element("css selector", "pre").text == '{\n  "town": "Ravkeld"\n}'
    engine.script = "It rains.</think>Rain."
    page.find_element("css selector", "[data-form=results] textarea").send_keys("rain")
    page.find_element("css selector", "[data-form=results] button").click()
    until(page, lambda: "Rain." in texts(page))
    assert CALL in sent(engine)  # as the model wrote it
    assert "<tool_response>\nrain\n</tool_response>" in sent(engine)
    assert errors(page) == []


@pytest.mark.full
def test_conversations_can_be_renamed_exported_and_deleted(page, engine, tmp_path):
    from selenium.webdriver import Keys

    engine.script = "</think>Yes."
    ask(page)
    page.find_element("css selector", "#new").click()
    ask(page, "Another one")
    assert len(all_of(page, "#conversations li")) == 2
    page.find_element("css selector", "#title").send_keys(Keys.CONTROL + "a" + Keys.NULL + "Rivers\n")
    until(page, lambda: text(page, "#conversations b") == "Rivers")
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.find_element("css selector", "#export").click()
    until(page, (tmp_path / "Rivers.json").exists)
    saved = json.loads((tmp_path / "Rivers.json").read_text(encoding="utf-8"))
    assert (saved["session"], saved["calls"]) == ("Rivers", [1])
    assert saved["messages"][0] == {"role": "user", "content": "Another one"}
    page.find_element("css selector", "#delete").click()
    page.switch_to.alert.accept()
    until(page, lambda: len(all_of(page, "#conversations li")) == 1)
    assert texts(page, "user") == [QUESTION]


@pytest.mark.full
def test_full_storage_is_reported_and_the_chat_continues(page):
    page.execute_script("Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError') }")
    ask(page)
    assert "The browser's storage is full" in text(page, "#notice")
    ask(page, "And then?")
    assert len(texts(page)) == 2


@pytest.mark.full
def test_chat_works_with_a_key_that_the_browser_asks_for(driver, serve):
    port = serve(api_key=KEY)
    refused = httpx.get(f"http://127.0.0.1:{port}/chat", headers={"accept": "text/html"})
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic")
    opened(driver, f"http://any:{KEY}@127.0.0.1:{port}/chat")  # as if it was typed
    opened(driver, f"http://127.0.0.1:{port}/chat")
    ask(driver)
    assert "tokens known" in account(driver)
    assert not [error for error in errors(driver) if error["message"].startswith(f"http://127.0.0.1:{port}")]


@pytest.mark.full
def test_path_opens_the_nodes_of_the_prompt_in_the_live_tree(page, engine):
    engine.chat_template = HERMES
    ask(page)
    prompt = engine.seen[-1].prompt
    for other in (prompt, (*prompt[:64], *reversed(prompt[64:]))):
        remember_tokens(engine, other)
    all_of(page, ".account a")[-1].click()
    until(page, lambda: len(all_of(page, "#tree .on-path")) == 2)
    assert "tokens 64 to 128" in text(page, "#node")
    assert "#path=" in page.current_url
    page.find_element("link text", "Chat").click()
    until(page, lambda: texts(page, "user") == [QUESTION])


@pytest.mark.full
@pytest.mark.parametrize("width", [390, 1280])
def test_chat_fits_its_window_and_every_control_has_a_name(page, engine, width, tmp_path):
    resize(page, width)
    engine.script = "</think># Code\n\n```\n" + "wide " * 80 + "\n```\n\n" + "x" * 300
    ask(page)
    page.find_element("css selector", "#settings summary").click()
    assert not wide(page)
    for element in all_of(page, "button, input, select, textarea, a, [tabindex='0']:not(pre)"):
        assert element.accessible_name or not element.is_displayed(), element.get_attribute("outerHTML")[:200]
    for part in all_of(page, ".message > *"):
        assert part.rect["x"] + part.rect["width"] <= width
    picture = tmp_path / f"chat-{width}.png"
    assert page.get_screenshot_as_file(str(picture))
    assert picture.stat().st_size > 10_000
    assert errors(page) == []
