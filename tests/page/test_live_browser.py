"""The live page in a real browser: it follows a training, survives its kill and resume, and trusts no name."""

import contextlib
import http.server
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from gyroscope.store import Event, LayerInfo, Rows, Scalars, Writer, load
from page.browser import launched, page_in
from page.live_server import QUANTITIES, Training, serving
from page.test_live_server import Proxy, proxied

# A training without torch, whose import takes seconds: it takes a step for each line that it reads, until the last.
TRAINING = """
import sys
import numpy as np
from gyroscope.store import LayerInfo, QuantityInfo, Rows, Writer
step = int(sys.argv[2])
about = {"rotation": QuantityInfo("rotation", "1", "cosine distance to initialization")}
with Writer(sys.argv[1], [LayerInfo("layer", "linear", (2, 2))], about, step=step) as writer:
    print("begun", flush=True)
    for line in sys.stdin:
        if line == "end\\n":
            break
        step += 1
        writer.put(Rows(0, np.array([step]), {"rotation": np.array([[step / 100]], dtype=np.float32)}))
        writer.flush()
        print(step, flush=True)
"""
HOSTILE = "<img src=x onerror=window.hacked=1>"


@pytest.fixture(scope="module")
def browser():
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ask(folder):
    with serving(folder) as asker:
        yield asker


@pytest.fixture
def page(browser):
    with page_in(browser) as found:
        yield found


SHOWN = """async ([layer, step]) => {
    try {
        const shown = await gyroscope.value(layer, step, "rotation");
        return shown?.last === step ? shown : null;
    } catch {
        return null;  // the run is not open yet
    }
}"""


def waited(page, holds):
    """What `holds` returns, once that is true."""
    end = time.monotonic() + 20
    while not (found := holds()):
        assert time.monotonic() < end, page.inner_text("body")[:500]
        page.wait_for_timeout(50)
    return found


def shows(page, layer, step):
    """The rotation that the page shows, once it shows one for this step."""
    return waited(page, lambda: page.evaluate(SHOWN, [layer, step]))["mean"]


def asks_for_detail(page, run):
    with page.expect_response(lambda answer: answer.url.endswith("/sample")) as answered:
        page.get_by_role("button", name="in detail").click()
    assert answered.value.status == 204
    assert (run / "sample").read_text() == "20\n"


def test_the_page_follows_a_training(page, ask, folder):
    training = Training(folder / "first").proceed(3)
    page.goto(ask.server.address)
    assert "token" not in page.url
    page.get_by_role("link", name="first", exact=True).click()
    for _ in range(3):
        assert shows(page, "block1.weight", training.step - 1) == pytest.approx((training.step - 1) / 1000)
        training.proceed(2)
    training.note("half-way")
    page.get_by_text("step 8, 9 measured").wait_for()
    training.end()
    page.locator("h1").get_by_text("ended").wait_for()
    with load(folder / "first") as run:
        assert shows(page, "block1.weight", 8) == run.series("rotation")[8, 1]


def test_a_link_that_is_pressed_while_the_list_changes_is_followed(page, ask, folder):
    training = Training(folder / "first").proceed(3)
    page.goto(ask.server.address)
    page.get_by_role("link", name="first", exact=True).hover()
    page.mouse.down()
    training.proceed(2)
    page.wait_for_timeout(1500)  # the list reads the new steps meanwhile
    page.mouse.up()
    assert shows(page, "block1.weight", 4) == pytest.approx(4 / 1000)


def test_new_runs_appear_in_the_list_and_deleted_ones_leave_it(page, ask, folder):
    page.goto(ask.server.address)
    Training(folder / "late").proceed().end()
    page.get_by_role("link", name="late", exact=True).wait_for()
    shutil.rmtree(folder / "late")
    page.get_by_role("link", name="late", exact=True).wait_for(state="detached")


@contextlib.contextmanager
def started(folder, step):
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(folder), str(step)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def proceed(steps):
        for _ in range(steps):
            training.stdin.write("\n")
            training.stdin.flush()
            reached = int(training.stdout.readline())
        return reached

    try:
        assert training.stdout.readline() == "begun\n"
        yield training, proceed
    finally:
        if training.poll() is None:
            training.kill()
            training.communicate()


def test_the_page_survives_the_kill_of_a_training_and_its_resume(page, ask, folder):
    with started(folder / "killed", 0) as (training, proceed):
        proceed(4)
        page.goto(f"{ask.server.address}#run=killed")
        assert shows(page, "layer", 4) == pytest.approx(0.04)
        training.send_signal(signal.SIGKILL)
        training.communicate()
        page.locator("h1").get_by_text("interrupted").wait_for()
    with started(folder / "killed", 2) as (training, proceed):
        page.locator("h1").get_by_text("running").wait_for()
        proceed(5)
        assert shows(page, "layer", 7) == pytest.approx(0.07)
        training.communicate("end\n")
        page.locator("h1").get_by_text("ended").wait_for()


def test_a_run_that_is_deleted_while_it_is_shown_is_reported(browser, ask, folder):
    Training(folder / "gone").proceed(2).end()
    with page_in(browser, expected=["status of 410"]) as page:
        page.goto(f"{ask.server.address}#run=gone")
        shows(page, "block1.weight", 1)
        shutil.rmtree(folder / "gone")
        page.locator("#banner").get_by_text("deleted").wait_for()
        assert page.locator("h1").is_visible()


def test_the_button_asks_the_training_for_detail(page, ask, folder):
    training = Training(folder / "asked").proceed(2)
    page.goto(f"{ask.server.address}#run=asked")
    asks_for_detail(page, folder / "asked")
    training.end()


def test_names_and_notes_are_text_whatever_they_contain(page, ask, folder):
    name = f"{HOSTILE}'\"&#60;".replace("/", "")
    layers = [LayerInfo(f"{HOSTILE}.{i}", HOSTILE, (2, 2)) for i in range(2)]
    with Writer(folder / name, layers, QUANTITIES, meta={"model": HOSTILE, HOSTILE: HOSTILE}) as writer:
        writer.put(Rows(0, np.arange(2), {"rotation": np.ones((2, 2), dtype=np.float32)}))
        writer.put(Scalars(1, {HOSTILE: 1.0}))
        writer.put(Event(1, "note", f"</script><script>window.hacked=1</script>{HOSTILE}"))
        writer.put(Event(1, "finding", f"warning: {HOSTILE}"))
    page.goto(ask.server.address)
    page.get_by_role("link", name=name, exact=True).click()
    page.locator("h1").get_by_text(name).wait_for()
    shows(page, 0, 1)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0


def test_the_page_works_behind_a_proxy_with_a_prefix(page, ask, folder):
    training = Training(folder / "proxied").proceed(2)
    with proxied(ask.server.port) as port:
        page.goto(f"http://127.0.0.1:{port}{Proxy.prefix}/?{ask.query}#run=proxied")
        assert page.url == f"http://127.0.0.1:{port}{Proxy.prefix}/#run=proxied"
        shows(page, "block1.weight", 1)
        assert page.context.cookies()[0]["path"] == Proxy.prefix
        training.proceed()
        shows(page, "block1.weight", 2)
        asks_for_detail(page, folder / "proxied")
        page.goto("about:blank")
    training.end()


def test_where_events_do_not_come_through_the_page_asks(browser, ask, folder):
    training = Training(folder / "polled").proceed(2)
    with page_in(browser, expected=["Failed to load resource"]) as page:
        page.route(lambda url: url.endswith("/api/changes"), lambda route: route.abort())
        page.goto(f"{ask.server.address}#run=polled")
        shows(page, "block1.weight", 1)
        training.proceed()
        shows(page, "block1.weight", 2)
    training.end()


def test_behind_a_proxy_that_keeps_events_back_the_page_asks(page, ask, folder):
    training = Training(folder / "kept").proceed(2)
    with proxied(ask.server.port, whole=True) as port:
        page.goto(f"http://127.0.0.1:{port}{Proxy.prefix}/?{ask.query}#run=kept")
        shows(page, "block1.weight", 1)
        training.proceed()
        shows(page, "block1.weight", 2)
        page.goto("about:blank")
    training.end()


def test_a_page_that_nobody_sees_holds_no_connection_and_catches_up_when_it_is_seen(page, ask, folder):
    training = Training(folder / "hidden").proceed(2)
    clients = ask.server._application._clients
    others = set(clients)
    page.goto(f"{ask.server.address}#run=hidden")
    shows(page, "block1.weight", 1)
    waited(page, lambda: clients - others)
    hide = "hidden => { Object.defineProperty(document, 'hidden', { get: () => hidden, configurable: true });"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    waited(page, lambda: not clients - others)
    training.proceed()
    page.evaluate(hide, False)
    shows(page, "block1.weight", 2)
    waited(page, lambda: clients - others)
    training.proceed()
    shows(page, "block1.weight", 3)
    training.end()


class Site(http.server.BaseHTTPRequestHandler):
    """Another site, with a link to the page."""

    link = ""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(f'<link rel="icon" href="data:,"><a href="{self.link}">the page</a>'.encode())

    def log_message(self, *_):
        pass


def test_a_link_on_another_site_leads_to_the_page(browser, ask):
    """A notebook on localhost is another site than 127.0.0.1, and its links carry no cookie with SameSite=Strict."""
    site = http.server.HTTPServer(("127.0.0.1", 0), type("Linked", (Site,), {"link": ask.server.address}))
    thread = threading.Thread(target=site.serve_forever, args=(0.05,))
    thread.start()
    try:
        with page_in(browser, expected=["status of 403"]) as page:
            page.goto(f"http://localhost:{site.server_address[1]}/")
            page.get_by_role("link", name="the page").click()
            page.get_by_role("link", name="first", exact=True).wait_for()
            assert page.url == f"http://{ask.host}/"
    finally:
        site.shutdown()
        thread.join()
        site.server_close()


def test_without_the_token_the_page_says_what_to_open(browser, ask):
    with page_in(browser, expected=["status of 403"]) as page:
        page.goto(f"http://{ask.host}/")
        assert page.get_by_text("Open the page with the whole address").is_visible()


def test_a_folder_without_runs_says_so(browser, tmp_path):
    with serving(tmp_path) as ask, page_in(browser) as page:
        page.goto(ask.server.address)
        page.get_by_text("no runs").first.wait_for()
        Training(tmp_path / "one").proceed().end()
        page.get_by_role("link", name="one", exact=True).wait_for()
