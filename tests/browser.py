"""A headless Chromium for tests of pages; tests that need it are skipped without it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ["SE_OFFLINE"] = "true"  # the installed driver, or none
PATIENCE = 20  # seconds after which something that must happen has not
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@contextmanager
def chromium(profile: Path, *flags: str) -> Iterator[Any]:
    """Start a browser with its profile in this folder, and quit it at the end. It keeps the pages' log."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    binary, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or chromedriver is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, *flags, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.chrome.service.Service(chromedriver))
    try:
        yield driver
    finally:
        driver.quit()


def until(driver, condition):
    """Wait for a change that the page makes by itself."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(driver, PATIENCE, 0.05, [StaleElementReferenceException]).until(lambda _: condition())


def all_of(driver, selector):
    return driver.find_elements("css selector", selector)


def text(driver, selector):
    return driver.find_element("css selector", selector).text


def errors(driver):
    """Return the console's errors since the last call."""
    return [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def wide(driver):
    """Return whether the page is wider than its window."""
    return driver.execute_script("return document.documentElement.scrollWidth > window.innerWidth")


def resize(driver, width, height=800):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
