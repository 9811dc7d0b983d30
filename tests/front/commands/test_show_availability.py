"""``fedfleet show availability``: who is online under a configuration, as a table and a picture, and what a kind says of itself."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from fedfleet.commands import show_availability
from fedfleet.config.availability import AVAILABILITY
from fedfleet.config.schema import load
from fedfleet.experiments.experiment import Experiment
from fedfleet.report.online_figures import ROWS, figure
from fedfleet.simulator.fleet.availability import InRounds
from tests.front.commands.lines import line

TINY: dict[str, Any] = {
    "rounds": 30, "population": {"clients": 150}, "task": {"model": "logistic"}, "algorithm": {"batch_size": 1},
    "cohort": {"size": 4}, "executor": {"kind": "local"}, "availability": {"kind": "blocks", "groups": 3, "rounds": 5},
}  # fmt: skip


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    return TINY


def test_rounds_are_shown_as_a_run_has_them():
    config = load(TINY)
    seen, model = show_availability.look(config), cast(InRounds, Experiment(config).federation.availability)
    none = torch.zeros(150, dtype=torch.float64)
    for t in range(30):
        online = model.during(t).online(torch.tensor(0), torch.arange(150), none)
        assert seen.online[:, t].tolist() == online.tolist()
    assert (seen.clients, seen.at.tolist(), seen.unit) == (150, list(range(30)), "round")
    assert seen.long_run is not None
    assert np.allclose(seen.long_run, 1 / 3)
    drawn = figure(seen).axes
    image = drawn[0].images[0]
    assert image.get_array().shape == (ROWS, 30)
    assert image.get_extent() == [-0.5, 29.5, ROWS - 0.5, -0.5]
    assert drawn[1].lines[0].get_ydata().tolist() == seen.online.mean(0).tolist()
    assert drawn[1].lines[1].get_ydata() == pytest.approx([1 / 3] * 2)


def test_moments_are_shown_over_a_time_that_suits_the_process():
    horizons = {
        "markov, mean_on_s: 600, mean_off_s: 1800": (24000 / 3600, "virtual hours"),
        "diurnal": (72, "virtual hours"),
    }
    for kind, (end, unit) in horizons.items():
        seen = show_availability.look(load(TINY, [f"availability={{kind: {kind}}}"]))
        assert seen.at[-1] == pytest.approx(end * 199 / 200)
        assert (seen.online.shape, seen.unit) == ((150, 200), unit)
        model: Any = Experiment(load(TINY, [f"availability={{kind: {kind}}}"])).federation.availability
        seconds = torch.full((150,), float(seen.at[77]) * 3600, dtype=torch.float64)
        assert seen.online[:, 77].tolist() == model.online(torch.tensor(0), torch.arange(150), seconds).tolist()


def test_the_table_and_the_picture(command, tiny, tmp_path):
    status, told, _ = command("show", "availability", tiny, "availability.groups=2", "--out", tmp_path / "a.svg")
    assert status == 0
    assert all(text in told for text in ("blocks", "150", "30 rounds", "50 %", str(tmp_path / "a.svg")))
    assert command("show", "availability", tiny, "availability.groups=2", "--out", tmp_path / "b.svg")[0] == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    equal = command("show", "availability", tiny, "availability={kind: bernoulli, rate: 0.7}", "population.clients=100")
    assert equal[0] == 0
    assert "-0.00" not in equal[1]
    line(command("show", "availability", tiny, "--out", tmp_path / "a.pdf"), "--out=")
    line(command("show", "availability", "blocks", "--out", tmp_path / "a.svg"), "--out=")


def test_every_kind_says_its_law(command, subtests):
    for name, kind in AVAILABILITY.items():
        with subtests.test(name):
            told = kind.source.splitlines()
            assert [line.partition(":")[0] for line in told][:3] == ["online", "chance", "stationary"]
            assert all(line.partition(":")[2].strip() for line in told)
    page = command("show", "availability", "markov_rounds")[1]
    assert "FedAU" in page
    assert "rates.floor" in page
