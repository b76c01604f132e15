"""The document: what is inlined is what the policy allows, and nothing that a run says becomes markup."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest

from gyroscope.page.document import Embedded, document, json_text, policy_of
from page.made import HOSTILE

CONFIG = {"title": "first", "mode": "report", "runs": []}

pytestmark = pytest.mark.usefixtures("small_bundle")


class Read(HTMLParser):
    """The scripts, styles and meta elements of a document as a browser sees them."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self.styles, self.data, self.policy, self.title, self._open = [], [], {}, None, "", None
        self.addresses = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag == "meta" and found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]
        self._open = (tag, found)
        if tag == "script" and "type" not in found:
            self.scripts.append("")
        elif tag == "style":
            self.styles.append("")
        elif tag == "script":
            self.data[found["id"]] = (found["type"], "")

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        tag, found = self._open or (None, {})
        if tag == "script" and "type" not in found:
            self.scripts[-1] += data
        elif tag == "style":
            self.styles[-1] += data
        elif tag == "script":
            kind, text = self.data[found["id"]]
            self.data[found["id"]] = (kind, text + data)
        elif tag == "title":
            self.title += data


def allowed(policy, directive):
    return set(re.search(rf"(?:^|; ){directive} ([^;]*)", policy).group(1).split())


def hashed(texts):
    return {f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts}


def test_the_policy_allows_the_scripts_and_styles_of_the_document_and_no_others():
    read = Read("".join(document(CONFIG)))
    assert len(read.scripts) == len(read.styles) == 2
    assert allowed(read.policy, "script-src") == hashed(read.scripts)
    assert allowed(read.policy, "style-src") == hashed(read.styles)
    for directive in ("default-src", "connect-src", "base-uri", "form-action"):
        assert allowed(read.policy, directive) == {"'none'"}
    assert "unsafe" not in read.policy


def test_a_server_states_the_policy_itself():
    text = "".join(document(CONFIG, policy=False))
    assert Read(text).policy is None
    assert allowed(policy_of("'self'"), "connect-src") == {"'self'"}
    assert policy_of("'none'") == policy_of() == Read("".join(document(CONFIG))).policy


def test_scripts_are_inlined_after_those_of_others_with_their_license():
    vendor, own = Read("".join(document(CONFIG))).scripts
    assert vendor == "/*\nPermission is granted.\n*/\nvar plot = 1 < 2;"
    assert own == "const two = 2; // \"<b>\" & 'quotes'"


def test_the_page_is_told_its_configuration_and_finds_its_data():
    head = Embedded("run-0", "application/json", json_text({"a": 1}))
    data = [head, Embedded("run-0-0", "application/octet-stream", "H4s=")]
    read = Read("".join(document(CONFIG, data)))
    assert json.loads(read.data.pop("gyroscope")[1]) == CONFIG
    assert read.data == {"run-0": ("application/json", '{"a":1}'), "run-0-0": ("application/octet-stream", "H4s=")}


@pytest.mark.parametrize("name", [HOSTILE, "{{7*7}}", "{% raw %}", "${1}", "a&amp;b", "--><!--", "</title>", '"'])
def test_names_are_text_wherever_they_stand(name):
    data = [Embedded("run-0", "application/json", json_text({"name": name}))]
    read = Read("".join(document(CONFIG | {"title": name, "runs": [name]}, data)))
    assert read.title == name
    assert json.loads(read.data["gyroscope"][1])["runs"] == [name]
    assert json.loads(read.data["run-0"][1]) == {"name": name}
    assert len(read.scripts) == 2


def test_the_document_names_no_address():
    assert Read("".join(document(CONFIG))).addresses == []
