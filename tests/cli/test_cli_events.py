from typer.testing import CliRunner

from figures.made import example_run, written
from gyroscope.cli import app
from gyroscope.store import Event, LayerInfo, QuantityInfo, Writer, load

LAYERS = [LayerInfo("head.weight", "linear", (10, 16))]
QUANTITIES = {"rotation": QuantityInfo("rotation", "1", "cosine distance to initialization")}


def run(*arguments):
    return CliRunner().invoke(app, ["events", *map(str, arguments)])


def write(path, *events, step=0):
    with Writer(path, LAYERS, QUANTITIES, step=step) as writer:
        for event in events:
            assert writer.put(event)
    return path


def listed(result):
    """Step, kind and text of every line of the table."""
    lines = [line.split(maxsplit=4) for line in result.stdout.splitlines() if line.strip()[:1].isdigit()]
    return [(step, kind, text.strip()) for step, _, _, kind, text in lines]


def test_events_of_every_kind_are_listed_in_the_order_of_steps(tmp_path):
    kinds = ("start", "note", "interval", "finding", "error", "stop", "of a user")
    path = write(tmp_path / "run", *(Event(1000 * i, kind.split()[0], f"text {i}") for i, kind in enumerate(kinds)))
    assert listed(run(path)) == [(f"{1000 * i:,}", kind.split()[0], f"text {i}") for i, kind in enumerate(kinds)]


def test_kinds_can_be_chosen(tmp_path):
    path = write(tmp_path / "run", Event(0, "start", "a"), Event(1, "note", "b"), Event(2, "stop", "c"))
    assert [kind for _, kind, _ in listed(run(path, "--kind", "note", "--kind", "stop"))] == ["note", "stop"]
    result = run(path, "--kind", "notes")
    assert result.exit_code == 2
    assert "Its kinds are start, note, stop" in result.stderr


def test_events_after_the_step_of_a_resume_are_listed_on_request(tmp_path):
    path = write(tmp_path / "run", Event(0, "start", "begun"), Event(9, "stop", "crashed"))
    write(path, Event(5, "resume", "from a checkpoint"), step=5)
    assert [text for *_, text in listed(run(path))] == ["begun", "from a checkpoint"]
    assert [text for *_, text in listed(run(path, "--all"))] == ["begun", "from a checkpoint", "crashed"]
    found = load(path)
    assert [event.text for event in found.events] == ["begun", "from a checkpoint"]
    assert [event.text for event in found.all_events] == ["begun", "from a checkpoint", "crashed"]


def test_refreshing_sees_new_events(tmp_path):
    with Writer(tmp_path / "run", LAYERS, QUANTITIES) as writer:
        writer.put(Event(0, "note", "a"))
        writer.flush()
        found = load(writer.path)
        assert len(found.events) == 1
        writer.put(Event(1, "note", "b"))
        writer.flush()
        found.refresh()
        assert len(found.events) == len(found.all_events) == 2


def test_texts_of_events_cannot_control_the_terminal(tmp_path):
    path = write(tmp_path / "run", Event(0, "note", "a\x1b[2Jb"))
    assert listed(run(path)) == [("0", "note", r"a\u001b[2Jb")]


def test_a_run_without_events_or_that_is_not_there_is_one_line(tmp_path):
    written(tmp_path / "quiet", example_run(steps=3)).close()
    assert run(tmp_path / "quiet").stdout == f"{tmp_path / 'quiet'} has no events.\n"
    result = run(tmp_path / "nowhere")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
