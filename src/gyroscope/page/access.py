"""Access to the live page's server: token, cookie, and the checks against pages of other sites.

The server listens on this machine, where any page that is open in the same browser can send it requests, and where
other users may have accounts. So every request needs the token of the address, or the cookie that it was exchanged for;
the name of the host must be known, because a site can let its own name point to this machine (DNS rebinding); and what
changes anything must come from the page itself.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gyroscope.errors import PageError

_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?")


def is_loopback(host: str) -> bool:
    """Return True if a host is this machine, reached from itself.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def host_name(given: str) -> str | None:
    """Return the name or address in a Host header, without its port; None if it is neither.

    >>> host_name("LocalHost:8421"), host_name("[::1]:8421"), host_name("a b")
    ('localhost', '::1', None)
    """
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.%]+)\]|([^:\[\]]+))(?::\d{1,5})?", given.strip())
    if found is None:
        return None
    name = (found[1] or found[2]).lower()
    if found[1] is None and _NAME.fullmatch(name) is None:
        return None
    return name.removesuffix(".")


@dataclass(frozen=True)
class Access:
    """The rule by which the server answers or refuses.

    Attributes:
        host: what the server listens on.
        port: the port it listens on.
        allowed: further names under which it may be reached, for example that of a proxy.
        token: the secret in the address.

    >>> access = Access("127.0.0.1", 8421, token="secret")
    >>> access.refused_host("localhost:8421") is None, access.refused_host("evil.example") is None
    (True, False)
    """

    host: str
    port: int
    allowed: frozenset[str] = frozenset()
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    _once: set[str] = field(default_factory=set, repr=False)

    @property
    def address(self) -> str:
        """The address of the page, with the token."""
        return self._address_with(self.token)

    def address_once(self) -> str:
        """Return an address that can be opened once: other users see the arguments with which a browser is started."""
        self._once.add(token := secrets.token_urlsafe(24))
        return self._address_with(token)

    def _address_with(self, token: str) -> str:
        address = _address(self.host)
        name = self.host
        if address is not None and address.is_unspecified:  # reached from this machine like this
            name = "127.0.0.1" if address.version == 4 else "::1"
        return f"http://{f'[{name}]' if ':' in name else name}:{self.port}/?token={token}"

    @property
    def cookie(self) -> str:
        """The name of the cookie.

        Cookies do not know ports, so its name does: two servers behind one name would overwrite each other's. Servers
        of two machines may have the same port, each behind a tunnel, so a mark of the token is part of it.
        """
        return f"gyroscope-{self.port}-{hashlib.sha256(self.token.encode()).hexdigest()[:8]}"

    @property
    def set_cookie(self) -> str:
        """The header that hands the cookie over.

        It names no path: browsers then take the folder of the address that they asked for, which is the page's, also
        behind a proxy that serves it under a prefix which is not known here.
        """
        return f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict"

    def is_token(self, given: str | None) -> bool:
        """Return True if `given` is the token; how long that takes does not depend on what is given."""
        return given is not None and hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def takes(self, given: str | None) -> bool:
        """Return True if `given` is the token, or that of an address that is opened for the first time."""
        for token in self._once:
            if given is not None and hmac.compare_digest(given.encode(errors="replace"), token.encode()):
                self._once.discard(token)
                return True
        return self.is_token(given)

    def has_cookie(self, header: str) -> bool:
        """Return True if a Cookie header holds the token."""
        pairs = (part.strip().partition("=") for part in header.split(";"))
        return any(name == self.cookie and self.is_token(value) for name, _, value in pairs)

    def refused_host(self, header: str | None) -> str | None:
        """Return why a Host header is refused; None if it is accepted."""
        name = host_name(header or "")
        if name is None:
            return "The request names no host."
        if self._is_known(name):
            return None
        return (
            f"This server does not answer to the name {name}. If that is the name of your proxy or of this machine, "
            f"start it with --allow-host {name}."
        )

    def refused_change(self, headers: Mapping[str, str]) -> str | None:
        """Return why a request to change something is refused; None if it comes from the page itself."""
        if headers.get("x-gyroscope") != "1":
            return "The header X-Gyroscope is missing."
        if headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return "The request comes from another site."
        protocol, _, origin = headers.get("origin", "").strip().lower().partition("://")
        # A proxy may put its own name into Host, and then the page's origin is a name that was allowed.
        same = origin == headers.get("host", "").strip().lower()
        if protocol in ("http", "https") and (same or host_name(origin) in self.allowed):
            return None
        return "The request does not come from this page. Behind a proxy, start the server with --allow-host NAME."

    def _is_known(self, name: str) -> bool:
        if is_loopback(name) or name == self.host or name in self.allowed:
            return True
        mine = _address(self.host)
        # An address is not a name that somebody could let point elsewhere.
        return mine is not None and mine.is_unspecified and _address(name) is not None


def allowed_hosts(given: Iterable[str]) -> frozenset[str]:
    """Return the names of --allow-host.

    Raises:
        PageError: one of them is not the name of a host.

    >>> allowed_hosts(["Hub.Example.org"])
    frozenset({'hub.example.org'})
    """
    found = set()
    for one in given:
        name = one.lower() if _address(one) is not None else host_name(one)
        if name is None or (":" in one and _address(name) is None):
            raise PageError(
                f"`allow_hosts` must be names of hosts without protocol, port or path, got {one!r}. Try "
                "hub.example.org."
            )
        found.add(name)
    return frozenset(found)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
