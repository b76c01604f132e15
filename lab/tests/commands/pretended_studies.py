"""Studies that replace the real ones."""

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers import catalogue
from gyroscope_lab.papers.catalogue import Listed, costs
from gyroscope_lab.training.archive import Archive


def pretend(monkeypatch, studies):
    """Replace the studies by these, by name."""
    each, all_of_them = costs(list(studies.values()), Lab(Archive("nowhere")))
    listed = {name: Listed("", one.title, each[name]) for name, one in studies.items()}
    monkeypatch.setattr(catalogue, "studies", lambda: studies)
    monkeypatch.setattr(catalogue, "study", studies.__getitem__)
    monkeypatch.setattr(catalogue, "index", lambda: listed | {"all": Listed("", "", all_of_them)})
