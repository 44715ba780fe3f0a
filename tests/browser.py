"""A headless Chromium for tests of pages: the system's own, driven by playwright."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
REQUIRED = "GRAPHCORE_TESTS_NEED_BROWSER"  # set where tests of pages must not be skipped


def browser_path() -> str:
    """Return the path of the system's Chromium; skip the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        assert not os.environ.get(REQUIRED), "no Chromium is installed, and the tests of pages must run"
        pytest.skip("no Chromium is installed, which tests of the page drive: apt-get install chromium")
    return found


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Run a browser."""
    path = browser_path()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
