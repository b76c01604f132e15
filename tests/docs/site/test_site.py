"""The site that `make docs` has built: it makes no request, its links lead somewhere, and its search works offline."""

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from gyroscope.diagnosis import KINDS
from page.browser import launched

SITE = Path(__file__).parents[3] / "docs" / "_build" / "html"
PAGES = sorted(SITE.rglob("*.html"))


class Page(HTMLParser):
    """A page's anchors, its links, and the files that a browser loads with it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids, self.links, self.loaded = {"", "top"}, [], []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") not in ("next", "prev", "index", "search", "canonical"):
            self.loaded.append(given.get("href", ""))
        self.loaded += [given[name] for name in ("src", "srcset", "poster", "data") if tag != "a" and given.get(name)]


@cache
def page(file):
    return Page(file)


def of_elsewhere(address):
    return bool(re.match(r"(?:[a-z][a-z0-9+.-]*:)?//", address.strip(), re.IGNORECASE))


def test_the_site_was_built():
    assert SITE / "index.html" in PAGES
    assert {f"{name}.html" for name in ("search", "genindex")} <= {file.name for file in PAGES}


def test_an_address_elsewhere_is_recognized():
    assert of_elsewhere("https://cdn.example.org/x.js")
    assert of_elsewhere("//cdn.example.org/x.js")
    assert not of_elsewhere("_static/x.js?v=1")
    assert not of_elsewhere("data:image/svg+xml;base64,AAAA")


def test_no_page_loads_anything_from_elsewhere():
    assert [(file.name, one) for file in PAGES for one in page(file).loaded if of_elsewhere(one)] == []


def test_no_style_loads_anything_from_elsewhere():
    styles = [*SITE.rglob("*.css")]
    assert styles
    loads = re.compile(r"@import\s+(?:url\()?[\"']?([^\"')\s;]+)|url\(\s*[\"']?([^\"')]+)")
    found = [(file.name, *one) for file in styles for one in loads.findall(file.read_text(encoding="utf-8"))]
    assert [one for one in found if of_elsewhere(one[1] or one[2])] == []


def test_every_link_within_the_site_leads_to_a_place_that_is_there():
    missing = []
    for file in PAGES:
        for link in page(file).links:
            to = urlsplit(link)
            if to.scheme or to.netloc or "_modules" in file.parts:
                continue
            target = (file.parent / unquote(to.path)).resolve() if to.path else file
            ids = page(target).ids if target.suffix == ".html" and target.exists() else {unquote(to.fragment)}
            if not target.exists() or unquote(to.fragment) not in ids:
                missing.append((file.name, link))
    assert missing == []


def test_every_kind_of_finding_has_an_anchor_that_its_link_names():
    anchors = page(SITE / "diagnosis.html").ids
    assert [kind for kind in KINDS if kind.replace("_", "-") not in anchors] == []


def test_the_reference_describes_what_users_call_most():
    described = page(SITE / "api" / "gyroscope.html").ids
    names = ("watch", "load", "diagnose", "explain", "report", "Layca", "Layca.rates", "steer", "Monitor.log")
    assert [name for name in names if f"gyroscope.{name}" not in described] == []


@pytest.fixture(scope="module")
def browser():
    with launched() as found:
        yield found


@pytest.fixture
def tab(browser):
    requested, errors = [], []
    tab = browser.new_page(viewport={"width": 1300, "height": 900})
    tab.on("request", lambda one: requested.append(one.url))
    tab.on("pageerror", lambda one: errors.append(str(one)))
    yield tab
    tab.close()
    assert [url for url in requested if not url.startswith(("file:", "data:"))] == []
    assert errors == []


def test_the_search_works_from_the_disk(tab):
    tab.goto(f"{(SITE / 'search.html').as_uri()}?q=rotation+rate")
    tab.locator("#search-results li a").nth(5).wait_for()  # they appear one after the other
    tab.goto(f"{(SITE / 'search.html').as_uri()}?q=decay_law")
    tab.wait_for_selector('#search-results li a[href*="gyroscope.theory.html"]')


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "diagnosis", "api/gyroscope", "api/gyroscope.theory", "api/command_line"])
def test_a_page_fits_a_telephone_in_both_themes(tab, name, theme):
    tab.emulate_media(color_scheme=theme)
    tab.set_viewport_size({"width": 400, "height": 800})
    tab.goto((SITE / f"{name}.html").as_uri())
    assert tab.evaluate("document.documentElement.dataset.theme") == theme
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
