"""Devices: what clients' machines are like, what they take for a load, and what becomes of those that fail."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest, spearmanr
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.devices import Load, Times
from fedfleet.simulator.fleet.hardware import Assigned, Drawn, Fleet, Hardware, HeterogeneousDevices, Lognormal
from fedfleet.simulator.fleet.responses import Federation, Outcome, respond

KEY = rng.key(11)
MANY = torch.arange(20_000)
LOGNORMAL = Lognormal(KEY, Hardware.of(10.0, 36.0, 11.0, 0.02), Hardware.of(0.7, 0.5, 1.0, 0.0))
TIERS = Drawn(
    KEY,
    Hardware(*(torch.tensor(v, dtype=torch.float64) for v in ([1, 2, 3], [10, 20, 30], [1, 2, 3], [0, 0.5, 1]))),
    torch.tensor([6.0, 3.0, 1.0], dtype=torch.float64),
)


def load(clients: Tensor, steps: int = 4, **rest: float) -> Load:
    return Load(torch.full_like(clients, steps), torch.full_like(clients, 10 * steps), **rest)


def test_times_worked_out_by_hand():
    one = Assigned(Hardware.of(gflops=2.0, down_mbps=40.0, up_mbps=10.0, latency_s=0.05))
    work = Load(torch.tensor([4]), torch.tensor([30]), bytes_down=1e6, bytes_up=5e5, flop=4e8)
    times = HeterogeneousDevices(one).times(KEY, torch.tensor([0]), work)
    # 2 * 0.05 + 8e6 / 4e7 + 4e6 / 1e7 seconds of messages; 30 examples of 4e8 operations at 2e9 a second, in 4 steps
    assert float(times.fixed) == pytest.approx(0.1 + 0.2 + 0.4)
    assert float(times.step) == pytest.approx(6.0 / 4)
    assert float(times.after(torch.tensor([4]))) == pytest.approx(6.7)
    nothing = HeterogeneousDevices(one).times(
        KEY, torch.tensor([0]), Load(torch.tensor([0]), torch.tensor([0]), flop=4e8)
    )
    assert (float(nothing.fixed), float(nothing.step)) == (0.1, 0.0)


def test_a_lognormal_fleet_has_the_medians_and_spreads_it_says():
    found = LOGNORMAL.of(MANY)
    for name, values in found._asdict().items():
        median, sigma = float(getattr(LOGNORMAL.median, name)), float(getattr(LOGNORMAL.sigma, name))
        assert values.dtype == torch.float64
        if sigma:
            assert kstest((values / median).log().numpy() / sigma, "norm").pvalue > 1e-3
        else:
            assert set(values.tolist()) == {median}
    for a, b in ((0, 1), (0, 2), (1, 2)):  # a fast processor says nothing about the network
        assert spearmanr(found[a].numpy(), found[b].numpy()).pvalue > 1e-3


def test_tiers_come_in_their_shares(p_value):
    found = TIERS.of(MANY)
    counts = found.gflops.long().bincount()[1:]
    assert p_value(counts.numpy(), [12_000, 6_000, 2_000]) > 1e-3
    assert torch.equal(found.down_mbps, 10 * found.gflops)  # a device is a whole row
    assert torch.equal(found.latency_s, (found.gflops - 1) / 2)


@given(st.lists(st.integers(0, 2**53), min_size=1, max_size=20), st.sampled_from([LOGNORMAL, TIERS]), st.data())
def test_a_client_has_its_device_whoever_asks(ids: list[int], fleet: Fleet, data: st.DataObject):
    clients = torch.tensor(ids)
    order = torch.tensor(data.draw(st.permutations(range(len(ids)))))
    together, shuffled = fleet.of(clients), fleet.of(clients[order])
    for a, b in zip(together, shuffled, strict=True):
        assert torch.equal(a[order], b)
    alone = [float(v) for v in fleet.of(clients[:1])]
    assert alone == [float(v[0]) for v in together]


def test_times_stay_over_the_run_but_for_jitter():
    clients, work = MANY, load(MANY, bytes_down=1e5, bytes_up=1e5, flop=1e6)
    steady = [HeterogeneousDevices(LOGNORMAL).times(rng.key(s), clients, work) for s in (1, 2)]
    assert torch.equal(steady[0].fixed, steady[1].fixed)
    assert torch.equal(steady[0].step, steady[1].step)
    shaky = [HeterogeneousDevices(LOGNORMAL, jitter=0.3).times(rng.key(s), clients, work) for s in (1, 2)]
    factor = [(t.fixed / steady[0].fixed).log() / 0.3 for t in shaky]
    assert all(kstest(f.numpy(), "norm").pvalue > 1e-3 for f in factor)
    assert spearmanr(factor[0].numpy(), factor[1].numpy()).pvalue > 1e-3
    assert torch.allclose(shaky[0].step / steady[0].step, shaky[0].fixed / steady[0].fixed)


# Failures


class Fixed:
    """Client i answers after ``seconds(i)``."""

    def __init__(self, seconds: Callable[[Tensor], Tensor]):
        self.seconds = seconds

    def times(self, key: rng.Key, clients: Tensor, load: Load) -> Times:
        whole = self.seconds(clients.double())
        return Times(whole / 2, whole / 2 / load.steps)


def phase(clients: Tensor, seed: int = 0, **models: Any):
    key = rng.fold(rng.key(seed), "phase")
    return respond(Federation(**models), clients, torch.zeros_like(clients), load(clients), 0.0, key, key)


@pytest.mark.parametrize(("hazard", "seconds"), [(0.01, 10.0), (0.5, 2.0), (0.3, 10.0)])
def test_clients_fail_with_probability_one_minus_exp(hazard, seconds):
    found = phase(MANY, devices=Fixed(lambda c: torch.full_like(c, seconds)), hazard=hazard)
    expected = 1 - math.exp(-hazard * seconds)
    failed = found.outcome == Outcome.FAILED
    assert abs(float(failed.double().mean()) - expected) < 4 * math.sqrt(expected * (1 - expected) / len(MANY))
    # the moment of failure is exponential, given that it comes before the end
    moments = found.seconds[failed].numpy()
    law = lambda t: -torch.expm1(-hazard * torch.as_tensor(t)) / expected  # noqa: E731
    assert kstest(moments, lambda t: law(t).numpy()).pvalue > 1e-3
    assert (found.seconds[~failed] == seconds).all()
    assert (found.outcome[~failed] == Outcome.COMPLETED).all()
    assert set(found.completed.tolist()).isdisjoint(failed.nonzero().flatten().tolist())
    assert found.duration_s == seconds


def test_failures_are_drawn_afresh_for_each_phase_and_copy():
    devices = Fixed(lambda c: torch.ones_like(c))
    a, b = (phase(MANY, seed, devices=devices, hazard=math.log(2)).outcome == Outcome.FAILED for seed in (1, 2))
    assert abs(float((a & b).double().mean()) - 0.25) < 0.02
    key, copies = rng.key(3), torch.arange(64)
    twins = torch.zeros_like(copies)
    federation = Federation(devices=devices, hazard=math.log(2))
    found = respond(federation, twins, copies, load(twins), 0.0, key, key)
    assert set(found.outcome.tolist()) == {Outcome.FAILED, Outcome.COMPLETED}


def test_the_median_device_has_the_median_of_each():
    found = Hardware(
        *(torch.tensor(v, dtype=torch.float64) for v in ([3, 1, 9], [1, 4, 2], [7, 7, 8], [0.1, 0.0, 0.3]))
    )
    assert [v.tolist() for v in found.median()] == [[3.0], [2.0], [7.0], [0.1]]
