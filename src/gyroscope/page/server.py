"""The server of the live page, `gyroscope live`: routes, server-sent events, and the process around them.

`Live` is the application. It only reads, except that `sample` writes the file that asks a running job for detail. All
addresses in it are relative, so that it works under any prefix: through a tunnel, or behind a proxy.
"""

from __future__ import annotations

import asyncio
import errno
import gzip
import html
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

import gyroscope
from gyroscope.base.markup import plain
from gyroscope.errors import GyroscopeError, MissingExtraError, PageError
from gyroscope.page.access import Access, allowed_hosts, is_loopback

if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
    raise MissingExtraError(
        "The live page needs starlette and uvicorn, which are not installed: pip install 'gyroscope[live]'"
    )

import anyio.to_thread
import uvicorn
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gyroscope.page.document import document, policy_of
from gyroscope.page.following import Changes, Following, UnknownRunError

_LOG = logging.getLogger("gyroscope")
T = TypeVar("T")
#: The port, unless another is asked for.
PORT = 8421
#: Seconds between two looks at the files, and the most while there is much to do.
TICK, SLOWEST = 0.3, 0.7
#: Seconds for which a look is good enough for someone who asks once.
_STALE = 0.05
#: The least ratio of the time between two announcements to the processor time that the last one took.
_SHARE = 6
#: Seconds between comments that keep a connection open, and for which someone who polls counts as connected.
_BEAT, _POLLS = 15.0, 5.0
#: Milliseconds of changes that a new connection gets: those written since the page has read its first data.
_RECENT = 5000
#: The most bins of a frame, steps of a request for detail, and bytes of its body.
_BINS, _STEPS, _BODY = 4096, 1000, 1000
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'self'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
}


class RefusedError(Exception):
    """An answer other than the one asked for: a status, and a sentence that the page shows."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Live:
    """The application that serves the page of some runs (ASGI).

    Args:
        runs: the runs.
        access: who may ask.
        title: the heading of the page.
    """

    def __init__(self, runs: Following, access: Access, title: str) -> None:
        self.runs, self.access = runs, access
        about = {"mode": "live", "version": gyroscope.__version__, "title": title}
        self._document = "".join(document({**about, "made": None, "runs": [], "docs": ""}, policy=False)).encode()
        self._policy = policy_of(connect="'self'") + "; frame-ancestors 'self'"
        self._packed: dict[int, tuple[bytes, bytes]] = {}
        self._threads = anyio.CapacityLimiter(8)
        self._clients: set[asyncio.Event] = set()
        self._announced = 0
        self._polled = -float("inf")
        self._follower: asyncio.Task[None] | None = None
        self._diagnosis: asyncio.Task[None] | None = None
        self._stopping = False

    def stop(self) -> None:
        """End all connections that wait for changes."""
        self._stopping = True
        self._wake()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            answer = await self._answered(request)
        except RefusedError as refusal:
            answer = self._refused(request, refusal)
        except UnknownRunError as error:
            answer = self._refused(request, RefusedError(410 if error.gone else 404, str(error)))
        except GyroscopeError as error:
            answer = self._refused(request, RefusedError(410, str(error)))
        except Exception as error:  # whatever a damaged run makes of the code that shows it, the server continues
            _LOG.warning("%s cannot be shown: %s: %s", plain(scope["path"]), type(error).__name__, error)
            _LOG.debug("", exc_info=True)
            answer = self._refused(request, RefusedError(500, f"It cannot be shown: {type(error).__name__}: {error}"))
        for name, value in _HEADERS.items():
            answer.headers.setdefault(name, value)
        await answer(scope, receive, send)

    async def _answered(self, request: Request) -> Response:
        if (why := self.access.refused_host(request.headers.get("host"))) is not None:
            raise RefusedError(403, why)
        path = _decoded(request.scope)
        token = request.query_params.get("token")
        if path == "" and self.access.takes(token):
            # A relative address: the prefix of a proxy stays.
            return Response(status_code=303, headers={"Location": "./", "Set-Cookie": self.access.set_cookie})
        if not (self.access.has_cookie(request.headers.get("cookie", "")) or self.access.is_token(token)):
            raise RefusedError(
                403,
                "Open the page with the whole address, token included, that was printed when the server started. A "
                "server that was started again has a new one.",
            )
        if request.method == "POST":
            return await self._post(request, path)
        if request.method not in ("GET", "HEAD"):
            raise RefusedError(405, f"{request.method} is not answered: this page only reads.")
        if path == "":
            if "again" in request.query_params:
                return Response(status_code=303, headers={"Location": "./"})
            headers = {"Content-Security-Policy": self._policy}
            return self._sent(request, self._document, "text/html; charset=utf-8", headers)
        return await self._get(request, path)

    async def _get(self, request: Request, path: str) -> Response:
        if path == "api/changes":
            return await self._changes(request)
        await self._fresh()
        if path == "api/runs":
            return self._sent(request, await self._reading(self.runs.summaries), "application/json")
        kind, _, rest = path.partition("api/run/")
        if kind or not rest:
            raise RefusedError(404, "There is no such address.")
        # A run's path may contain anything, and some proxies decode its slashes: what was listed decides.
        id, _, quantity = rest.rpartition("/series/")
        if id and not self.runs.knows(rest):
            bins = _number(request, "bins", 1, _BINS) or 512
            first, last = (_number(request, name, -(2**63), 2**63 - 1) for name in ("from", "to"))
            frame = await self._reading(self.runs.frame, id, quantity, bins, first, last)
            return Response(frame, media_type="application/octet-stream")
        return self._sent(request, await self._reading(self.runs.head, rest), "application/json")

    async def _post(self, request: Request, path: str) -> Response:
        if (why := self.access.refused_change(request.headers)) is not None:
            raise RefusedError(403, why)
        if not path.startswith("api/run/") or not path.endswith("/sample"):
            raise RefusedError(404, "There is no such address.")
        id = path.removeprefix("api/run/").removesuffix("/sample")
        steps = _steps(await _body(request))
        await self._fresh()
        try:
            running = await self._reading(self.runs.sample, id, steps)
        except OSError as error:
            raise RefusedError(403, f"The folder of the run cannot be written: {error.strerror}.") from error
        if not running:
            raise RefusedError(409, "The run is not being written now, so its next steps cannot be asked for.")
        return Response(status_code=204)

    async def _changes(self, request: Request) -> Response:
        """Return changes as they happen, or those since a number to someone who polls."""
        self._follow()
        if "since" in request.query_params or "text/event-stream" not in request.headers.get("accept", "*/*"):
            self._polled = time.monotonic()
            await self._fresh()
            since = _number(request, "since", -(2**63), 2**63 - 1) or 0
            found = self.runs.since(since)
            return self._sent(request, _told(found), "application/json")
        last = request.headers.get("last-event-id", "")
        since = int(last) if last.isdecimal() and len(last) < 19 else self.runs.now - _RECENT
        # Proxies that keep answers back until they are complete would keep this one forever.
        return StreamingResponse(
            self._events(since), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )

    async def _events(self, since: int) -> AsyncIterator[bytes]:
        news = asyncio.Event()
        self._clients.add(news)
        self._follow()
        try:
            yield b"retry: 1000\n\n"
            while not self._stopping:
                news.clear()
                found = self.runs.since(since)
                if found.runs or found.listed:
                    since = found.now
                    yield b"id: %d\ndata: %s\n\n" % (found.now, _told(found))
                try:
                    await asyncio.wait_for(news.wait(), _BEAT)
                except TimeoutError:
                    yield b": nothing new\n\n"
        finally:
            self._clients.discard(news)

    def _follow(self) -> None:
        """Look for changes as long as anyone is connected."""
        if self._follower is None or self._follower.done():
            self._follower = asyncio.create_task(self._followed())

    async def _followed(self) -> None:
        while (self._clients or time.monotonic() < self._polled + _POLLS) and not self._stopping:
            used = time.process_time()
            try:
                await self._reading(self.runs.look)
                self._announce()
                if self._diagnosis is None or self._diagnosis.done():  # which may take longer than the next look
                    self._diagnosis = asyncio.create_task(self._reading(self.runs.diagnose_one))
                await asyncio.sleep(TICK)
            except Exception as error:  # the folder cannot be read now
                _LOG.warning("The runs cannot be followed: %s: %s", type(error).__name__, error)
                await asyncio.sleep(SLOWEST)
            # Whoever was told has read meanwhile; if that took long, the next change waits a little.
            wait = min(_SHARE * (time.process_time() - used), SLOWEST) - TICK
            if wait > 0:
                await asyncio.sleep(wait)

    def _announce(self) -> None:
        """Wake everyone if anything has changed, whoever has noticed it."""
        if self.runs.now > self._announced:
            self._announced = self.runs.now
            self._wake()

    def _wake(self) -> None:
        for news in self._clients:
            news.set()

    async def _fresh(self) -> None:
        """Look for changes now, unless they are looked for all the time."""
        follows = self._follower is not None and not self._follower.done()
        if time.monotonic() > self.runs.looked + (SLOWEST + TICK if follows else _STALE):
            await self._reading(self.runs.look)

    async def _reading(self, act: Callable[..., T], *given: Any) -> T:
        """Return what is read in another thread, so that everyone else is answered meanwhile."""
        return await anyio.to_thread.run_sync(partial(act, *given), limiter=self._threads, abandon_on_cancel=True)

    def _sent(self, request: Request, body: bytes, kind: str, headers: dict[str, str] | None = None) -> Response:
        """Return text, compressed for whoever accepts that."""
        headers = {"Content-Type": kind, "Vary": "Accept-Encoding", **(headers or {})}
        if len(body) > 2000 and "gzip" in request.headers.get("accept-encoding", ""):
            kept = self._packed.pop(id(body), None)
            # Answers are kept as long as nothing changes, so the same object is the same answer.
            packed = kept[1] if kept is not None and kept[0] is body else gzip.compress(body, 4, mtime=0)
            self._packed[id(body)] = body, packed
            while len(self._packed) > 16:
                self._packed.pop(next(iter(self._packed)))
            return Response(packed, headers={**headers, "Content-Encoding": "gzip"})
        return Response(body, headers=headers)

    def _refused(self, request: Request, refusal: RefusedError) -> Response:
        """Return a sentence: as JSON for the page, as a page for a person."""
        if _decoded(request.scope).startswith("api/"):
            return Response(json.dumps({"error": str(refusal)}), refusal.status, media_type="application/json")
        # A link on another site leads here without the cookie, which is for links of this site only (SameSite=Strict).
        # Following such a link once more from here brings it.
        again = refusal.status == 403 and request.headers.get("sec-fetch-site") == "cross-site"
        again = again and _decoded(request.scope) == "" and "again" not in request.query_params
        return Response(_in_words(str(refusal), again), refusal.status, media_type="text/html")


def _told(found: Changes) -> bytes:
    return json.dumps({"now": found.now, "runs": found.runs, "list": found.listed}, separators=(",", ":")).encode()


def _decoded(scope: Scope) -> str:
    """Return the path that is asked for, without its first slash; names of files may be any bytes."""
    return os.fsdecode(unquote_to_bytes(scope.get("raw_path") or scope["path"].encode())).removeprefix("/")


def _number(request: Request, name: str, low: int, high: int) -> int | None:
    """Return a whole number of the query; None if it is not there."""
    given = request.query_params.get(name)
    if given is None:
        return None
    try:
        number = int(given)
    except ValueError:
        number = high + 1
    if not low <= number <= high:
        raise RefusedError(400, f"`{name}` must be a whole number from {low} to {high}, got {given[:40]!r}.")
    return number


async def _body(request: Request) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _BODY:
            raise RefusedError(413, f"The request is longer than {_BODY} bytes.")
    return body


def _steps(body: bytes) -> int:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    steps = asked.get("steps") if isinstance(asked, dict) else None
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= _STEPS:
        raise RefusedError(400, f"`steps` must be a whole number from 1 to {_STEPS}, got {steps!r:.40}.")
    return steps


def _in_words(sentence: str, again: bool) -> str:
    refresh = '<meta http-equiv="refresh" content="0; url=./?again">' if again else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}<title>Gyroscope</title></head>'
        f"<body><h1>Gyroscope</h1><p>{html.escape(plain(sentence))}</p></body></html>"
    )


def live(
    folder: str | os.PathLike[str] = "runs",
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    allow_hosts: Iterable[str] = (),
    browser: bool = False,
    say: Callable[[str], object] = print,
) -> None:
    """Serve the page of the runs in a folder, until interrupted with Ctrl-C.

    Args:
        folder: a run, or a folder with runs, up to three levels deep.
        host: the address to listen on; by default only this machine can connect.
        port: the port; 0 for any that is free.
        allow_hosts: further names under which the page may be reached, for example that of a proxy.
        browser: open the page in a browser.
        say: called with each line to print; the address is a line of its own.

    Raises:
        PageError: there is no such folder, or the server cannot listen there.

    >>> live("no such folder")
    Traceback (most recent call last):
    gyroscope.errors.PageError: `folder` must be a run or a folder with runs, got ...no such folder...
    """
    top = Path(folder).absolute()
    if not top.is_dir():
        raise PageError(
            f"`folder` must be a run or a folder with runs, got {top}, which is not a folder. Try the one that was "
            "given to gyroscope.watch, or its parent."
        )
    if not os.access(top, os.R_OK | os.X_OK):
        raise PageError(f"`folder` must be one that you may read, got {top}. Check its permissions.")
    server = Server([top], host=host, port=port, allow_hosts=allow_hosts)
    if not is_loopback(host):
        say(
            f"Warning: it listens on {host}. Everyone who can reach this machine and has the address can read these "
            "runs, and the connection is not encrypted."
        )
    say(f"The page of the runs in {top} (Ctrl-C ends it):")
    say(server.address)
    if browser:
        import webbrowser

        address = server.access.address_once()
        Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    server.run()


class Server:
    """A server of the live page: bound when it is made, and answering while `run` runs.

    Args:
        folders: the folders whose runs it shows.
        host: the address or name to listen on.
        port: the port; 0 for any that is free.
        allow_hosts: further names under which it may be reached, for example that of a proxy.

    Attributes:
        address: the address of the page, with its token.
        runs: the runs that it follows.

    Raises:
        PageError: it cannot listen there, or a name is invalid; the message says what to try.
    """

    def __init__(
        self, folders: Iterable[Path], *, host: str = "127.0.0.1", port: int = PORT, allow_hosts: Iterable[str] = ()
    ) -> None:
        names = allowed_hosts(allow_hosts)
        self._socket = _bound(host, port)
        self.port: int = self._socket.getsockname()[1]
        if not is_loopback(host):
            names |= allowed_hosts([socket.gethostname()])
        self.access = Access(host.lower(), self.port, names)
        self.address = self.access.address
        places = list(folders)
        self.runs = Following(places)
        self._application = Live(self.runs, self.access, title=places[0].name or "Gyroscope")
        config = uvicorn.Config(
            self._application, access_log=False, lifespan="off", log_config=None, log_level="critical",
            proxy_headers=False, server_header=False, timeout_graceful_shutdown=1, ws="none",
        )  # fmt: skip
        self._server = _Ending(config)
        self._server.application = self._application

    def run(self) -> None:
        """Answer until `stop` is called, or the process is interrupted."""
        try:
            with suppress(KeyboardInterrupt):
                self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self.runs.close()

    def stop(self) -> None:
        """End `run`; from any thread."""
        self._server.should_exit = True


class _Ending(uvicorn.Server):
    """A server that ends the connections that wait for changes, which would never end by themselves."""

    application: Live

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.application.stop()
        await super().shutdown(sockets)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens there."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise PageError(f"`host` must be an address or a name of this machine, got {host!r}: {error}.") from error
    found = socket.socket(family, kind)
    try:
        if os.name == "posix":  # elsewhere it would let two programs have the same port
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(where)
        found.listen(256)
        return found
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise PageError(
                f"Port {port} is in use, perhaps by another `gyroscope live`. Try port {port % 65535 + 1}, or port 0 "
                "for any that is free."
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise PageError(f"Port {port} may not be used by this user. Try port {PORT}.") from error
        raise PageError(f"The server cannot listen on {host}, port {port}: {error.strerror}.") from error
