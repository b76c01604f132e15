"""A real browser for the tests of the page, and what must hold of every page in it."""

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


class Tab:
    """A page of the browser that keeps what it said, asked for and failed at."""

    def __init__(self, browser, **options):
        self.page = browser.new_page(**{"viewport": {"width": 1300, "height": 900}, **options})
        self.page.set_default_timeout(10_000)
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, address):
        """Open an address, also where only what follows the # is another, and wait until the page is drawn."""
        self.page.goto("about:blank")
        self.page.goto(address)
        self.page.evaluate("window.gyroscope.ready")
        return self.page

    def ask(self, expression, argument=None):
        """Return the value of a JavaScript expression or function."""
        return self.page.evaluate(expression, argument)

    def until(self, expression):
        """Wait for a JavaScript expression to hold; the page's policy forbids Playwright's own way to wait."""
        for _ in range(200):
            if self.ask(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never held: {expression}")

    @property
    def state(self):
        """What the page shows: quantity, steps, layers, ..."""
        return self.ask("window.gyroscope.view()")
