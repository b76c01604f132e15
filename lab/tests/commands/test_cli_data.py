import pytest
from typer.testing import CliRunner

from gyroscope_lab.cli.data import data_app
from gyroscope_lab.data import catalogue
from gyroscope_lab.data.catalogue import Dataset, File, Piece
from lab.test_download import BATCHES, PACKED, Script, batches, fails, gives, md5, serving, tree, write


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.delenv("GYROSCOPE_DATA", raising=False)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(data_app, list(map(str, arguments)))


@pytest.fixture
def server(monkeypatch):
    """A server with the only two datasets: an archive and a file."""
    script = Script(gives(PACKED))
    with serving(script) as url:
        script.url = url
        word = File("word.txt", 5, md5(b"Hello"), (url.replace("file.bin", "word.txt"),))
        words = Dataset("words", "Words", "words", ("", "words"), (Piece(word, ((word,),)),), "Anybody's")
        by_hand = Piece(None, ((File("train/"),),))
        large = Dataset("large", "Large", "large", ("large",), (by_hand,), "Somebody's", by_hand="ask somebody")
        monkeypatch.setattr(catalogue, "DATASETS", (batches(script), words, large))
        yield script


def cells(output, name):
    (row,) = (line for line in output.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in row.strip("│").split("│")]


def test_every_dataset_is_listed_with_its_files_and_size(tmp_path, run):
    result = run("list", "--data", tmp_path)
    assert result.exit_code == 0
    assert cells(result.stdout, "mnist") == ["mnist", "MNIST", "4", "11.6 MB", "no", "–"]
    assert cells(result.stdout, "tiny-imagenet") == ["tiny-imagenet", "Tiny ImageNet", "1", "248.1 MB", "no", "–"]
    assert cells(result.stdout, "imagenet") == ["imagenet", "ImageNet 2012", "–", "–", "by hand", "–"]
    assert all(cells(result.stdout, known.name) for known in catalogue.DATASETS)
    assert f"Looked in {tmp_path}." in result.stdout


def test_a_folder_that_is_not_there_yet_is_said_to_be_so(tmp_path, run):
    result = run("list", "--data", tmp_path / "none")
    assert result.exit_code == 0
    assert f"Looked in {tmp_path / 'none'}, which does not exist yet." in result.stdout


def test_the_folder_is_the_option_or_the_environment_or_data(tmp_path, run, server, monkeypatch):
    for folder in ("given", "named", "data"):
        write(tmp_path / folder, {"word.txt": b"Hello"})
    monkeypatch.chdir(tmp_path)
    assert cells(run("list").stdout, "words")[-2:] == ["yes", "data"]
    monkeypatch.setenv("GYROSCOPE_DATA", "named")
    assert cells(run("list").stdout, "words")[-2:] == ["yes", "named"]
    assert cells(run("list", "--data", "given").stdout, "words")[-2:] == ["yes", "given"]
    assert "named/word.txt" in run("check").stdout
    assert "given/word.txt" in run("check", "--data", "given").stdout
    assert "already in named" in run("get", "words").stdout
    for option in ("--to", "--data"):
        assert "already in given" in run("get", "words", option, "given").stdout


def test_the_home_folder_may_be_written_with_a_tilde(tmp_path, run, server, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, {"sets/word.txt": b"Hello"})
    for command in (["list"], ["check", "words"], ["get", "words"]):
        result = run(*command, "--data", "~/sets")
        assert result.exit_code == 0
        assert str(tmp_path / "sets") in result.stdout


@pytest.mark.parametrize(
    ("there", "state", "where"),
    [
        ({}, "no", None),
        (BATCHES, "yes", "batches"),
        ({"1.bin": b"one", "2.bin": b"two"}, "yes", ""),
        ({"batches/2.bin": b"two"}, "1 of 2 files", "batches"),
        ({"batches.tar.gz": PACKED}, "packed", "batches.tar.gz"),
    ],
    ids=["none", "all", "elsewhere", "some", "packed"],
)
def test_what_is_here_is_said(tmp_path, run, server, there, state, where):
    write(tmp_path, there)
    row = cells(run("list", "--data", tmp_path).stdout, "made")
    assert row[2:] == ["1", "0.0 MB", state, "–" if where is None else str(tmp_path / where)]


def test_what_is_got_is_fetched_unpacked_and_credited(tmp_path, run, server):
    result = run("get", "made", "--to", tmp_path / "new")
    assert result.exit_code == 0
    assert result.stdout == f"made is now in {tmp_path / 'new'}, and right. nobody's.\n"
    assert "batches.tar.gz" in result.stderr
    assert "unpacking batches.tar.gz" in result.stderr
    assert tree(tmp_path / "new") == BATCHES | {"batches.tar.gz": PACKED}
    again = run("get", "made", "made", "--to", tmp_path / "new")
    assert (again.exit_code, again.stderr) == (0, "")
    assert again.stdout == f"made is already in {tmp_path / 'new'}, and right. nobody's.\n"
    assert server.asked == [None]


def test_what_is_wrong_is_replaced_only_when_told_to(tmp_path, run, server):
    write(tmp_path, {"batches/1.bin": b"eno"})
    result = run("get", "made", "--to", tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "1.bin is not as it was published: its MD5 is" in result.stderr
    assert "gyroscope data get made --again" in result.stderr
    assert run("get", "made", "--to", tmp_path, "--again").exit_code == 0
    assert tree(tmp_path)["batches/1.bin"] == b"one"


def test_one_that_fails_does_not_keep_the_others_from_being_got(tmp_path, run, server):
    server.steps = (fails(404), gives(PACKED))
    result = run("get", "words", "large", "made", "--to", tmp_path)
    assert result.exit_code == 1
    assert "gyroscope: word.txt cannot be downloaded: " in result.stderr
    assert "the server answered 404 Not Found" in result.stderr
    assert "gyroscope: large cannot be downloaded: ask somebody" in result.stderr
    assert result.stdout.startswith("made is now in ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["get", "check"])
def test_an_unknown_name_exits_with_two_before_anything_is_done(tmp_path, run, server, command):
    result = run(command, "made", "mdae", "--data", tmp_path)
    assert result.exit_code == 2
    assert "gyroscope: No dataset is called 'mdae'. Did you mean made? There are: made, words, large" in result.stderr
    assert (tree(tmp_path), server.asked) == ({}, [])


def test_to_get_nothing_is_not_understood(run):
    result = run("get")
    assert result.exit_code == 2
    assert "Missing argument" in result.stderr


def test_an_interruption_says_that_what_came_is_kept(tmp_path, run, server, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("gyroscope_lab.data.download.download", interrupt)
    result = run("get", "made", "--to", tmp_path)
    assert result.exit_code == 130
    assert "gyroscope: Interrupted. The same command resumes the download." in result.stderr


def test_all_that_is_here_is_checked_and_how_is_said(tmp_path, run, server):
    write(tmp_path, BATCHES | {"word.txt": b"Hello"})
    result = run("check", "--data", tmp_path)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"right  made  {tmp_path / 'batches/1.bin'}: right by its MD5",
        f"right  made  {tmp_path / 'batches/2.bin'}: right by its MD5",
        f"right  words  {tmp_path / 'word.txt'}: right by its MD5",
    ]


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ({"batches/1.bin": b"eno"}, "1.bin: its MD5 is "),
        ({"batches/1.bin": b"ones"}, "1.bin: it has 4 bytes, and 3 are expected"),
        ({"batches.tar.gz": b"tar"}, "batches.tar.gz: it has 3 bytes, and "),
    ],
    ids=["checksum", "size", "archive"],
)
@pytest.mark.parametrize("names", [["made"], []])
def test_what_is_wrong_exits_with_one(tmp_path, run, server, there, says, names):
    write(tmp_path, BATCHES | there)
    result = run("check", *names, "--data", tmp_path)
    assert result.exit_code == 1
    assert [line[:5] for line in result.stdout.splitlines() if says in line] == ["wrong"]


@pytest.mark.parametrize("names", [["made"], []])
def test_a_dataset_of_which_a_part_is_missing_exits_with_one(tmp_path, run, server, names):
    write(tmp_path, {"batches/1.bin": b"one"})
    result = run("check", *names, "--data", tmp_path)
    assert result.exit_code == 1
    assert "wrong  made lacks 2.bin; to fetch it: gyroscope data get made" in result.stdout


def test_an_archive_alone_lacks_nothing(tmp_path, run, server):
    write(tmp_path, {"batches.tar.gz": PACKED})
    result = run("check", "made", "--data", tmp_path)
    assert (result.exit_code, result.stdout.count("right by its MD5")) == (0, 1)


def test_a_named_dataset_that_is_not_here_exits_with_one(tmp_path, run, server):
    result = run("check", "made", "--data", tmp_path)
    assert result.exit_code == 1
    assert f"wrong  made is not in {tmp_path}; to fetch it: gyroscope data get made" in result.stdout


def test_an_empty_folder_has_nothing_wrong_in_it(tmp_path, run, server):
    result = run("check", "--data", tmp_path)
    assert result.exit_code == 0
    said = "To list those that can be fetched: gyroscope data list"
    assert result.stdout == f"There are no datasets in {tmp_path}. {said}\n"


@pytest.mark.parametrize("command", ["list", "get", "check"])
def test_help_names_the_folder_and_gives_an_example(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    for word in ("--data", "GYROSCOPE_DATA", f"gyroscope data {command}"):
        assert word in result.stdout
