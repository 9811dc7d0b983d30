"""A captured block gives what the ordinary one gives, to the bit, with every algorithm."""

import pytest
import torch
from cases import CASES, INVITE, MODEL
from harness import NET, build, digits, flat, records

from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.responses import Federation


def shorter(options):
    """To capture takes as long as there are steps: two a client, whose examples are 23 or 24."""
    steps = {"steps": 2} if options.get("steps", 0) > 2 else {}
    return {**options, "batch_size": 12, **steps} if "batch_size" in options else options


def models(name, inner, captures):
    task, options = CASES[name][0], shorter(CASES[name][1])
    world = digits(task, "iid", clients=60, net={"model": MODEL[name]} if name in MODEL else NET)
    algorithm = build(name, world.task, CohortOptions(invite=INVITE.get(name, 8)), **options)
    view = algorithm.views["global"].params
    rounds = 8 if name == "fedbuff" else 3  # its blocks are as large as versions have answers
    run = records(algorithm, world, rounds, inner=inner, captures=captures)
    return [(flat(view(r.state)), [p.train_loss for p in r.phases], [p.counts for p in r.phases]) for r in run]


BATCHED = [(name, "batched") for name in ("fedavg", "scaffold")]


@pytest.mark.parametrize(("name", "inner"), [*((name, "factored") for name in CASES), *BATCHED])
def test_a_captured_run_is_the_ordinary_one(name, inner):
    captures = Captures(after=0)
    for a, b in zip(models(name, inner, captures), models(name, inner, Captures(after=None)), strict=True):
        assert torch.equal(a[0], b[0])
        assert a[1:] == b[1:]
    assert (captures.ready > 0) == (name != "afl")  # how many domains a block has depends on who is in it


def test_whoever_is_unheard_blocks_come_in_few_sizes_and_are_replayed():
    world = digits("classification", "iid", clients=60, net=NET)
    algorithm = build("fedavg", world.task, CohortOptions(invite=48), steps=2, batch_size=12)
    view = algorithm.views["global"].params
    given = {"inner": "batched", "block_size": 24, "federation": Federation(availability=Bernoulli(0.7))}
    captures = Captures(after=0)
    runs = [list(records(algorithm, world, 16, captures=c, **given)) for c in (captures, Captures(after=None))]
    for a, b in zip(*runs, strict=True):
        assert torch.equal(flat(view(a.state)), flat(view(b.state)))
        assert [p.counts for p in a.phases] == [p.counts for p in b.phases]
    heard = {r.phases[0].counts["heard"] for r in runs[0]}
    assert len(heard) > 6
    assert 0 < captures.ready <= 3
