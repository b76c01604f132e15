"""The report in a real browser: what it shows are the run's numbers, and what it offers works."""

import numpy as np
import pytest
import torch

import gyroscope
from gyroscope.store.record import Event, Scalars
from page.browser import Tab, launched
from page.made import HOSTILE, written

# The address of a comparison of two runs, as the page writes it.
COMPARED = "#compare=%5B%220%22%2C%222%22%5D"


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *[module for _ in range(3) for module in (torch.nn.Linear(16, 16), torch.nn.Tanh())], torch.nn.Linear(16, 4)
    )


def train(folder, *, frozen=None, lr=0.1, steps=40):
    """Record a small training; with `frozen`, one layer is left out of the optimizer."""
    model = network()
    held = [p for name, p in model.named_parameters() if frozen is None or not name.startswith(frozen)]
    optimizer = torch.optim.SGD(held, lr=lr)
    with gyroscope.watch(model, optimizer, folder, budget=None, detail_every=10) as monitor:
        for step in range(steps):
            if step == 30:
                optimizer.param_groups[0]["lr"] /= 10
            x = torch.randn(64, 16)
            loss = torch.nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss, test_accuracy=1 - loss.item())
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two trainings, one of them broken, a run with hostile names and an empty one, with their reports."""
    folder = tmp_path_factory.mktemp("report")
    runs = [train(folder / "good"), train(folder / "broken", frozen="2."), train(folder / "slow", lr=0.01)]
    generator = np.random.default_rng(0)
    names = [HOSTILE, '"><img src=x onerror=alert(1)>', "{{7*7}}", "${alert(1)}", "x" * 200]
    hostile = written(
        folder / f"<b>{'h' * 20}",
        {"rotation": generator.random((6, 5)), "weight_norm": np.full((6, 5), np.nan)},
        layers=names, meta={"model": HOSTILE},
        records=[Event(2, "note", HOSTILE), Scalars(1, {HOSTILE: 1.0})],
    )  # fmt: skip
    empty = written(folder / "empty", {"rotation": np.empty((0, 2))})
    one = written(folder / "one", {"rotation": np.array([[0.5]])})
    reports = {
        "one": gyroscope.report(runs[1], folder / "one.html"),
        "several": gyroscope.report(runs, folder / "several.html"),
        "strange": gyroscope.report([hostile, empty, one], folder / "strange.html"),
    }
    return {"runs": runs, **{name: path.as_uri() for name, path in reports.items()}}


@pytest.fixture(scope="module")
def browser():
    with launched() as found:
        yield found


@pytest.fixture
def tab(browser):
    """A tab that must end without a request to any host, and without an error."""
    found = Tab(browser)
    yield found
    found.page.close()
    assert found.said == []
    assert {url.partition(":")[0] for url in found.asked} <= {"file", "about", "data", "blob"}


def shown(tab, layers, steps, quantity):
    """The values that the page holds, [steps, layers]."""
    rows = tab.ask(
        """async ([layers, steps, quantity]) => {
            const rows = [];
            for (const step of steps) {
                const row = [];
                for (const layer of layers) {
                    row.push((await window.gyroscope.value(layer, step, quantity))?.mean ?? null);
                }
                rows.push(row);
            }
            return rows;
        }""",
        [list(layers), list(map(int, steps)), quantity],
    )
    return np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=np.float32)


@pytest.mark.parametrize("quantity", ["rotation", "gradient_norm", "rate_per_step"])
def test_values_are_those_of_the_run(made, tab, quantity):
    tab.open(made["one"])
    with gyroscope.load(made["runs"][1]) as run:
        at = run.where(quantity)
        np.testing.assert_array_equal(shown(tab, run.layers, at, quantity), run.series(quantity, steps=at))


def test_the_headline_and_the_table_show_the_last_values(made, tab):
    page = tab.open(made["several"] + "#run=0")
    with gyroscope.load(made["runs"][0]) as run:
        assert page.locator("h1").inner_text().startswith("good")
        assert "4 layers" in page.locator(".run-head").inner_text()
        assert f"loss {run.scalars['loss'].values[-1]:.4g}"[:9] in page.locator(".run-head").inner_text()
        rows = page.locator("table.layers tbody tr:not(.spacer)")
        assert rows.count() == len(run.layers)
        for i, name in enumerate(run.layers):
            text = rows.nth(i).inner_text()
            assert name in text
            assert f"{run.series('rotation')[-1, i]:.3g}".rstrip("0") in text


def test_hovering_over_the_heatmap_states_layer_step_and_value(made, tab):
    page = tab.open(made["one"])
    place = page.evaluate("window.gyroscope.heatmap.geometry()")
    box = page.locator(".heat").first.bounding_box()
    with gyroscope.load(made["runs"][1]) as run:
        page.mouse.move(box["x"] + place["left"] + place["w"] * 0.9, box["y"] + place["top"] + place["h"] * 0.9)
        tip = page.locator(".tip").first
        tip.wait_for()
        said = tip.inner_text()
        assert run.layers[-1] in said
        step = int(next(word for word in said.replace(",", "").split() if word.isdigit()))
        assert f"{run.series('rotation', steps=[step])[0, -1]:.3g}" in said


def test_a_finding_leads_to_its_layers_and_its_step(made, tab):
    page = tab.open(made["one"])
    with gyroscope.load(made["runs"][1]) as run:
        [finding] = [one for one in gyroscope.diagnose(run) if one.is_alarm]
        card = page.locator(".findings li").first
        assert finding.sentence in card.inner_text()
        card.get_by_role("button").first.click()
        assert [run.layers[i] for i in tab.state["layers"]] == list(finding.layers)


def test_zoom_filter_and_sort(made, tab):
    page = tab.open(made["one"])
    assert tab.state["steps"] is None
    page.locator(".heat").first.click(position={"x": 300, "y": 60})
    page.keyboard.press("+")
    tab.until("window.gyroscope.view().steps !== null")
    low, high = tab.state["steps"]
    assert 0 <= high - low < 40
    rows = page.locator("table.layers tbody tr:not(.spacer)")
    with gyroscope.load(made["runs"][1]) as run:
        turned = run.series("rotation")[-1]
    page.get_by_role("button", name="Sort by the last rotation").click()
    order = [rows.nth(i).locator(".name").inner_text() for i in range(rows.count())]
    expected = sorted(range(len(turned)), key=lambda i: -np.nan_to_num(turned[i], nan=-1))
    assert order[0] == run.layers[expected[0]]
    page.get_by_label("Search layers").fill("2.*")
    tab.until("document.querySelectorAll('table.layers tbody tr:not(.spacer)').length === 1")
    assert "2.weight" in rows.first.inner_text()


def test_a_link_returns_to_the_same_view(made, tab):
    page = tab.open(made["several"] + "#run=1&q=gradient_norm&scale=log&steps=5~20&layers=1-2")
    before = tab.state
    assert (before["run"], before["q"], before["scale"], before["steps"]) == ("1", "gradient_norm", "log", [5, 20])
    assert before["layers"] == [1, 2]
    page.reload()
    page.evaluate("window.gyroscope.ready")
    assert tab.state == before


def test_several_runs_are_listed_and_compared(made, tab):
    page = tab.open(made["several"])
    rows = page.locator("table.runs tbody tr")
    assert rows.count() == 3
    assert "Rank correlation over 3 runs" in page.inner_text("body")
    for i in (0, 2):
        rows.nth(i).get_by_role("checkbox").check()
    page.get_by_role("button", name="Compare the checked runs").click()
    tab.until("document.querySelectorAll('figure canvas').length >= 2")
    text = page.inner_text("body")
    assert "2 runs compared" in text
    assert "optimizer.lr" in text
    assert "0.01" in text


def test_names_are_text(made, tab):
    page = tab.open(made["strange"] + "#run=0")
    text = page.inner_text("body")
    assert HOSTILE in text
    assert "{{7*7}}" in text
    assert page.locator("img[src=x]").count() == 0


def test_an_empty_run_and_a_run_of_one_number_are_pages(made, tab):
    page = tab.open(made["strange"] + "#run=1")
    assert "no step measured yet" in page.inner_text("body")
    page = tab.open(made["strange"] + "#run=2")
    assert shown(tab, ["block0.conv0.weight"], [0], "rotation").tolist() == [[0.5]]


def test_an_old_browser_is_told_what_is_missing(made, browser):
    old = Tab(browser)
    old.page.add_init_script("delete window.DecompressionStream")
    old.page.goto(made["one"])
    old.until("document.body.innerText.includes('DecompressionStream')")
    assert "browser" in old.page.inner_text("body")
    old.page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", ["several", "several#run=1", f"several{COMPARED}"])
def test_the_page_is_accessible(made, browser, theme, view):
    from axe_playwright_python.sync_playwright import Axe

    name, _, fragment = view.partition("#")
    tab = Tab(browser, color_scheme=theme)
    tab.open(f"{made[name]}#{fragment}")
    assert tab.page.locator("h1", has_text="2 runs compared").count() == ("compare" in fragment)
    violations = Axe().run(tab.page, options={"resultTypes": ["violations"]}).response["violations"]
    tab.page.close()
    serious = [
        (one["id"], one["nodes"][0]["html"][:200]) for one in violations if one["impact"] in ("serious", "critical")
    ]
    assert serious == []


@pytest.mark.parametrize("width", [400, 1300])
def test_nothing_is_wider_than_the_screen(made, browser, width):
    tab = Tab(browser, viewport={"width": width, "height": 900})
    for fragment in ("", "#run=1", COMPARED):
        tab.open(made["several"] + fragment)
        assert tab.ask("document.documentElement.scrollWidth") <= width
    tab.page.close()
