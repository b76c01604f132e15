"""The page's own bundle, as it stands in every document."""

from hashlib import sha256

import pytest

from gyroscope.page.document import BUNDLE, document
from page.test_document import Read, allowed, hashed


@pytest.fixture(scope="module")
def read():
    return Read("".join(document({"title": "first", "mode": "report", "runs": [], "about": []})))


def test_the_policy_allows_what_is_inlined_and_nothing_else(read):
    assert allowed(read.policy, "script-src") == hashed(read.scripts)
    assert allowed(read.policy, "style-src") == hashed(read.styles)


def test_the_document_leads_nowhere_else(read):
    assert [one for one in read.addresses if not one.startswith(("#", "data:"))] == []


def test_no_script_ends_its_element_early(read):
    assert [one for one in read.scripts if "</script" in one.lower() or "<!--" in one] == []


def test_the_bundle_was_made_from_the_sources_that_are_here():
    front = BUNDLE.with_name("front")
    sources = {"page.min.js": (front / "order.txt").read_text().split(), "page.min.css": ["page.css"]}
    assert sorted(sources["page.min.js"]) == sorted(path.name for path in front.glob("*.js"))
    for name, files in sources.items():
        found = sha256(b"".join((front / file).read_bytes() for file in files)).hexdigest()[:16]
        made = (BUNDLE / name).read_text().partition("\n")[0]
        assert made == f"/* front {found} */", "run tools/build_page"


def test_the_bundle_is_small():
    assert sum(path.stat().st_size for path in BUNDLE.rglob("*") if path.is_file()) <= 150_000
