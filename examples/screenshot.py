"""Screenshots of the live page and the chat, of a server with the embedded model that several tenants chat with.

    python examples/screenshot.py [--out docs/images/live-page.png] [--seconds 100] [--dark] [--width 1280]

The picture of the chat is chat.png in the same folder.

Needs chromium and chromedriver.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

os.environ["SE_OFFLINE"] = "true"
OUT = Path(__file__).parent.parent / "docs" / "images" / "live-page.png"
MEMORY = "64MB"  # little, so that evictions happen
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage")
WORDS = (
    "river",
    "source",
    "spring",
    "valley",
    "slow",
    "deep",
    "water",
    "stone",
    "bridge",
    "quiet",
    "mill",
    "path",
    "rain",
)


@contextmanager
def server() -> Iterator[str]:
    """Start a server with little memory, and give its URL."""
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0", "--memory", MEMORY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        finally:
            process.terminate()


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def converse(client: httpx.Client, tenant: int, until: float, seed: int) -> None:
    """Hold chats of several turns about one of the tenant's handbooks; 1 in 5 is about an unshared document."""
    rng = random.Random(seed)
    handbooks = [text(random.Random(100 * tenant + i), 500 + 400 * i) for i in range(3)]
    while time.monotonic() < until:
        messages = [{"role": "system", "content": rng.choice(handbooks)}]
        if rng.random() < 0.2:
            messages = [{"role": "system", "content": text(rng, 1500)}]
        for _ in range(rng.randint(1, 5)):
            messages.append({"role": "user", "content": text(rng, rng.randint(10, 160))})
            body = {
                "messages": messages,
                "max_tokens": rng.randint(16, 96),
                "cache_salt": f"tenant-{tenant}",
                "chat_template_kwargs": {"enable_thinking": False},
                "ignore_eos": True,
            }
            answer = client.post("/v1/chat/completions", json=body).json()
            messages.append(answer["choices"][0]["message"])
            if time.monotonic() >= until:
                return


@contextmanager
def browser(width: int, dark: bool) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, *QUIET, f"--user-data-dir={profile}", f"--window-size={width},1000"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            if dark:
                feature = [{"name": "prefers-color-scheme", "value": "dark"}]
                driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
            yield driver
        finally:
            driver.quit()


def picture(driver: webdriver.Chrome, url: str, out: Path, size: dict[str, Any]) -> None:
    """Save a picture of the whole page, once it shows requests and the tree."""
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(url)
    wait = WebDriverWait(driver, 30)
    wait.until(lambda d: d.find_elements("css selector", "#requests tr, #tree [data-node]"))
    height = driver.execute_script("return document.documentElement.scrollHeight")
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "height": height})
    wait.until(lambda d: d.execute_script("return document.getElementById('memory').viewBox.baseVal.width > 0"))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(driver.get_screenshot_as_png())


def picture_of_chat(driver: webdriver.Chrome, url: str, out: Path, size: dict[str, Any]) -> None:
    """Save a picture of a chat about a document, with a question that was edited."""
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "height": 900})
    driver.get(f"{url}/chat")
    wait = WebDriverWait(driver, 60)

    def ask(field: str, question: str, answers: int) -> None:
        driver.find_element("css selector", field).send_keys(question + "\n")
        wait.until(lambda d: len(d.find_elements("css selector", ".assistant .account a")) == answers)

    wait.until(lambda d: d.find_elements("css selector", "#model option"))
    driver.find_element("css selector", "#sample").click()
    ask("#text", "", 1)
    ask("#text", "Who is the head of Selvale Glass?", 2)
    ask("#text", "What does it sell?", 3)
    driver.find_elements("css selector", "[data-do=edit]")[-1].click()
    driver.find_element("css selector", ".edited").clear()
    driver.find_element("css selector", ".edited").send_keys("When was Selvale Glass founded?\n")
    wait.until(lambda d: d.find_elements("css selector", ".version"))
    wait.until(lambda d: d.find_element("css selector", "#send").text == "Send")
    out.write_bytes(driver.get_screenshot_as_png())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    of_chat = given.out.with_name("chat.png")
    with server() as url, httpx.Client(base_url=url, timeout=300) as client, browser(given.width, given.dark) as driver:
        until = time.monotonic() + given.seconds
        with ThreadPoolExecutor() as pool:
            chats = [pool.submit(converse, client, seed % 3, until, seed) for seed in range(5)]
            time.sleep(max(0.0, given.seconds - 8))
            size = {"width": given.width, "height": 1000, "deviceScaleFactor": 1, "mobile": given.width < 600}
            picture(driver, url, given.out, size)
            picture_of_chat(driver, url, of_chat, size)
        for chat in chats:
            chat.result()
    for out in (given.out, of_chat):
        print(f"{out}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
