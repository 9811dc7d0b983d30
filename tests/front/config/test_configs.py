"""Every configuration that comes with fedfleet can be read, and every table's rows are runs of its configuration."""

from pathlib import Path

import pytest
import torch

from fedfleet.commands import paper
from fedfleet.config import schema as config
from fedfleet.config import tuning
from fedfleet.experiments import trials

CONFIGS = Path(__file__).parents[3] / "configs"
TABLES = sorted(CONFIGS.rglob("*_table.yaml"))


@pytest.mark.parametrize("path", sorted({*CONFIGS.rglob("*.yaml")} - {*TABLES}), ids=lambda p: p.stem)
def test_configurations(path):
    found = config.load(path)
    assert config.load(found) == found
    assert config.load(found, {"seed": 7}) == config.load(path, {"seed": 7})
    if found.tune is not None:
        assert tuning.checked(found.tune, found.rounds)
    for trial in trials.distinct(trials.planned(config.with_overrides(found, {"tune": None}))):
        for section in ("algorithm", "task"):
            config.options(trial.config, section)


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_tables(path):
    table = paper.read(path)
    labels = config.load(path.parent / table.config).compare or {}
    compared = table.compared(labels)
    assert {*compared, *compared.values(), *table.paper} <= {*labels}


def test_fashion_mnist_can_be_dealt_to_fedomgs_clients():
    """A hundred of them under Dirichlet(0.1), for each seed of a partition that one may try first."""
    said = config.load(CONFIGS / "fedomg" / "fashion_mnist.yaml")
    labels = torch.arange(10).repeat_interleave(6000)
    for seed in range(3):
        dealt = config.options(said, "population.partition").split(labels, None, said.population.clients, seed)
        assert int(dealt.offsets.diff().min()) >= 20
