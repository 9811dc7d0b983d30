"""The contract of every algorithm, on a few runs of its case (``cases.py``), each made once (``histories.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.responses import Federation
from tests.algorithms.cases import ALIKE, ASYNCHRONOUS, CASES, NO_MEAN, OWN_WEIGHTS, ROWS
from tests.algorithms.harness import build, digits, flat, records
from tests.algorithms.histories import History, How, history
from tests.parts import slow_but
from tests.simulator.device.nominal import DEVICE

FOLDED = ("fedavg", "fedopt", "scaffold", "drfa", "qffl", "extra_step", "cdma_ada", "codasca", "fedmm", "gt_gda", "mcd")
"""Algorithms that do different things to weights: their factors are folded into one tensor sooner or never, too."""
NETS = {"logistic": FOLDED, "lenet": ("fedavg", "scaffold", "cdma_ada", "fedmm", "mcd", "fedrep", "fedsr")}
"""Other nets, and with which algorithms each is tried."""
OTHER_NETS = (
    ("fedavg", "logistic"),
    ("cdma_ada", "logistic"),
    ("mcd", "logistic"),
    ("fedavg", "lenet"),
    ("fedrep", "lenet"),
)
"""Those that are tried at every landing."""
ORDINARY = ("cdma_ada", "fedbuff", "mcd")
"""Algorithms whose device runs are tried at every landing: the others' are slow, and rarely break."""
CAPTURED = ("afl", "cdma_ada")
"""Algorithms whose captured runs are."""
BATCHED_TOO = ("fedavg", "scaffold", "fedsr")
"""Algorithms whose captured and device runs are tried one by one with the batched executor too."""


EVEN = How("factored", even=True, dtype=torch.float32)


def test_every_registered_algorithm_has_a_case():
    assert set(CASES) == set(ALGORITHMS)


def options_of(name: str) -> Mapping[str, Any]:
    """Return the fields of the options of a row's algorithm."""
    return ALGORITHMS[name.partition(",")[0]].options.model_fields


def check_close(one: History, other: History, tolerance: float) -> None:
    """Check that two runs are one, but for rounding."""
    for a, b in zip(one.models, other.models, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert one.counts == other.counts
    for a, b in zip(one.losses, other.losses, strict=True):
        assert [x is None for x in a] == [x is None for x in b]  # phases that took no gradient
        assert [x for x in a if x is not None] == pytest.approx([x for x in b if x is not None], rel=1e-4, abs=1e-6)


def check_equal(one: History, other: History) -> None:
    """Check that two runs are one, to the bit."""
    assert all(map(torch.equal, one.models, other.models))
    assert one.losses == other.losses
    assert one.counts == other.counts


@pytest.mark.parametrize("name", ROWS)
class TestContract:
    """A run is one client after the other, in double precision, with rates that fall, unless it says otherwise."""

    def test_batched_is_serial(self, name):
        """Also where blocks have other sizes and are filled up otherwise."""
        serial = history(name, How())
        check_close(serial, history(name, How("batched", block_size=3)), 1e-10)
        assert float((serial.models[-1] - serial.initial).abs().max()) > 1e-3

    @pytest.mark.quick
    def test_factored_is_serial(self, name):
        check_close(history(name, How()), history(name, How("factored")), 1e-12)

    def test_rates_fall_as_the_schedule_says(self, name):
        """Each round is that of an algorithm with the round's own rates, where no answers are of earlier rounds.

        So are clients' own models, whose rates they are told, and what they keep.
        """
        if name not in ASYNCHRONOUS and "lr_schedule" in options_of(name):
            one, other = (history(name, How("factored", by_hand=by_hand)) for by_hand in (False, True))
            check_close(one, other, 1e-12)
            assert one.told == [pytest.approx(told, rel=1e-12) for told in other.told]
            torch.testing.assert_close(one.kept, other.kept, rtol=1e-10, atol=1e-10)

    def test_optimisers_of_clients_start_afresh_in_every_loop(self, name):
        """In one step of a loop momentum is nothing, unless it is that of another loop, or of an earlier round."""
        if "client_optimizer" in options_of(name):
            one, other = (history(name, How("factored", momentum=momentum)) for momentum in (0.0, 0.9))
            check_close(one, other, 1e-12)
            torch.testing.assert_close(one.kept, other.kept, rtol=1e-10, atol=1e-10)

    def test_clients_count_by_their_examples_or_alike(self, name):
        alike, none = name.partition(",")[0] in ALIKE, name in NO_MEAN
        usual = set() if none else {"alike"} if alike else {"examples"}
        assert history(name, How()).weights == OWN_WEIGHTS.get(name, usual)

    def test_another_seed_is_another_run(self, name):
        one, other = history(name, How("factored")), history(name, How("factored", seed=1))
        last = len(other.models) - 1
        assert not torch.equal(one.models[last] - one.initial, other.models[last] - other.initial)

    def test_a_run_goes_on_from_a_checkpoint(self, name):
        check_equal(history(name, How("factored")), history(name, How("factored", resumed=True)))

    def test_devices_are_told_what_phases_really_send(self, name):
        if name in ASYNCHRONOUS:  # their answers come in later rounds
            return
        for how in (How("factored"), EVEN):
            run = history(name, how)
            phases = [counts for of_round in run.counts for counts in of_round]
            again = len(run.loads) // len(phases)  # who asks for chances has devices asked first
            assert len(phases) * again == len(run.loads) > 0
            for counts, load in zip(phases, run.loads[again - 1 :: again], strict=True):
                online = counts["invited"] - counts["unavailable"]
                # FedAWE hands a model and a number back to those heard, after their work.
                back = 8 + run.initial.numel() * how.dtype.itemsize if name == "fedawe" else 0
                assert load.bytes_down * online + back * counts["completed"] == counts["bytes_down"]
                assert counts["bytes_up"] % max(counts["completed"], 1) == 0
                if counts["completed"] == counts["invited"]:
                    assert int(load.steps.sum()) == counts["client_steps"]


@pytest.mark.parametrize("name", slow_but(ROWS, *ORDINARY))
def test_a_device_comes_to_what_the_cpu_does(name):
    check_close(history(name, EVEN), history(name, replace(EVEN, device=str(DEVICE))), 2e-5)


@pytest.mark.parametrize("name", slow_but(ROWS, *CAPTURED))
def test_a_captured_run_is_the_ordinary_one(name):
    captured = history(name, replace(EVEN, captured=True))
    check_equal(history(name, EVEN), captured)
    by_domain = name in ("afl", "cluster_fedvarp")  # how many domains a block has depends on who is in it
    assert (captured.captures > 0) != by_domain


@pytest.mark.parametrize(
    "name", slow_but((*FOLDED, "fedprox", "ditto", "coda_plus", "fedprox_sgda"), "fedavg", "cdma_ada")
)
def test_a_run_whose_rates_fall_is_captured_as_one_family(name):
    how = replace(EVEN, falls=True, block_size=12)
    captured = history(name, replace(how, captured=True))
    check_equal(history(name, how), captured)
    assert captured.captures > 0 or name == "qffl"  # whose rate times its inverse is not always 1


@pytest.mark.parametrize(
    ("name", "model"),
    slow_but([(name, model) for model, names in NETS.items() for name in names], *OTHER_NETS),
)
def test_factored_is_serial_with_other_nets(name, model):
    check_close(history(name, How(model=model)), history(name, How("factored", model=model)), 1e-12)


@pytest.mark.parametrize("name", slow_but(FOLDED, "scaffold", "cdma_ada", "qffl", "mcd"))
def test_factored_is_serial_wherever_factors_are_folded(name):
    for at in (0.0, 1e9):
        check_close(history(name, How()), history(name, How("factored", fold_at=at)), 1e-12)


@pytest.mark.parametrize("name", slow_but(BATCHED_TOO, "fedavg"))
def test_batched_blocks_are_captured_and_run_on_a_device(name):
    batched = replace(EVEN, inner="batched")
    there = replace(batched, device=str(DEVICE))
    for how in (batched, there):
        captured = history(name, replace(how, captured=True))
        check_equal(history(name, how), captured)
        assert captured.captures > 0
    check_close(history(name, batched), history(name, there), 2e-5)


def test_whoever_is_unheard_blocks_come_in_few_sizes_and_are_replayed():
    where = digits("classification", "iid", clients=60)
    algorithm = build("fedavg", where.task, CohortOptions(size=48), steps=1, batch_size=12)
    view = algorithm.views["global"].params
    given = {"inner": "batched", "block_size": 24, "federation": Federation(availability=Bernoulli(0.7))}
    captures = Captures(after=0)
    runs = [list(records(algorithm, where, 12, captures=c, **given)) for c in (captures, Captures(after=None))]
    for a, b in zip(*runs, strict=True):
        assert torch.equal(flat(view(a.state)), flat(view(b.state)))
        assert [p.counts for p in a.phases] == [p.counts for p in b.phases]
    heard = {r.phases[0].counts["completed"] for r in runs[0]}
    assert len(heard) > 6
    assert 0 < captures.ready <= 3
