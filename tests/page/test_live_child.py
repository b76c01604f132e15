"""`watch(live=True)`: a page in a process of its own, which ends with the training however that ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from http.cookiejar import CookieJar
from urllib.parse import urljoin

import pytest
import torch

import gyroscope
from gyroscope.errors import MonitorError
from gyroscope.monitor import live_page

# A training without torch, whose import takes seconds.
TRAINING = """
import os, signal, sys, time
from pathlib import Path
from gyroscope.monitor import live_page
signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell that runs the tests may have it ignored
address = live_page.show(Path(sys.argv[1]), 0)
if "fork" in sys.argv and os.fork() == 0:  # as a data loader does, which may outlive the training
    os.write(1, f"{os.getpid()}\\n".encode())  # at once: two processes write lines here
    os.close(1)
    time.sleep(60)
    os._exit(0)
os.write(1, f"{address} {live_page._children[0]._process.pid}\\n".encode())
sys.stdin.readline()
"""


def opened(address):
    """A browser of sorts that has opened the address."""
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    with browser.open(address, timeout=20) as answer:
        assert b"gyroscope" in answer.read().lower()
        assert "token" not in answer.url
    return lambda path: json.load(browser.open(urljoin(address, path), timeout=20))


def answers(address):
    try:
        with socket.create_connection(re.search(r"//([\d.]+):(\d+)/", address).groups(), timeout=10):
            return True
    except OSError:
        return False


def ends(holds, seconds=20):
    end = time.monotonic() + seconds
    while holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def children(monkeypatch):
    """The pages that a test starts, which end with it."""
    monkeypatch.setattr(live_page, "_children", started := {})
    yield started
    for child in started.values():
        child.end()


def watched(path, **options):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gyroscope.watch(model, optimizer, path, **options)


def test_the_page_shows_the_run_and_stays_after_close_with_those_that_follow(tmp_path, children, capfd):
    with watched(tmp_path / "first", live=True) as monitor:
        ask = opened(monitor.live)
        assert [(one["name"], one["state"]) for one in ask("api/runs")] == [("first", "running")]
    assert capfd.readouterr().err.splitlines()[-1] == monitor.live
    ends(lambda: [one["state"] for one in ask("api/runs")] != ["ended"])
    with watched(tmp_path / "second", live=True) as second:
        assert second.live == monitor.live
        assert capfd.readouterr().err == ""
        ends(lambda: [one["name"] for one in ask("api/runs")] != ["first", "second"])
    (child,) = children.values()
    child.end()
    assert not child.serves
    assert child._process.returncode == 0


def test_a_page_that_has_ended_is_started_again_and_one_of_a_parent_is_not_used(tmp_path, children):
    first = live_page.show(tmp_path, 0)
    children[0].end()
    second = live_page.show(tmp_path, 0)
    assert first != second
    children[0]._parent += 1  # as in a forked process
    inherited = children[0]
    assert live_page.show(tmp_path, 0) not in (first, second)
    inherited.end()
    assert inherited._process.poll() is None  # it is not this process's to end
    inherited._parent -= 1
    inherited.end()


def test_without_live_there_is_no_page(tmp_path, children):
    with watched(tmp_path / "run") as monitor:
        assert monitor.live is None
    assert children == {}


def test_a_port_can_be_chosen_and_a_busy_one_is_a_warning(tmp_path, children, caplog):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with watched(tmp_path / "run", live=port) as monitor:
            assert monitor.live is None
    assert f"The live page was not started, and training continues: Port {port} is in use" in caplog.text
    assert not (tmp_path / "run" / "run.sqlite-wal").exists()


def test_a_child_that_has_ended_before_it_is_asked_is_the_same_warning(tmp_path, children, caplog, monkeypatch):
    class Ended(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.wait()

    monkeypatch.setattr(live_page, "_PROGRAM", "raise SystemExit")
    monkeypatch.setattr(live_page.subprocess, "Popen", Ended)
    assert live_page.show(tmp_path, 0) is None
    assert "training continues: its process has ended at once." in caplog.text


def test_a_child_that_ends_at_once_is_a_warning(tmp_path, children, caplog, monkeypatch):
    monkeypatch.setattr(live_page, "_PROGRAM", "raise SystemExit")
    assert live_page.show(tmp_path, 0) is None
    assert "training continues: its process has ended at once." in caplog.text
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert live_page.show(tmp_path, 0) is None
    assert "No such file" in caplog.text


@pytest.mark.parametrize("given", [0, -1, 70000, "yes", 8421.0, None])
def test_other_values_are_rejected(tmp_path, given):
    with pytest.raises(MonitorError, match=r"`live` must be True, False or a port from 1 to 65535, got .* Try True\."):
        watched(tmp_path / "run", live=given)


@pytest.mark.parametrize(
    ("how", "fork"), [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGINT, False), (None, False)]
)
def test_the_page_ends_with_the_training(tmp_path, how, fork):
    program = [sys.executable, "-c", TRAINING, str(tmp_path), *["fork"] * fork]
    training = subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with training:
        lines = sorted(training.stdout.readline() for _ in range(1 + fork))
        address, child = lines[-1].split()
        assert answers(address)
        if how is None:
            training.stdin.close()
        else:
            training.send_signal(how)
        training.wait(20)
        ends(lambda: is_running(int(child)))
        assert not answers(address)
        if fork:
            assert is_running(int(lines[0]))
            os.kill(int(lines[0]), signal.SIGKILL)


def test_other_ranks_start_no_page(tmp_path, children, monkeypatch):
    monkeypatch.setattr("gyroscope.monitor.resume.rank", lambda: 1)
    with watched(tmp_path / "run", live=True) as monitor:
        assert monitor.live is None
    assert children == {}
