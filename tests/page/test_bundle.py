"""The page's own bundle, as it stands in every document."""

import pytest

from gyroscope.page.document import document
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
    own = read.scripts[-1]
    assert own.startswith('(() => {\n"use strict";\n')
    assert own.endswith("\n})();\n")
