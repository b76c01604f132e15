import errno
import hashlib
import io
import json
import os
import shutil
import socket
import stat
import tarfile
import threading
import time
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyroscope_lab.data import download as room
from gyroscope_lab.data.catalogue import Dataset, File, Piece
from gyroscope_lab.data.download import Patience, Watcher, download, fetch, unpack
from gyroscope_lab.errors import LabError

CONTENT = bytes(range(256)) * 40
QUICK = Patience(timeout=5.0, attempts=4, pause=0.0)


class Script:
    """The responses of a server, one per request; the last one is repeated."""

    def __init__(self, *steps):
        self.steps = steps
        self.asked = []

    def answer(self, handler):
        self.asked.append(handler.headers.get("Range"))
        self.steps[min(len(self.asked), len(self.steps)) - 1](handler)


def gives(content=CONTENT, *, cut=None, ranges=True, length=True, status=None, stall=0, **headers):
    """Send the file or the requested range; break the connection after `cut` bytes."""

    def step(handler):
        asked = handler.headers.get("Range")
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and ranges else 0
        if start >= len(content) and asked and ranges:
            handler.send_error(416)
            return
        handler.send_response(status or (206 if asked and ranges else 200))
        if asked and ranges:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if length:
            handler.send_header("Content-Length", str(len(content) - start))
        for key, value in headers.items():
            handler.send_header(key.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content[start : None if cut is None else start + cut])
        handler.wfile.flush()
        time.sleep(stall)

    return step


def chunked(*chunks, end=b"0\r\n\r\n"):
    def step(handler):
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for chunk in chunks:
            handler.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        handler.wfile.write(end)

    return step


def fails(code, **headers):
    def step(handler):
        handler.send_response(code)
        handler.send_header("Content-Length", "0")
        for key, value in headers.items():
            handler.send_header(key.replace("_", "-"), value)
        handler.end_headers()

    return step


def hangs_up(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(script):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10

        def do_GET(self):
            self.close_connection = True
            script.answer(self)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/file.bin"
        finally:
            server.shutdown()
            thread.join(10)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")


@pytest.fixture
def serve():
    servers = []

    def start(*steps):
        script = Script(*steps)
        server = serving(script)
        script.url = server.__enter__()
        servers.append(server)
        return script

    yield start
    for server in servers:
        server.__exit__(None, None, None)


def md5(content):
    return f"md5:{hashlib.md5(content).hexdigest()}"


def known(*scripts, content=CONTENT, name="file.bin", size=True, checksum=True):
    return File(
        name,
        len(content) if size else None,
        md5(content) if checksum else None,
        tuple(script.url for script in scripts),
    )


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_fetched_and_nothing_else_is_left(tmp_path, serve):
    server, seen = serve(gives()), []
    watcher = Watcher(on_bytes=lambda *told: seen.append(told))
    download(known(server), tmp_path / "deep" / "file.bin", watcher=watcher, patience=QUICK)
    assert (tmp_path / "deep" / "file.bin").read_bytes() == CONTENT
    assert left(tmp_path / "deep") == ["file.bin"]
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert [here for _, here, _ in seen] == sorted({here for _, here, _ in seen})


def test_a_dropped_connection_is_continued_where_it_broke(tmp_path, serve):
    server = serve(gives(cut=1000), gives(cut=234), gives())
    download(known(server), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000-", "bytes=1234-"]


def test_a_connection_that_is_hung_up_on_is_tried_again(tmp_path, serve):
    server = serve(hangs_up, gives())
    download(known(server), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_an_interrupted_program_is_continued_by_the_next(tmp_path, serve):
    server = serve(gives(cut=3000), gives())

    def interrupt(name, here, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(known(server), tmp_path / "file.bin", watcher=Watcher(on_bytes=interrupt), patience=QUICK)
    here = (tmp_path / "file.bin.part").stat().st_size
    assert 0 < here <= 3000
    download(known(server), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [None, f"bytes={here}-"]
    assert left(tmp_path) == ["file.bin"]


def test_a_part_that_is_whole_is_only_checked(tmp_path, serve):
    server = serve(fails(500))
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    download(known(server), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == []


@pytest.mark.parametrize("size", [True, False])
def test_a_part_that_is_too_long_is_started_again(tmp_path, serve, size):
    server = serve(gives())
    (tmp_path / "file.bin.part").write_bytes(CONTENT + b"more")
    download(known(server, size=size), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == ([None] if size else [f"bytes={len(CONTENT) + 4}-", None])


def test_a_server_without_ranges_is_started_again_with(tmp_path, serve):
    server = serve(gives(cut=1000, ranges=False), gives(ranges=False))
    download(known(server), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000-"]


@pytest.mark.parametrize("version", ["ETag", "Last_Modified"])
def test_a_file_that_changed_is_started_again(tmp_path, serve, version):
    old, new = bytes(len(CONTENT)), CONTENT
    server = serve(gives(old, cut=1000, **{version: '"1"'}), gives(new, **{version: '"2"'}))
    download(known(server, checksum=False), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == new
    assert server.asked == [None, "bytes=1000-", None]


@pytest.mark.parametrize("version", ["ETag", "Last_Modified"])
def test_a_file_that_did_not_change_is_continued_without_a_checksum(tmp_path, serve, version):
    server = serve(gives(cut=1000, **{version: '"1"'}), gives(**{version: '"1"'}))
    download(known(server, checksum=False), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000-"]


def test_without_a_checksum_or_a_version_nothing_is_continued(tmp_path, serve):
    server = serve(gives(cut=1000), gives())
    download(known(server, checksum=False), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [None, None]


@pytest.mark.parametrize("note", ["", "{", "[]", "7", '{"url": 3}'])
def test_a_damaged_note_of_the_version_does_no_harm(tmp_path, serve, note):
    server = serve(gives(ETag='"1"'))
    (tmp_path / "file.bin.part").write_bytes(b"other")
    (tmp_path / "file.bin.part.json").write_text(note)
    download(known(server, checksum=False), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_range_that_is_not_the_one_asked_for_is_not_used(tmp_path, serve):
    def shifted(handler):
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}")
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()

    server = serve(gives(cut=1000), shifted, gives())
    download(known(server), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000-", None]


def test_a_damaged_beginning_is_found_out_and_fetched_again(tmp_path, serve):
    server = serve(gives())
    (tmp_path / "file.bin.part").write_bytes(b"damaged")
    download(known(server), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == ["bytes=7-", None]


def test_another_address_continues_what_one_began(tmp_path, serve):
    first, second = serve(gives(cut=1000, ETag='"a"'), fails(404)), serve(gives(ETag='"b"'))
    download(known(first, second), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert second.asked == ["bytes=1000-"]


def test_without_a_checksum_another_address_starts_again(tmp_path, serve):
    first = serve(gives(bytes(len(CONTENT)), cut=1000, ETag='"a"'), fails(404))
    second = serve(gives(ETag='"a"'))
    download(known(first, second, checksum=False), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert second.asked == [None]


def test_wrong_bytes_are_refused_with_both_checksums(tmp_path, serve):
    other = bytes(len(CONTENT))
    server = serve(gives(other))
    says = f"its MD5 is {md5(other)[4:]}, and {md5(CONTENT)[4:]} is expected"
    with pytest.raises(LabError, match=f"file.bin cannot be downloaded: {server.url}: what came is not .*{says}"):
        download(known(server), tmp_path / "file.bin", patience=QUICK)
    assert left(tmp_path) == []
    assert len(server.asked) == 1


def test_an_address_with_wrong_bytes_gives_way_to_the_next(tmp_path, serve):
    download(known(serve(gives(bytes(len(CONTENT)))), serve(gives())), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_file_of_another_size_is_refused_before_it_is_fetched(tmp_path, serve):
    server, seen = serve(gives(CONTENT + b"more")), []
    watcher = Watcher(on_bytes=lambda *told: seen.append(told))
    with pytest.raises(LabError, match="the file there has 10,244 bytes, and 10,240 are expected"):
        download(known(server), tmp_path / "file.bin", watcher=watcher, patience=QUICK)
    assert (left(tmp_path), seen) == ([], [])


PAGE = b"  <!DOCTYPE html><title>Log in</title>"


@pytest.mark.parametrize(
    ("content", "headers"),
    [(PAGE, {"Content_Type": "text/html; charset=utf-8"}), (PAGE, {}), (b"<HTML>", {"Content_Type": "text/plain"})],
    ids=["by its type", "by its beginning", "in capitals"],
)
@pytest.mark.parametrize("size", [True, False])
def test_a_web_page_is_not_taken_for_the_file(tmp_path, serve, content, headers, size):
    file = known(serve(gives(content, **headers)), content=content if size else CONTENT, size=size, checksum=False)
    with pytest.raises(LabError, match="a web page came instead of the file, as from a network that wants"):
        download(file, tmp_path / "file.bin", patience=QUICK)
    assert left(tmp_path) == []


@pytest.mark.parametrize("code", [403, 404, 410])
def test_what_is_not_there_is_not_asked_for_twice(tmp_path, serve, code):
    server = serve(fails(code))
    with pytest.raises(LabError, match=rf"{server.url}: the server answered {code} \w+"):
        download(known(server), tmp_path / "file.bin", patience=QUICK)
    assert server.asked == [None]


def test_all_addresses_are_named_with_what_was_wrong(tmp_path, serve):
    first, second = serve(fails(404)), serve(gives(PAGE, Content_Type="text/html"))
    says = f"{first.url}: the server answered 404 .*; {second.url}: a web page came"
    with pytest.raises(LabError, match=says):
        download(known(first, second), tmp_path / "file.bin", patience=QUICK)


@pytest.mark.parametrize("code", [408, 429, 500, 503])
def test_a_busy_server_is_tried_again(tmp_path, serve, code):
    server = serve(fails(code), fails(code), gives())
    download(known(server), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_server_that_stays_busy_is_given_up(tmp_path, serve):
    server, news = serve(fails(503)), []
    with pytest.raises(LabError, match="the server answered 503 Service Unavailable; tried 4 times"):
        download(known(server), tmp_path / "file.bin", watcher=Watcher(on_news=news.append), patience=QUICK)
    assert len(server.asked) == 4
    assert news == ["file.bin: the server answered 503 Service Unavailable; trying again in 0 s"] * 3


@pytest.mark.parametrize(
    ("headers", "waits"), [({}, [1.5, 3, 6, 12, 24, 48, 60]), ({"Retry_After": "7"}, [7] * 7)], ids=["own", "said"]
)
def test_waits_double_up_to_a_minute_unless_the_server_says(tmp_path, serve, monkeypatch, headers, waits):
    slept = []
    monkeypatch.setattr("gyroscope_lab.data.download.time.sleep", slept.append)
    with pytest.raises(LabError):
        download(known(serve(fails(503, **headers))), tmp_path / "file.bin", patience=Patience(5, 8, 1.5))
    assert slept == waits


def test_a_connection_that_breaks_often_but_gets_on_is_not_given_up(tmp_path, serve, monkeypatch):
    monkeypatch.setattr(room, "_MUCH", 500)
    server = serve(gives(cut=500))
    download(known(server), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert len(server.asked) == -(-len(CONTENT) // 500)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_breaks_and_does_not_get_on_is_given_up(tmp_path, serve, monkeypatch, ranges):
    monkeypatch.setattr(room, "_MUCH", 500)
    server = serve(gives(cut=600, ranges=ranges), gives(cut=600 if not ranges else 10, ranges=ranges))
    with pytest.raises(LabError, match=r"the connection ended after .* of 10,240 bytes; tried 4 times"):
        download(known(server), tmp_path / "file.bin", patience=QUICK)
    assert len(server.asked) == 4


def test_a_server_that_falls_silent_is_left(tmp_path, serve):
    server = serve(gives(cut=1000, stall=3.0), gives())
    news = []
    patience = Patience(timeout=1.0, attempts=4, pause=0.0)
    download(known(server), tmp_path / "file.bin", watcher=Watcher(on_news=news.append), patience=patience)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000-"]
    assert news == ["file.bin: nothing came for 1 s; trying again in 0 s"]


def test_a_file_of_unannounced_length_is_fetched(tmp_path, serve):
    for number, step in enumerate([chunked(CONTENT[:5000], CONTENT[5000:]), gives(length=False)]):
        for size in (True, False):
            path = tmp_path / f"{number}-{size}"
            download(known(serve(step), size=size, name=path.name), path, patience=QUICK)
            assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("size", [True, False])
def test_a_file_of_unannounced_length_that_breaks_off_is_continued(tmp_path, serve, size):
    server = serve(chunked(CONTENT[:5000], end=b"1388\r\n" + CONTENT[5000:5004]), gives())
    download(known(server, size=size), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=5004-"]


def test_a_server_that_cannot_be_reached_is_left_at_once(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/file.bin"
        with pytest.raises(LabError, match=r"the server cannot be reached, as without a network \(.*refused\)"):
            download(File("file.bin", 1, None, (url,)), tmp_path / "file.bin", patience=QUICK)

    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(LabError, match=r"as without a network \(.*Name or service not known\)"):
        download(File("file.bin", 1, None, ("http://127.0.0.1/",)), tmp_path / "file.bin", patience=QUICK)


@pytest.mark.parametrize("error", [TimeoutError("timed out"), ConnectionResetError("reset")], ids=["slow", "reset"])
def test_a_connection_that_breaks_before_it_is_made_is_tried_again(tmp_path, monkeypatch, error):
    tried = []

    def breaks(*_, **__):
        tried.append(1)
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", breaks)
    says = r"(nothing came for 5 s|the connection broke \(.*reset\)); tried 4 times"
    with pytest.raises(LabError, match=says):
        download(File("file.bin", 1, None, ("http://127.0.0.1/",)), tmp_path / "file.bin", patience=QUICK)
    assert len(tried) == 4


def test_what_is_there_stays_until_what_replaces_it_is_whole_and_renamed(tmp_path, serve):
    path, seen = tmp_path / "file.bin", []
    path.write_bytes(b"old")
    part = tmp_path / "file.bin.part"
    watcher = Watcher(on_bytes=lambda *_: seen.append((path.read_bytes(), part.stat().st_ino)))
    download(known(serve(gives())), path, watcher=watcher, patience=QUICK)
    assert set(seen) == {(b"old", path.stat().st_ino)}
    assert path.read_bytes() == CONTENT


def test_too_small_a_disk_is_noticed_before_anything_is_fetched(tmp_path, serve, monkeypatch):
    server = serve(gives())
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9 - 5, 5))
    file = File("file.bin", 170_000_000, None, (server.url,))
    with pytest.raises(LabError, match=r"file.bin needs 170 MB, and .* has 0 MB left\. Free some space, or put it"):
        download(file, tmp_path / "file.bin", patience=QUICK)
    assert server.asked == []


def test_a_disk_that_fills_up_is_said_and_what_came_is_kept(tmp_path, serve, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LabError, match=r"file.bin cannot be written: No space left on device"):
        download(known(serve(gives(cut=1000))), tmp_path / "file.bin", patience=QUICK)
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:1000]


def test_a_folder_that_cannot_be_made_is_said(tmp_path, serve):
    (tmp_path / "here").touch()
    with pytest.raises(LabError, match=r"here/file.bin cannot be written: "):
        download(known(serve(gives())), tmp_path / "here" / "file.bin", patience=QUICK)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(1, 2000),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("cut"), st.integers(0, 800), st.booleans()),
            st.tuples(st.just("busy"), st.just(0), st.just(True)),
            st.tuples(st.just("hang up"), st.just(0), st.just(True)),
        ),
        max_size=8,
    ),
    began=st.binary(max_size=50),
)
def test_whatever_happens_on_the_way_the_file_is_right_in_the_end(tmp_path_factory, size, events, began):
    content, folder = bytes(number % 251 for number in range(size)), tmp_path_factory.mktemp("any")
    steps = {
        "cut": lambda at, ranges: gives(content, cut=at, ranges=ranges),
        "busy": lambda *_: fails(503),
        "hang up": lambda *_: hangs_up,
    }
    (folder / "file.bin.part").write_bytes(began)
    script = Script(*(steps[kind](at, ranges) for kind, at, ranges in events), gives(content))
    with serving(script) as url:
        script.url = url
        download(known(script, content=content), folder / "file.bin", patience=Patience(5.0, 50, 0.0))
    assert (folder / "file.bin").read_bytes() == content
    assert left(folder) == ["file.bin"]


# Whole datasets.

BATCHES = {"batches/1.bin": b"one", "batches/2.bin": b"two"}


def tarred(members, **options):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in options.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zipped(members, mode=0o644):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for name, content in members.items():
            info = zipfile.ZipInfo("placeholder")
            info.filename, info.external_attr = name, mode << 16
            packed.writestr(info, content)
    return buffer.getvalue()


PACKED = tarred(BATCHES)


def batches(*scripts, archive=PACKED, members=BATCHES):
    parts = tuple((File(name.split("/")[1], len(content), md5(content)),) for name, content in members.items())
    download = known(*scripts, content=archive, name="batches.tar.gz")
    return Dataset("made", "Made", "made", ("", "batches"), (Piece(download, parts),), "nobody's")


def files(*scripts):
    """Two files that are read as they are, or unpacked to capitals."""
    forms = [
        (File(f"{name}.GZ", 3, md5(content.upper())), File(name, 3, md5(content)))
        for name, content in (("1", b"one"), ("2", b"two"))
    ]
    pieces = [
        Piece(File(f"raw/{plain.name}", 3, plain.checksum, (script.url,)), ((packed, plain),))
        for (packed, plain), script in zip(forms, scripts, strict=True)
    ]
    return Dataset("made", "Made", "made", ("", "raw"), tuple(pieces), "nobody's")


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(folder, members):
    for name, content in members.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def test_an_archive_is_fetched_and_unpacked(tmp_path, serve):
    news = []
    watcher = Watcher(on_news=news.append)
    assert fetch(batches(serve(gives(PACKED))), tmp_path / "data", watcher=watcher, patience=QUICK) is True
    assert tree(tmp_path / "data") == BATCHES | {"batches.tar.gz": PACKED}
    assert news == ["unpacking batches.tar.gz"]


def test_what_is_there_and_right_is_never_downloaded(tmp_path, serve):
    server = serve(gives(PACKED))
    write(tmp_path, BATCHES)
    assert fetch(batches(server), tmp_path, patience=QUICK) is False
    assert fetch(batches(server), tmp_path, again=True, patience=QUICK) is False
    assert server.asked == []


def test_an_archive_that_is_there_is_unpacked_and_not_downloaded(tmp_path, serve):
    server = serve(gives(PACKED))
    write(tmp_path, {"batches.tar.gz": PACKED, "batches/1.bin": b"one"})
    assert fetch(batches(server), tmp_path, patience=QUICK) is True
    assert tree(tmp_path) == BATCHES | {"batches.tar.gz": PACKED}
    assert server.asked == []


def test_only_the_files_that_are_missing_are_downloaded(tmp_path, serve):
    first, second = serve(gives(b"one")), serve(gives(b"two"))
    write(tmp_path, {"1.GZ": b"ONE"})
    assert fetch(files(first, second), tmp_path, patience=QUICK) is True
    assert tree(tmp_path) == {"1.GZ": b"ONE", "raw/2": b"two"}
    assert (first.asked, second.asked) == ([], [None])


@pytest.mark.parametrize("name", ["batches/1.bin", "batches.tar.gz"])
def test_what_is_there_and_wrong_is_named_with_what_to_do(tmp_path, serve, name):
    server = serve(gives(PACKED))
    write(tmp_path, {name: b"eno"})
    expected = BATCHES.get(name, PACKED)
    says = rf"{name} is not as it was published: it.* {len(expected) if name[-1] == 'z' else md5(expected)[4:]}"
    with pytest.raises(LabError, match=rf"{says}.* expected\. To replace it: gyroscope data get made --again"):
        fetch(batches(server), tmp_path, patience=QUICK)
    assert tree(tmp_path) == {name: b"eno"}
    assert server.asked == []
    assert fetch(batches(server), tmp_path, again=True, patience=QUICK) is True
    assert tree(tmp_path) == BATCHES | {"batches.tar.gz": PACKED}


def test_again_unpacks_a_right_archive_and_does_not_fetch_it(tmp_path, serve):
    server = serve(gives(PACKED))
    write(tmp_path, BATCHES | {"batches.tar.gz": PACKED, "batches/1.bin": b"eno", "batches/mine.txt": b"kept"})
    assert fetch(batches(server), tmp_path, again=True, patience=QUICK) is True
    assert tree(tmp_path) == BATCHES | {"batches.tar.gz": PACKED, "batches/mine.txt": b"kept"}
    assert server.asked == []


def test_a_wrong_file_elsewhere_is_said_to_be_in_the_way(tmp_path, serve):
    write(tmp_path, {"1.bin": b"eno"})
    with pytest.raises(LabError, match=r"1.bin is in the way: its MD5 .*\. Move it elsewhere, and try again"):
        fetch(batches(serve(gives(PACKED))), tmp_path, again=True, patience=QUICK)
    assert tree(tmp_path)["1.bin"] == b"eno"


def test_an_archive_without_its_files_is_refused(tmp_path, serve):
    archive = tarred({"batches/1.bin": b"one"})
    with pytest.raises(LabError, match=r"2.bin cannot be found after batches.tar.gz was fetched"):
        fetch(batches(serve(gives(archive)), archive=archive), tmp_path, patience=QUICK)


def test_what_is_fetched_by_hand_says_how_until_it_is_there(tmp_path):
    piece = Piece(None, ((File("train/"),),))
    by_hand = Dataset("made", "Made", "made", ("",), (piece,), "nobody's", by_hand="ask nobody")
    with pytest.raises(LabError, match="made cannot be downloaded: ask nobody"):
        fetch(by_hand, tmp_path)
    (tmp_path / "train").mkdir()
    assert fetch(by_hand, tmp_path) is False


# Archives.


@pytest.fixture(params=[True, False], ids=["with filters", "before Python 3.11.4"])
def any_python(request, monkeypatch):
    if not request.param:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)


@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")
@pytest.mark.usefixtures("any_python")
@pytest.mark.parametrize(("ending", "pack"), [("tar.gz", tarred), ("zip", zipped)])
def test_an_archive_is_unpacked_over_what_is_there(tmp_path, ending, pack):
    write(tmp_path / "to", {"a/1": b"old", "a/mine": b"kept", "b": b"old"})
    members = {"a/1": b"new", "a/deep/2": b"new", "b": b"new"}
    (tmp_path / f"made.{ending}").write_bytes(pack(members))
    unpack(tmp_path / f"made.{ending}", tmp_path / "to")
    assert tree(tmp_path / "to") == members | {"a/mine": b"kept"}
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["a", "b"]


@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")
@pytest.mark.usefixtures("any_python")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("up.tar.gz", tarred({"fine": b"1", "../evil": b"2"})),
        ("deep.tar.gz", tarred({"fine": b"1", "a/../../evil": b"2"})),
        ("link.tar.gz", tarred({"evil": b""}, type=tarfile.SYMTYPE, linkname="../elsewhere")),
        ("hard.tar.gz", tarred({"evil": b""}, type=tarfile.LNKTYPE, linkname="../elsewhere")),
        ("device.tar.gz", tarred({"evil": b""}, type=tarfile.CHRTYPE)),
        ("up.zip", zipped({"fine": b"1", "../evil": b"2"})),
        ("deep.zip", zipped({"fine": b"1", "a/../../evil": b"2"})),
        ("absolute.zip", zipped({"fine": b"1", "/tmp/evil": b"2"})),
        ("backslash.zip", zipped({"fine": b"1", "..\\evil": b"2"})),
        ("drive.zip", zipped({"fine": b"1", "C:\\evil": b"2"})),
        ("link.zip", zipped({"evil": b"../elsewhere"}, mode=stat.S_IFLNK | 0o777)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_end_up_elsewhere_is_refused_and_nothing_is_unpacked(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "elsewhere").write_bytes(b"mine")
    (tmp_path / "to").mkdir()
    with pytest.raises(LabError, match=f"{name} is damaged, or not safe to unpack"):
        unpack(tmp_path / name, tmp_path / "to")
    assert tree(tmp_path) == {name: content, "elsewhere": b"mine"}
    assert left(tmp_path / "to") == []


@pytest.mark.parametrize(("ending", "pack"), [("tar.gz", tarred), ("zip", zipped)])
@pytest.mark.parametrize("keep", [0, 1, 60, -40, -9, -1])
def test_a_truncated_archive_is_refused_and_nothing_is_unpacked(tmp_path, ending, pack, keep):
    noise = hashlib.shake_256(b"").digest(100_000)
    path = tmp_path / f"made.{ending}"
    path.write_bytes(pack({"a/1": noise, "a/2": noise})[:keep])
    (tmp_path / "to").mkdir()
    with pytest.raises(LabError, match=f"made.{ending} is damaged"):
        unpack(path, tmp_path / "to")
    assert left(tmp_path / "to") == []


def test_a_folder_in_the_place_of_a_file_is_said(tmp_path):
    (tmp_path / "made.zip").write_bytes(zipped({"a": b"1"}))
    (tmp_path / "to" / "a" / "b").mkdir(parents=True)
    with pytest.raises(LabError, match=r"made.zip cannot be unpacked into .*to: Is a directory"):
        unpack(tmp_path / "made.zip", tmp_path / "to")


def test_the_note_beside_a_part_holds_the_version(tmp_path, serve):
    server = serve(gives(cut=1000, ETag='"1"', Last_Modified="Mon, 01 Jan 2024 00:00:00 GMT"), fails(404))
    with pytest.raises(LabError):
        download(known(server), tmp_path / "file.bin", patience=QUICK)
    noted = json.loads((tmp_path / "file.bin.part.json").read_text())
    assert noted == {"url": server.url, "ETag": '"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
