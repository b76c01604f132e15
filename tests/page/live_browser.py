"""A real browser for the tests of the live page, and what must hold of every page in it."""

import shutil
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

CHROMIUMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def chromium():
    """The path of a Chromium, or a skipped test that says what is missing."""
    found = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUMS)} is installed")
    return found


@contextmanager
def launched():
    """Yield a browser."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    path = chromium()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def page_in(browser, *, expected=()):
    """Yield a page that is watched: nothing leaves the machine, and the console has no error but `expected` ones."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(20_000)
    hosts, errors = set(), []
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        yield page
    finally:
        context.close()
    assert hosts <= {"127.0.0.1", "localhost"}
    assert [error for error in errors if not any(one in error for one in expected)] == []
