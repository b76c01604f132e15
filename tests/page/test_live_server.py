"""The server of the live page over HTTP: who is answered, with what, and how changes arrive."""

import contextlib
import gzip
import http.client
import http.server
import json
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from gyroscope.errors import PageError
from gyroscope.page import server as module
from gyroscope.page.server import Server
from gyroscope.store import load
from oracles.page import decode
from page.live_server import LAYERS, Training, serving

DETAIL = {"X_Gyroscope": "1", "Content_Type": "application/json"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run that has ended, one that is written, and one that cannot be read."""
    folder = tmp_path_factory.mktemp("runs")
    Training(folder / "sweep" / "ended", meta={"model": "<b>Net</b>"}).proceed(40).note("half").end()
    Training(folder / "bad").proceed(30).end()
    (folder / "bad" / "run.sqlite").write_bytes(b"nothing" * 500)
    training = Training(folder / "running").proceed(5)
    yield folder, training
    training.end()


@pytest.fixture(scope="module")
def ask(place):
    with serving(place[0]) as asker:
        yield asker


def test_the_token_is_exchanged_for_a_cookie_and_leaves_the_address(ask):
    status, headers, _ = ask(f"/?{ask.query}", cookie=False)
    assert status == 303
    assert headers["Location"] == "./"
    cookie, *attributes = headers["Set-Cookie"].split("; ")
    assert f"-{ask.server.port}-" in cookie
    assert attributes == ["HttpOnly", "SameSite=Strict"]
    assert headers["Referrer-Policy"] == "no-referrer"
    assert ask("/", cookie=False, Cookie=cookie)[0] == 200


ADDRESSES = [
    "/", "/api/runs", "/api/changes", "/api/run/running", "/api/run/running/series/rotation", "/none", "/api/run/none",
]  # fmt: skip


@pytest.mark.parametrize("path", ADDRESSES)
@pytest.mark.parametrize("given", [{}, {"Cookie": "gyroscope-8421=x"}, {"token": "wrong"}])
def test_without_token_and_cookie_nothing_is_answered(ask, path, given):
    path += f"?token={given['token']}" if "token" in given else ""
    status, headers, body = ask(path, cookie=False, **{k: v for k, v in given.items() if k != "token"})
    assert status == 403
    assert b"whole address" in body
    assert headers["Content-Type"].startswith("application/json" if "/api/" in path else "text/html")
    assert "Set-Cookie" not in headers


def test_the_token_alone_is_enough_for_a_program(ask):
    assert len(json.loads(ask(f"/api/runs?{ask.query}", cookie=False)[2])) == 3


@pytest.mark.parametrize("path", ADDRESSES)
def test_another_host_is_refused_even_with_the_cookie(ask, path):
    status, _, body = ask(path, Host="evil.example")
    assert status == 403
    assert b"--allow-host evil.example" in body


def test_allowed_names_are_answered(place):
    with serving(place[0], allow_hosts=["Hub.Example.org"]) as ask:
        assert ask("/", Host="hub.example.org")[0] == 200
        assert ask("/", Host="other.example.org")[0] == 403


@pytest.mark.parametrize("path", ADDRESSES[:2] + ADDRESSES[3:])
@pytest.mark.parametrize("cookie", [True, False])
def test_every_answer_has_the_headers_that_protect_it(ask, path, cookie):
    _, headers, _ = ask(path, cookie=cookie)
    assert {name: headers[name] for name in module._HEADERS if name != "Content-Security-Policy"} == {
        name: value for name, value in module._HEADERS.items() if name != "Content-Security-Policy"
    }
    policy = dict(part.strip().partition(" ")[::2] for part in headers["Content-Security-Policy"].split(";"))
    assert (policy["default-src"], policy["frame-ancestors"], policy["base-uri"]) == ("'none'", "'self'", "'none'")
    assert "unsafe" not in headers["Content-Security-Policy"]
    if path == "/" and cookie:
        assert policy["connect-src"] == "'self'"
        assert policy["script-src"].startswith("'sha256-")
    assert "server" not in headers


def test_a_link_on_another_site_is_followed_once_more_from_here(ask):
    """Its first request has no cookie, since that is for requests of this site only."""
    _, _, body = ask("/", cookie=False, Sec_Fetch_Site="cross-site")
    assert b'http-equiv="refresh" content="0; url=./?again"' in body
    status, _, body = ask("/?again", cookie=False, Sec_Fetch_Site="cross-site")
    assert status == 403
    assert b"refresh" not in body
    status, headers, _ = ask("/?again")
    assert (status, headers["Location"]) == (303, "./")


def test_the_list_has_every_run(ask):
    shown = {one["id"]: one for one in ask.json("/api/runs")}
    assert {id: one["state"] for id, one in shown.items()} == {
        "bad": "unreadable", "running": "running", "sweep/ended": "ended",
    }  # fmt: skip
    assert shown["sweep/ended"]["steps"] == 39
    assert shown["bad"]["error"].endswith("Use another folder.")


@pytest.mark.parametrize("path", ["sweep%2Fended", "sweep/ended"])
def test_a_run_and_its_series_are_those_on_disk(ask, place, path):
    head = ask.json(f"/api/run/{path}")
    assert (head["id"], head["steps"]["count"], len(head["layers"])) == ("sweep/ended", 40, len(LAYERS))
    status, headers, body = ask(f"/api/run/{path}/series/rotation?bins=100&from=3&to=9")
    assert (status, headers["Content-Type"]) == (200, "application/octet-stream")
    assert "Content-Encoding" not in headers
    _, found = decode(body)
    with load(place[0] / "sweep" / "ended") as run:
        expected = run.series("rotation", steps=range(3, 10))
    assert [one["first"] for one in found[0]] == list(range(3, 10))
    assert [[one["mean"] for one in layer] for layer in found] == expected.T.tolist()


def test_long_answers_are_compressed_for_whoever_accepts_it(ask):
    status, headers, body = ask("/", Accept_Encoding="gzip, br")
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    assert gzip.decompress(body) == ask("/")[2]


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/run/none", 404, "no such run"),
        ("/api/run/..%2F..%2Fetc", 404, "no such run"),
        ("/api/run/bad", 410, "is not a run"),
        ("/api/run/bad/series/rotation", 410, "is not a run"),
        ("/api/run/running/series/none", 404, "no series 'none'"),
        ("/api/run/running/series/rotation?bins=0", 400, "`bins` must be a whole number from 1 to 4096, got '0'"),
        ("/api/run/running/series/rotation?from=x", 400, "`from` must be a whole number"),
        ("/api/run/", 404, "no such address"),
        ("/api/none", 404, "no such address"),
        ("/api/changes?since=x", 400, "`since`"),
    ],
)
def test_what_is_not_there_or_not_readable_is_answered_with_a_sentence(ask, path, status, words):
    found, sentence = ask.error(path)
    assert found == status
    assert words in sentence


def test_an_address_that_is_no_page_is_answered_in_words(ask):
    status, _, body = ask("/<script>alert(1)</script>")
    assert status == 404
    assert b"no such address" in body
    assert b"<script" not in body


def test_what_fails_unexpectedly_is_answered_and_the_server_goes_on(ask, monkeypatch, caplog):
    monkeypatch.setattr(ask.server.runs, "head", lambda _: 1 / 0)
    assert ask.error("/api/run/running") == (500, "It cannot be shown: ZeroDivisionError: division by zero")
    monkeypatch.undo()
    assert ask.json("/api/run/running")["id"] == "running"
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(ask, method):
    assert ask("/api/run/running", method)[0] == 405


def test_a_head_request_has_no_body(ask):
    status, _, body = ask("/", "HEAD")
    assert (status, body) == (200, b"")


def origin(ask):
    return f"http://{ask.host}"


def test_the_page_asks_a_running_job_for_detail(ask, place):
    status, _, body = ask("/api/run/running/sample", "POST", '{"steps": 20}', Origin=origin(ask), **DETAIL)
    assert (status, body) == (204, b"")
    file = place[0] / "running" / "sample"
    assert file.read_text() == "20\n"
    file.unlink()


@pytest.mark.parametrize(
    ("changed", "body", "status", "words"),
    [
        ({"Origin": "http://evil.example"}, '{"steps": 5}', 403, "does not come from this page"),
        ({"Origin": "http://127.0.0.1:1"}, '{"steps": 5}', 403, "does not come from this page"),
        ({"Sec_Fetch_Site": "cross-site"}, '{"steps": 5}', 403, "another site"),
        ({"X_Gyroscope": ""}, '{"steps": 5}', 403, "X-Gyroscope"),
        ({"cookie": False}, '{"steps": 5}', 403, "whole address"),
        ({}, '{"steps": 0}', 400, "`steps` must be a whole number from 1 to 1000, got 0"),
        ({}, '{"steps": 1001}', 400, "got 1001"),
        ({}, '{"steps": true}', 400, "got True"),
        ({}, '{"steps": 2.5}', 400, "got 2.5"),
        ({}, "[1]", 400, "got None"),
        ({}, "nonsense", 400, "got None"),
        ({}, "[" * 900, 400, "got None"),
        ({}, " " * 5000, 413, "longer than 1000 bytes"),
    ],
)
def test_other_requests_for_detail_are_refused(ask, place, changed, body, status, words):
    given = {"Origin": origin(ask), **DETAIL, **changed}
    found, sentence = ask.error("/api/run/running/sample", "POST", body, **given)
    assert found == status
    assert words in sentence
    assert not (place[0] / "running" / "sample").exists()


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/run/sweep%2Fended/sample", 409, "not being written now"),
        ("/api/run/none/sample", 404, "no such run"),
        ("/api/run/running", 404, "no such address"),
        ("/", 404, "no such address"),
    ],
)
def test_detail_is_asked_of_running_jobs_only(ask, path, status, words):
    found, _, body = ask(path, "POST", '{"steps": 5}', Origin=origin(ask), **DETAIL)
    assert found == status
    assert words.encode() in body


def test_a_folder_that_cannot_be_written_is_reported(ask, monkeypatch):
    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("gyroscope.page.following.request", denied)
    status, sentence = ask.error("/api/run/running/sample", "POST", '{"steps": 5}', Origin=origin(ask), **DETAIL)
    assert (status, sentence) == (403, "The folder of the run cannot be written: Permission denied.")


def test_changes_arrive_as_events(ask, place):
    with ask.events() as following:
        for _ in range(3):
            place[1].proceed()
            while "running" not in following()["runs"] or ask.json("/api/runs")[1]["steps"] < place[1].step - 1:
                pass


def test_a_change_that_someone_else_has_noticed_arrives_too(ask):
    with ask.events() as following:
        time.sleep(3 * module.TICK)
        ask.server.runs._changed(ask.server.runs.entry("sweep/ended"))  # as when it was read for another client
        while "sweep/ended" not in following()["runs"]:
            pass


def test_changes_since_a_number_are_told_to_whoever_polls(ask, place):
    now = ask.json("/api/changes?since=0")
    assert set(now["runs"]) == {"bad", "running", "sweep/ended"}
    assert now["list"]
    place[1].proceed()
    found = ask.until(f"/api/changes?since={now['now']}", lambda found: found["runs"])
    assert (found["runs"], found["list"]) == (["running"], False)
    assert found["now"] > now["now"]


def test_a_connection_that_was_lost_is_told_what_it_has_missed(ask, place):
    last = ask.json("/api/changes?since=0")["now"]
    place[1].proceed()
    time.sleep(0.01)
    with ask.events(**{"Last-Event-ID": str(last)}) as following:
        assert "running" in following()["runs"]


def test_new_and_deleted_runs_are_told(ask, place):
    with ask.events() as following:
        Training(place[0] / "late").proceed().end()
        while not ((found := following())["list"] and "late" in found["runs"]):
            pass
        assert ask.json("/api/run/late")["state"] == "ended"
        shutil.rmtree(place[0] / "late")
        while not following()["list"]:
            pass
    assert ask.error("/api/run/late") == (410, "The run late was deleted or renamed.")


def test_thirty_two_clients_miss_no_change(ask, place):
    """Each reads the list when it hears of a change, and nothing else ever brings it the last step."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(ask.events()) for _ in range(32)]
        for _ in range(3):
            place[1].proceed()
            for following in clients:
                while following() and ask.json("/api/runs")[1]["steps"] < place[1].step - 1:
                    pass


def test_readers_leave_the_write_ahead_log_short(ask, place):
    folder, training = place
    log = folder / "running" / "run.sqlite-wal"
    with ask.events():
        for _ in range(20):
            training.proceed(2)
            ask.json("/api/runs"), ask.json("/api/run/running")
            ask("/api/run/running/series/rotation")
        with contextlib.closing(sqlite3.connect(folder / "running" / "run.sqlite")) as connection:
            busy, frames, moved = connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
    assert (busy, frames) == (0, moved)
    training.proceed()  # the log begins anew
    assert log.stat().st_size < 4_000_000


def test_a_slow_reader_keeps_nobody_waiting(ask, place, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    head = ask.server.runs.head

    def slow(id):
        begun.set()
        assert go_on.wait(20)
        return head(id)

    monkeypatch.setattr(ask.server.runs, "head", slow)
    waiting = threading.Thread(target=ask, args=("/api/run/running",))
    waiting.start()
    begun.wait(20)
    assert len(ask.json("/api/runs")) == 3
    go_on.set()
    waiting.join()


def test_nobody_looks_at_files_while_nobody_is_connected(place):
    with serving(place[0]) as ask:
        ask.json("/api/runs")
        looks = []
        look = ask.server.runs.look
        ask.server.runs.look = lambda: (looks.append(1), look())[1]
        time.sleep(3 * module.TICK)
        assert looks == []


class Proxy(http.server.BaseHTTPRequestHandler):
    """A proxy that serves everything under a prefix, which it removes, as Jupyter's does."""

    prefix = "/user/ada/proxy/8421"
    target = 0
    whole = False  # keep an answer back until it is complete

    def do_GET(self):
        if not self.path.startswith(f"{self.prefix}/"):
            self.send_error(404)
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.target, timeout=20)
        length = int(self.headers.get("Content-Length", 0))
        connection.request(
            self.command, self.path.removeprefix(self.prefix), self.rfile.read(length), dict(self.headers)
        )
        answer = connection.getresponse()
        if self.whole and answer.headers.get("Content-Type", "").startswith("text/event-stream"):
            with contextlib.suppress(OSError):
                answer.read()
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):
            while piece := answer.read1(65536):
                self.wfile.write(piece)
                self.wfile.flush()
        connection.close()

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def proxied(port, **options):
    handler = type("Handler", (Proxy,), {"target": port, **options})
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    proxy.daemon_threads = True
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield proxy.server_address[1]
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()


def test_everything_works_behind_a_proxy_with_a_prefix(ask, place):
    with proxied(ask.server.port) as port:
        here = {"port": port, "Host": f"localhost:{port}"}
        status, headers, _ = ask(f"{Proxy.prefix}/?{ask.query}", cookie=False, **here)
        assert (status, headers["Location"]) == (303, "./")
        # Without a path, browsers send the cookie back to the folder of the address only.
        assert "path=" not in headers["Set-Cookie"].lower()
        status, _, page = ask(f"{Proxy.prefix}/", **here)
        assert status == 200
        assert b'src="/' not in page
        assert b'href="/' not in page
        assert len(ask.json(f"{Proxy.prefix}/api/runs", **here)) == 3
        assert ask(f"{Proxy.prefix}/api/run/sweep%2Fended/series/rotation", **here)[0] == 200
        status, _, _ = ask(
            f"{Proxy.prefix}/api/run/running/sample", "POST", '{"steps": 2}',
            Origin=f"http://localhost:{port}", **here, **DETAIL,
        )  # fmt: skip
        assert status == 204
    (place[0] / "running" / "sample").unlink()


def test_a_busy_port_is_named_with_what_to_try(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PageError, match=rf"Port {port} is in use.* Try port {port + 1}, or port 0"):
            Server([tmp_path], port=port)


@pytest.mark.parametrize("host", ["nowhere.invalid", "203.0.113.7"])
def test_a_host_that_is_not_this_machine_is_refused(tmp_path, host):
    with pytest.raises(PageError, match=host):
        Server([tmp_path], port=0, host=host)


def test_the_server_opens_nothing_before_it_is_asked():
    """It starts in less than a second, so it must not load torch, the rules, or figures."""
    program = "import sys, gyroscope.page.server; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy = {"torch", "matplotlib", "gyroscope.diagnosis.rules", "gyroscope.page.data", "scipy", "pandas", "typer"}
    assert sorted(heavy & set(done.stdout.split())) == []


def test_open_connections_do_not_keep_the_server_from_ending(tmp_path):
    Training(tmp_path / "a").end()
    with serving(tmp_path) as ask, ask.events(), ask.events():
        ask.server.stop()
        ask.thread.join(10)
        assert not ask.thread.is_alive()
