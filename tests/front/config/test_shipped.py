"""Configurations that come with the package are found by their names, from any folder."""

from __future__ import annotations

import pytest

import fedfleet
from fedfleet.config import shipped
from fedfleet.simulator.errors import ConfigError


def test_a_name_is_the_file_of_the_package_unless_there_is_one_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fedfleet.load("quickstart") == fedfleet.load(shipped.FOLDER / "quickstart.yaml")
    assert fedfleet.load("cdma/auc_mnist").rounds == fedfleet.load(shipped.FOLDER / "cdma" / "auc_mnist.yaml").rounds
    (tmp_path / "quickstart.yaml").write_text("rounds: 7\n")
    assert fedfleet.load("quickstart.yaml").rounds == 7
    for absent in ("quickstar", "../quickstart", str(tmp_path / "none.yaml"), "a" * 300):
        with pytest.raises(ConfigError):
            fedfleet.load(absent)


def test_every_one_says_what_it_is():
    named = dict(shipped.names())
    assert {"quickstart", "afl/adult_table"} < named.keys()
    assert [name for name, about in named.items() if not about or about.startswith("rounds")] == []
