import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gyroscope
from commands.pretended_studies import pretend
from gyroscope.cli import app
from gyroscope_lab.cli.study_tables import results_in
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.catalogue import studies
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.trial import Trial


def run(*arguments):
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)])


def rows(result):
    """The cells of all tables."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GYROSCOPE_DATA", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def figure1(tmp_path_factory):
    """The first figure, reproduced from trainings of three epochs, and the printed output."""
    folder = tmp_path_factory.mktemp("figure1")
    where = ["--out", folder / "results", "--runs", folder / "runs"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gyroscope_lab.engine.laboratory._SMOKE", 0.05)
        yield run("rotation/fig1", "--scale", "smoke", "--engine", "serial", *where), folder


def test_a_study_writes_its_folder_and_says_so(figure1):
    result, folder = figure1
    assert result.exit_code == 0, result.output
    made = folder / "results" / "rotation" / "fig1"
    assert sorted(path.name for path in made.iterdir()) == ["README.md", "figure.png", "figure.svg", "result.json"]
    assert all(str(path) in result.stdout for path in made.iterdir())
    assert json.loads((made / "result.json").read_text())["scale"] == "smoke"


def test_what_is_printed_is_what_the_json_holds(figure1):
    result, folder = figure1
    kept = json.loads((folder / "results" / "rotation" / "fig1" / "result.json").read_text())
    printed = rows(result)
    for verdict in kept["findings"]:
        assert [verdict["says"], verdict["paper"], verdict["here"], verdict["verdict"]] in printed
    [table] = kept["tables"]
    by_name = {cells[0]: cells for cells in printed}
    for name, test, *_ in table["rows"]:
        assert by_name[name][1] == test


def test_results_of_a_larger_scale_are_not_replaced(here):
    there = here / "results" / "rotation" / "fig1" / "result.json"
    there.parent.mkdir(parents=True)
    there.write_text('{"scale": "full"}')
    result = run("rotation/fig1", "--scale", "smoke", "--engine", "serial")
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "holds rotation/fig1 at scale full" in said
    assert "--out FOLDER" in said
    assert there.read_text() == '{"scale": "full"}'
    assert not (here / "runs").exists()


def test_trainings_are_kept_as_runs_and_shared_with_other_studies(figure1):
    first, folder = figure1
    assert len(first.stderr.splitlines()) == len(gyroscope.store.runs(folder / "runs")) == 5
    where = ["--out", folder / "others", "--runs", folder / "runs"]
    other = run("rotation/table2", "--scale", "smoke", "--engine", "serial", *where)
    assert other.exit_code == 0, other.output
    assert other.stderr == ""


def test_the_list_has_every_study_with_its_title_and_what_it_takes(here):
    result = run("list")
    assert result.exit_code == 0, result.output
    text = " ".join(" ".join(cells) for cells in rows(result))
    for study in studies().values():
        assert study.name in text
        assert study.title.split(":")[0] in text
    [figure1] = [cells for cells in rows(result) if cells[0] == "rotation/fig1"]
    # 5 × 15 epochs and 3 × 5 × 60 epochs of 0.045 s, which is 40.5 s: Pythons add up in more than one way.
    assert figure1[2] == "5: 3.4 s"
    assert figure1[3] in ("15: 40 s", "15: 41 s")
    assert figure1[4].startswith("25: ≈ ")
    assert run().stdout == result.stdout


def test_the_list_says_which_results_are_in_and_at_which_scale(figure1, here):
    _, folder = figure1
    broken = folder / "results" / "rotation" / "fig9"
    broken.mkdir(parents=True)
    (broken / "result.json").write_text("{")
    by_name = {cells[0]: cells[-1] for cells in rows(run("list", "--out", folder / "results"))}
    assert [by_name[f"rotation/{name}"] for name in ("fig1", "fig9", "table2")] == ["smoke", "unreadable", "–"]


def test_the_list_counts_only_the_tasks_that_were_asked_for():
    by_name = {cells[0]: cells[-2] for cells in rows(run("list", "--task", "c100-resnet"))}
    # 5 × 100 epochs of 0.34 s; and a study of another network.
    assert (by_name["rotation/fig1"], by_name["rotation/fig4"]) == ("5: 2.8 min", "–")


def nothing(lab):
    return []


def report(lab):
    return Report(tables=(Table("numbers", ("what", "value"), (("a", 1.5), ("b", None))),))


def refuse(lab):
    raise LabError("this one went wrong")


def interrupt(lab):
    raise KeyboardInterrupt


def of_cifar(lab):
    return [Trial(one, Recipe("SGD", 0.1)) for one in lab.tasks(["c10-cnn1", "c100-resnet"])]


MADE_UP = {
    study.name: study
    for study in (
        Study("one/fig1", "Figure 1", nothing, report),
        Study("one/fig2", "Figure 2", nothing, refuse),
        Study("one/table1", "Table 1", nothing, report),
        Study("two/fig1", "Figure 1", of_cifar, report),
        Study("two/fig2", "Figure 2", nothing, interrupt),
    )
}


@pytest.fixture
def made_up(monkeypatch):
    pretend(monkeypatch, MADE_UP)


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("given", "made"),
    [
        (["one/fig1"], ["one/fig1"]),
        (["one/table1", "one/fig1", "one/fig1"], ["one/fig1", "one/table1"]),
        (["one/[ft]*1"], ["one/fig1", "one/table1"]),
    ],
)
def test_studies_are_chosen_by_name_or_pattern_each_once(here, given, made):
    result = run(*given)
    assert result.exit_code == 0, result.output
    assert (
        sorted(str(path.parent.relative_to(here / "results")) for path in here.glob("results/**/result.json")) == made
    )


@pytest.mark.usefixtures("made_up")
def test_a_study_that_fails_does_not_keep_the_others_from_being_made(here):
    result = run("one/*")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "gyroscope: one/fig2: this one went wrong",
        "gyroscope: 1 of 3 studies failed: one/fig2.",
    ]
    assert (here / "results" / "one" / "table1" / "result.json").exists()


@pytest.mark.usefixtures("made_up")
def test_an_interrupt_says_how_to_go_on():
    result = run("two/fig2")
    assert result.exit_code == 130
    assert result.stderr == "gyroscope: Interrupted. The same command resumes where it stopped.\n"


@pytest.mark.usefixtures("made_up")
def test_missing_data_is_told_of_before_anything_is_trained(here, monkeypatch):
    monkeypatch.setattr(Lab, "run", lambda *_: pytest.fail("training started"))
    result = run("all", "--scale", "full", "--data", "datasets")
    assert result.exit_code == 1
    said = "5 studies at scale full cannot be trained without cifar-10, cifar-100"
    where = f"Looked in {here / 'datasets'}: there is no such folder"
    how = "To fetch what is missing: gyroscope data get cifar-10 cifar-100 --to datasets"
    assert result.stderr == f"gyroscope: {said}. {where}. {how}\n"
    only = run("two/fig1", "--scale", "full", "--data", "datasets", "--task", "c100-resnet")
    assert "without cifar-100. Looked in" in only.stderr


@pytest.mark.usefixtures("made_up")
def test_data_of_trainings_that_are_known_is_not_needed(here, monkeypatch):
    monkeypatch.setattr(Archive, "missing", lambda self, trials: [])
    monkeypatch.setattr(Lab, "run", lambda self, trials: [])
    assert run("two/fig1", "--scale", "full").exit_code == 0


def test_data_that_a_study_finds_missing_itself_comes_with_the_command_to_fetch_it(monkeypatch):
    def look(lab):
        raise LabError("There is no folder data to look for MNIST in. Give one that exists.")

    pretend(monkeypatch, {"one/fig1": Study("one/fig1", "Figure 1", nothing, look)})
    assert "To fetch what is missing: gyroscope data get mnist --to data\n" in run("one/fig1").stderr


@pytest.mark.usefixtures("made_up")
def test_studies_without_the_task_are_left_out_and_named(here):
    result = run("two/fig1", "one/fig1", "--task", "c10-cnn2")
    assert result.exit_code == 0, result.output
    assert result.stderr == "Left out, because they have no task c10-cnn2: two/fig1\n"
    alone = run("two/fig1", "--task", "c10-cnn2")
    assert (alone.exit_code, "must name tasks of this study (c10-cnn1, c100-resnet" in alone.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["rotation/fig99"],
            "There is no study 'rotation/fig99'. Did you mean rotation/fig9? To list them: gyroscope reproduce list",
        ),
        (["rotation/fig1", "zz*"], "There is no study 'zz*'. To list them: gyroscope reproduce list"),
        (["rotation/fig1", "--task", "c10"], "The task must be one of "),
        (["rotation/fig1", "--jobs", "0"], "`--jobs` must be a whole number ≥ 1, got 0."),
        (["rotation/fig1", "--scale", "huge"], "Invalid value for '--scale'"),
        (["rotation/fig1", "--engine", "horses"], "Invalid value for '--engine'"),
        (["rotation/fig1", "--out", "file"], "`--out` must be a folder, got the file file."),
        (["rotation/fig1", "--runs", "file/runs"], "--runs file/runs cannot be written: Not a directory."),
    ],
)
def test_what_is_not_understood_exits_with_two_before_training(here, monkeypatch, arguments, says):
    monkeypatch.setattr(Lab, "run", lambda *_: pytest.fail("training started"))
    (here / "file").write_text("mine")
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_what_a_study_writes_does_not_depend_on_the_language_of_the_system(tmp_path, monkeypatch):
    # What is opened without saying how is encoded as the system's language wants it.
    monkeypatch.setattr("io.text_encoding", lambda encoding, *_: encoding or "ascii")
    report = Report(verdicts=(Verdict("ρ is best at 3⁻³", paper="88 ± 1 %", here="–", holds=None),))
    study = Study("rotation/fig0", "Figure 0: α", lambda lab: [], lambda lab: report)
    study.save(Lab(Archive(tmp_path)), report, tmp_path)
    folder = tmp_path / "rotation" / "fig0"
    assert "ρ is best at 3⁻³" in (folder / "README.md").read_bytes().decode()
    assert json.loads((folder / "result.json").read_bytes())["title"] == "Figure 0: α"
    assert results_in(tmp_path, "rotation/fig0") == "smoke"


def test_numbers_are_printed_and_what_there_is_not_is_a_dash(monkeypatch):
    one = Study(
        "one/fig1",
        "Figure 1",
        nothing,
        lambda lab: Report(
            tables=report(lab).tables, verdicts=(Verdict("[bold] is not markup", paper="1", here="2", holds=None),)
        ),
    )
    pretend(monkeypatch, {"one/fig1": one})
    assert rows(run("one/fig1")) == [
        ["[bold] is not markup", "1", "2", "undecided"],
        ["a", "1.50"],
        ["b", "–"],
    ]


def test_the_list_says_how_long_a_study_takes_that_trains_nothing(monkeypatch):
    one = Study("one/fig1", "Figure 1", nothing, report, beside={"small": 104.0})
    two = Study("one/fig2", "Figure 2", nothing, report, beside={"small": 16.0})
    pretend(monkeypatch, {study.name: study for study in (one, two)})
    assert [row[-4:-1] for row in rows(run("list"))] == [
        ["none", "none: 1.7 min", "none"],
        ["none", "none: 16 s", "none"],
        ["none", "none: 2.0 min", "none"],
    ]


@pytest.mark.parametrize("command", [["data", "get"], ["data", "list"], ["train"], ["compare"], ["show"], ["demo"]])
def test_the_commands_that_messages_name_are_there(command):
    assert CliRunner().invoke(app, [*command, "--help"]).exit_code == 0


def test_what_is_known_is_shown_without_training_or_data(tmp_path):
    """The trainings in results/runs are kept; studies of them need no GPU and no images."""
    kept = tmp_path / "runs"
    one_less = shutil.ignore_patterns("*adaptcopy*")
    shutil.copytree(Path(__file__).parents[3] / "results" / "runs" / "c10-cnn1", kept / "c10-cnn1", ignore=one_less)
    arguments = ["reproduce", "rotation/fig1", "rotation/fig7", "--scale", "full", "--task", "c10-cnn1", "--known"]
    places = ["--runs", str(kept), "--out", str(tmp_path), "--data", str(tmp_path / "none")]
    shown = CliRunner().invoke(app, [*arguments, *places])
    assert "88.38" in shown.output
    assert "rotation/fig7: The study cannot be shown in part: 1 trainings are not in" in shown.output
    page = json.loads((tmp_path / "rotation" / "fig1" / "result.json").read_text())
    assert page["not_trained"] == []
    assert len(page["numbers"]["cells"]) == 5
    assert not (tmp_path / "none").exists()
