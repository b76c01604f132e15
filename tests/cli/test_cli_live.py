"""`gyroscope live`: the address, its options, and its end."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from typer.testing import CliRunner

from gyroscope.cli import app
from gyroscope.errors import MissingExtraError, PageError
from gyroscope.store.example import write_example

runner = CliRunner()


@pytest.fixture
def started(tmp_path):
    """The command in a process of its own, on a folder with one run."""
    write_example(tmp_path / "runs" / "first").close()
    begun = []

    def start(*arguments):
        program = [sys.executable, "-m", "gyroscope", "live", *arguments]
        process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def address_of(process):
    """The line that holds the address and nothing else."""
    for line in iter(process.stdout.readline, ""):
        if line.startswith("http://"):
            return line.removesuffix("\n")
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_the_folder_runs_until_it_is_interrupted(started, how):
    process = started("--port", "0")
    address = address_of(process)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", address)
    with urllib.request.urlopen(address.replace("/?", "/api/runs?"), timeout=20) as answer:
        assert [one["name"] for one in json.load(answer)] == ["first"]
    process.send_signal(how)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == (0 if how == signal.SIGINT else -how)


@pytest.fixture
def served(monkeypatch):
    """What the command would serve, instead of serving it."""
    from gyroscope.page import server

    found = []
    monkeypatch.setattr(server.Server, "run", lambda self: found.append(self))
    yield found
    for one in found:
        one._socket.close()


def test_a_host_that_others_can_reach_is_warned_of(tmp_path, served):
    done = runner.invoke(app, ["live", str(tmp_path), "--host", "0.0.0.0", "--port", "0"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Warning: it listens on 0.0.0.0.")
    assert "not encrypted" in lines[0]
    assert lines[-1] == served[0].address
    assert served[0].access.refused_host(socket.gethostname()) is None


def test_nobody_is_warned_of_this_machine_alone(tmp_path, served):
    done = runner.invoke(app, ["live", str(tmp_path), "--host", "localhost", "--port", "0"])
    assert "Warning" not in done.output


def test_names_of_proxies_are_passed_on(tmp_path, served):
    names = ["--allow-host", "hub.example.org", "--allow-host", "x.devtunnels.ms"]
    assert runner.invoke(app, ["live", str(tmp_path), "--port", "0", *names]).exit_code == 0
    assert served[0].access.allowed == {"hub.example.org", "x.devtunnels.ms"}


def test_a_browser_is_opened_if_asked_for_with_an_address_that_works_once(tmp_path, served, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    runner.invoke(app, ["live", str(tmp_path), "--port", "0"])
    runner.invoke(app, ["live", str(tmp_path), "--port", "0", "--open"])
    (address,) = opened
    assert served[1].access.token not in address
    assert served[1].access.takes(address.partition("token=")[2])


def refused(*arguments):
    done = runner.invoke(app, ["live", *arguments])
    assert "Traceback" not in done.output
    return done.exit_code, done.stderr


def test_a_busy_port_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, said = refused(str(tmp_path), "--port", str(port))
    assert code == 1
    assert said.startswith(f"gyroscope: Port {port} is in use")
    assert f"Try port {port + 1}" in said


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--port", "70000"), 2, "`--port` must be a whole number from 0 to 65535, got 70000. Try 8421."),
        (("--allow-host", "http://x/"), 1, "`allow_hosts` must be names of hosts"),
        (("--host", "nowhere.invalid"), 1, "`host` must be an address or a name of this machine"),
    ],
)
def test_invalid_options_are_rejected_in_one_line(tmp_path, arguments, code, words):
    found, said = refused(str(tmp_path), *arguments)
    assert found == code
    assert words in said
    assert said.count("\n") == 1


def test_a_folder_that_is_not_there_is_named(tmp_path):
    code, said = refused(str(tmp_path / "none"))
    assert code == 1
    assert f"{tmp_path / 'none'}, which is not a folder" in said


def test_a_folder_without_permission_is_named(tmp_path, monkeypatch):
    from gyroscope.page import live

    monkeypatch.setattr("os.access", lambda *_: False)  # the user who runs the tests may read everything
    code, said = refused(str(tmp_path))
    assert code == 2
    assert "not readable" in said
    with pytest.raises(PageError, match=rf"must be one that you may read, got {tmp_path}"):
        live(tmp_path)


@pytest.mark.parametrize("library", ["starlette", "uvicorn"])
def test_without_its_libraries_the_extra_is_named(tmp_path, monkeypatch, library):
    for name in [name for name in sys.modules if name.startswith("gyroscope.page.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    assert refused(str(tmp_path)) == (
        1,
        "gyroscope: The live page needs starlette and uvicorn, which are not installed: "
        "pip install 'gyroscope[live]'\n",
    )
    with pytest.raises(MissingExtraError):
        import gyroscope.page.server  # noqa: F401
