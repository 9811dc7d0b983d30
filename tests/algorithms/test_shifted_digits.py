"""The federation FedMM was calibrated on: who holds what. What is learnt there takes minutes: ``shifted_digits.py`` measures it."""

import pytest
import torch
from shifted_digits import ROWS, SHIFTS, trial


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize(("p", "labelled"), [(1.0, [700, 0]), (0.5, [350, 350]), (0.75, [525, 175]), (None, [700])])
def test_clients_hold_their_shares(shift, p, labelled):
    made = trial(shift, p, 0)
    population = made.world.population
    everyone = torch.arange(population.size)
    assert population.labelled.tolist() == labelled
    assert population.num_examples(everyone).tolist() == ([1400] if p is None else [700, 700])
    assert len(population.indices.unique()) == 1400
    assert len(made.x) == len(made.y) == 397
    seen = {tuple(row.tolist()) for row in population.data["x"][700:].flatten(1)}
    assert len(seen & {tuple(row.tolist()) for row in made.x.flatten(1)}) == 0
    assert made.x.shape[1:] == (1, 8, 8)


def test_a_quarter_turn_three_times_less_is_thirty_degrees():
    """Three turns by 30 degrees are nearly one by 90."""
    blob = torch.exp(-((torch.arange(8) - 3.5)[:, None] ** 2 / 8 + (torch.arange(8) - 5.0) ** 2 / 4)).view(1, 1, 8, 8)
    turned = blob
    for _ in range(3):
        turned = SHIFTS["rot30"](turned)
    quarter = min((turned - torch.rot90(blob, k, (2, 3))).abs().max() for k in (1, 3))
    assert float(quarter) < 0.25 < float((turned - blob).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("row", ["source only", "central SGDA", "FedMM p=1, mu=0.5, eta3=0.3"])
def test_rows_run(row):
    name, p, options = ROWS[row]
    found = trial("bright", p, 1, "none" if name == "fedavg" else "dann").accuracy(name, 10, 1, **options)
    assert 0.05 < found < 0.9
