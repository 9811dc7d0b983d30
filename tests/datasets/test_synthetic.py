"""Synthetic clients: a client is a function of (seed, id) alone, the law is the one that is written down."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from fedfleet.datasets import synthetic
from fedfleet.datasets.examples import FederatedDataset
from fedfleet.datasets.synthetic import SyntheticOptions, SyntheticPopulation
from fedfleet.simulator.population import LocalData

HUGE = 10**10


def load(clients: int = HUGE, seed: int = 0, **options: object) -> FederatedDataset:
    return synthetic.load(SyntheticOptions(**{"test_examples": 20, **options}), clients, seed)  # type: ignore[arg-type]


def population(clients: int = HUGE, seed: int = 0, **options: object) -> SyntheticPopulation:
    found = load(clients, seed, **options).population
    assert isinstance(found, SyntheticPopulation)
    return found


def held(local: LocalData, i: int) -> tuple[Tensor, Tensor]:
    """Examples of the i-th client of a block."""
    rows = local.rows[i, : local.counts[i]]
    return local.data["x"][rows], local.data["y"][rows]


@given(
    ids=st.lists(st.integers(0, HUGE - 1), min_size=1, max_size=40), features=st.sampled_from([1, 2, 17, 60]),
    classes=st.sampled_from([2, 3, 10]), examples=st.sampled_from([1, 7, (1, 40), (30, 33)]),
    spread=st.sampled_from([0.0, 0.5, 4.0]), draws=st.sampled_from([1, 1000, 1 << 17]),
)  # fmt: skip
def test_a_client_is_the_same_to_the_bit_in_every_block(ids, features, classes, examples, spread, draws):
    p = population(features=features, classes=classes, examples=examples, alpha=spread, beta=spread)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "DRAWS", draws)
        block = p.local_data(torch.tensor(ids))
    assert block.counts.tolist() == p.num_examples(torch.tensor(ids)).tolist()
    for i, client in enumerate(ids):
        alone = p.local_data(torch.tensor([client]))
        for a, b in zip(held(block, i), held(alone, 0), strict=True):
            assert torch.equal(a, b)


def test_the_shape_of_a_block():
    local = population(features=5, examples=(2, 9)).local_data(torch.tensor([HUGE - 1, 3, 3]))
    assert local.rows.shape == (3, int(local.counts.max()))
    assert local.data["x"].shape == (int(local.counts.sum()), 5)
    assert (local.data["x"].dtype, local.data["y"].dtype) == (torch.float32, torch.int64)
    assert local.domain.tolist() == [0, 0, 0]
    for rows, count in zip(local.rows, local.counts, strict=True):
        assert (rows[count:] == rows[0]).all()


def test_seed_and_number_decide_a_client():
    ids = torch.tensor([5])
    x = [population(clients, seed).local_data(ids).data["x"] for clients, seed in ((10, 0), (HUGE, 0), (10, 1))]
    assert torch.equal(x[0], x[1])
    assert not torch.equal(x[0], x[2])
    assert not torch.equal(x[0], population().local_data(torch.tensor([6])).data["x"])


def test_scores_are_exact_sums():
    """Also at the largest draws that there can be, so that no label depends on the order of summation."""
    largest = math.sqrt(-2 * math.log(2**-53))
    x, concept = largest * (1 + 4 * 2), largest * (1 + 4)
    features = next(m.le for m in SyntheticOptions.model_fields["features"].metadata if hasattr(m, "le"))
    assert x < 2**7  # hence 23 bits with the 16 after the point: exact as float32
    assert (features + 1) * x * concept * 2**26 < 2**53


def test_summary_is_the_law():
    p = population(examples=(10, 500))
    sizes = p.num_examples(torch.arange(200_000)).double()
    summary = p.summary()
    assert (summary.min_examples, summary.max_examples, summary.domains) == (10, 500, 1)
    assert (sizes.min(), sizes.max()) == (10, 500)
    assert summary.mean_examples == pytest.approx(float(sizes.mean()), abs=4 * float(sizes.std()) / 200_000**0.5)
    assert population(examples=50).summary()[:3] == (50, 50, 50.0)


def test_inputs_follow_the_law():
    still = population(features=4, beta=0, examples=50).local_data(torch.arange(2000)).data["x"].double()
    spread = torch.arange(1.0, 5.0).double() ** -1.2
    torch.testing.assert_close(still.mean(0), torch.zeros(4).double(), atol=0.02, rtol=0)
    torch.testing.assert_close(still.var(0), spread, atol=0.02, rtol=0.02)
    moved = population(features=4, beta=2, examples=1).local_data(torch.arange(100_000)).data["x"].double()
    covariance = 4 * (torch.ones(4, 4) + torch.eye(4)).double() + spread.diag()
    torch.testing.assert_close(moved.T.cov(), covariance, atol=0.15, rtol=0)


def test_labels_follow_the_concepts():
    same = population(alpha=0, beta=1)
    local = same.local_data(torch.arange(300))
    scores = local.data["x"].double() @ same.concept[:-1] + same.concept[-1]
    assert (scores.argmax(1) == local.data["y"]).double().mean() > 0.99  # W is rounded
    agreement = []
    for alpha in (0.2, 1.0, 4.0):
        local = population(alpha=alpha, beta=1).local_data(torch.arange(300))
        scores = local.data["x"].double() @ same.concept[:-1] + same.concept[-1]
        agreement.append(float((scores.argmax(1) == local.data["y"]).double().mean()))
    assert agreement == sorted(agreement, reverse=True)
    assert 0.9 > agreement[0] > agreement[2] > 0.1


def test_test_examples_are_of_other_clients_of_the_same_law():
    data = load(clients=1000, test_examples=3000, features=3, alpha=0, beta=1)
    assert data.test.x.shape == (3000, 3)
    mine = data.population.local_data(torch.arange(1000)).data
    assert not (set(map(tuple, mine["x"].tolist())) & set(map(tuple, data.test.x.tolist())))
    concept = data.population.concept
    assert ((data.test.x.double() @ concept[:-1] + concept[-1]).argmax(1) == data.test.y).double().mean() > 0.99


@pytest.mark.parametrize(("clients", "size", "found"), [(HUGE, 100, 100), (7, 100, 100), (7, 10, 10), (3, 1000, 150)])
def test_a_sample_of_training_examples(clients, size, found):
    data = load(clients=clients)
    sample = data.sample(size)
    assert len(sample) == found
    assert torch.equal(sample.x, data.sample(size).x)
    if clients == 7:
        all_ = data.population.local_data(torch.arange(7)).data["x"]
        assert set(map(tuple, sample.x.tolist())) <= set(map(tuple, all_.tolist()))


@pytest.mark.parametrize(
    "options",
    [{"examples": [9, 3]}, {"examples": 0}, {"features": 10**9}, {"alpha": -1}, {"beta": 5}, {"classes": 1}, {"x": 1}],
)
def test_options_out_of_range(options):
    with pytest.raises(ValidationError):
        SyntheticOptions(**options)
