"""A headless Chromium for tests of pages; tests that need it are skipped without it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ["SE_OFFLINE"] = "true"  # the installed driver, or none
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
