"""Who may ask the server of the live page."""

import pytest

from gyroscope.errors import PageError
from gyroscope.page.access import Access, allowed_hosts, host_name

HERE = Access("127.0.0.1", 8421, frozenset({"hub.example.org"}), token="secret")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST.:9000", "127.0.0.1:8421", "127.8.9.1", "[::1]:8421", "hub.example.org"],
)
def test_names_of_this_machine_and_allowed_ones_are_accepted(host):
    assert HERE.refused_host(host) is None


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:8421", "10.0.0.7",
     "0.0.0.0", "localhost:port", "a b", "localhost@evil.example", "<script>", "hub.example.org.evil.example"],
)  # fmt: skip
def test_every_other_host_is_refused(host):
    assert HERE.refused_host(host) is not None


def test_a_refused_name_says_what_to_add():
    assert "--allow-host jupyter.example" in HERE.refused_host("jupyter.example:443")


def test_a_server_for_every_address_answers_to_any_address_but_to_no_other_name():
    everywhere = Access("0.0.0.0", 8421, token="secret")
    assert everywhere.refused_host("10.0.0.7:8421") is None
    assert everywhere.refused_host("[fe80::1]:8421") is None
    assert everywhere.refused_host("evil.example") is not None
    assert everywhere.address == "http://127.0.0.1:8421/?token=secret"
    assert Access("::", 8421, token="secret").address == "http://[::1]:8421/?token=secret"


def test_a_server_on_one_address_answers_to_that_address():
    there = Access("10.0.0.7", 8421, token="secret")
    assert there.refused_host("10.0.0.7:8421") is None
    assert there.refused_host("10.0.0.8:8421") is not None


def test_the_cookie_is_named_after_the_port_and_the_token():
    assert HERE.cookie.startswith("gyroscope-8421-")
    assert HERE.cookie != Access("127.0.0.1", 8421, token="other").cookie
    assert HERE.set_cookie == f"{HERE.cookie}=secret; HttpOnly; SameSite=Strict"


def test_the_cookie_is_found_among_those_of_other_programs():
    assert HERE.has_cookie(f'_xsrf="a; b"; {HERE.cookie}=secret; é=1;;')
    assert not HERE.has_cookie(f"{HERE.cookie}=wrong")
    assert not HERE.has_cookie(f"x{HERE.cookie}=secret")
    assert not HERE.has_cookie("")


def test_tokens_are_random_and_long():
    tokens = {Access("127.0.0.1", 8421).token for _ in range(20)}
    assert len(tokens) == 20
    assert min(map(len, tokens)) >= 32


def test_an_address_for_one_browser_is_accepted_once():
    access = Access("127.0.0.1", 8421, token="secret")
    token = access.address_once().partition("token=")[2]
    assert token != "secret"
    assert not access.is_token(token)
    assert (access.takes(token), access.takes(token), access.takes("secret"), access.takes(None)) == (
        True, False, True, False
    )  # fmt: skip


GOOD = {"x-gyroscope": "1", "host": "localhost:8421", "origin": "http://localhost:8421"}


@pytest.mark.parametrize(
    "headers",
    [
        GOOD,
        {**GOOD, "sec-fetch-site": "same-origin"},
        {**GOOD, "host": "localhost:9000", "origin": "http://localhost:9000"},  # through a tunnel
        {**GOOD, "origin": "https://hub.example.org"},  # a proxy that puts its own name into Host
    ],
)
def test_the_page_itself_may_ask_for_detail(headers):
    assert HERE.refused_change(headers) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"x-gyroscope": "0"},
        {"origin": "http://localhost:3000"},  # another program on this machine
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "file://localhost:8421"},
        {"origin": "http://[broken"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_nobody_else_may(changed):
    assert HERE.refused_change({**GOOD, **changed}) is not None
    assert HERE.refused_change({key: value for key, value in GOOD.items() if key != "origin"}) is not None


def test_names_to_allow_are_names():
    assert allowed_hosts(["Hub.example.org", "10.0.0.7", "::1"]) == {"hub.example.org", "10.0.0.7", "::1"}
    for bad in ("https://hub.example.org", "hub.example.org:443", "hub.example.org/", "", "*"):
        with pytest.raises(PageError, match=r"`allow_hosts` must be names of hosts .* Try hub\.example\.org"):
            allowed_hosts([bad])


def test_a_host_header_is_taken_apart():
    assert [host_name(one) for one in ("a.b:1", "[::1]", "a:b:c", "a_b-c.d")] == ["a.b", "::1", None, "a_b-c.d"]
