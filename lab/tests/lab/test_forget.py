from gyroscope.base.whole_file import whole_file
from gyroscope_lab.engine.run_one import run_one
from gyroscope_lab.training.archive import OneFolder, forget
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.trial import Trial

TRIAL = Trial(task("digits").lasting(1), Recipe("SGD", 0.1, records=True), keeps=True, follows=True)


def test_forgetting_a_trial_takes_what_it_wrote_and_nothing_of_anybody_else(tmp_path):
    archive = OneFolder(tmp_path / "mine", TRIAL)
    first = run_one(TRIAL, archive)
    others = {archive.root / "run.txt": "precious", archive.root / "sub" / "thesis.tex": "precious too"}
    for path, text in others.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (archive.root / "reference.new").touch()  # of a disk that was full
    with whole_file(archive.root / "rates.pt") as new:
        half = new.name
    (archive.root / half).touch()  # of a process that was killed
    forget(archive, [TRIAL])
    left = [path for path in archive.root.rglob("*") if path.is_file() and ".claims" not in path.parts]
    assert {path: path.read_text() for path in left} == others
    assert archive.result(TRIAL) is None
    for path in others:
        path.unlink()
    (archive.root / "sub").rmdir()
    assert run_one(TRIAL, archive) == first
