"""Studies in place of those that there are."""

from gyroscope_lab.archive import Archive
from gyroscope_lab.cli.study_tables import costs
from gyroscope_lab.laboratory import Lab
from gyroscope_lab.studies import catalogue
from gyroscope_lab.studies.catalogue import Listed


def pretend(monkeypatch, studies):
    """Let there be these studies alone, by name."""
    each, all_of_them = costs(list(studies.values()), Lab(Archive("nowhere")))
    listed = {name: Listed("", one.title, each[name]) for name, one in studies.items()}
    monkeypatch.setattr(catalogue, "studies", lambda: studies)
    monkeypatch.setattr(catalogue, "study", studies.__getitem__)
    monkeypatch.setattr(catalogue, "index", lambda: listed | {"all": Listed("", "", all_of_them)})
