"""Clients' draws in the exchanges of a round: new minibatches and noise in each, the same in any algorithm's n-th."""

import itertools

import torch

from fedfleet.simulator.author import (
    Algorithm,
    BatchPlan,
    Encoding,
    LocalLoop,
    LocalWork,
    Message,
    Phase,
    Total,
    View,
    rng,
)
from tests.algorithms.agnostic import at, run, w, world
from tests.algorithms.harness import records

FOUR = world([(1, 0), (1, 1), (1, 2), (1, 3)])


def asking(*names: str) -> Algorithm:
    """An algorithm with an exchange a name: a client sends the example of a step, and noise of begin, step and uplink."""
    noise = lambda key: rng.uniform(key, (), torch.float64)  # noqa: E731

    def client_init(shared, client_state, client_input, key):
        return {"begin": noise(key)}

    def step(ops, shared, carry, batch, at, key):
        return {**carry, "example": batch.x[0, 1], "step": noise(key)}

    def client_final(shared, client_state, client_input, carry):
        return Message({**carry, "uplink": torch.zeros((), dtype=torch.float64)}), client_state

    class Uplink:
        error_feedback = False

        def encode(self, send, key, shared):
            return Encoding({**send, "uplink": {"": noise(key)}}, lambda residual: residual)

    work = LocalWork(
        client_init=client_init,
        loops=(LocalLoop(step=step, batches=BatchPlan(size=1, steps=1)),),
        client_final=client_final,
    )
    slots = {slot: Total() for slot in ("begin", "example", "step", "uplink")}
    phases = {name: Phase(name=name, work=work, reduce=slots, uplink=(Uplink(),)) for name in names}

    def round(state, rnd):
        found = [rnd.map_reduce(phases[n], shared=Message({"z": at(0.0)}), cohort=rnd.invite(1)) for n in names]
        return [{slot: float(f[slot]) for slot in slots} for f in found], {}

    return Algorithm(lambda z, key, problem: [], round, tuple(phases.values()), {"global": View(lambda s: at(0.0))})


def test_each_exchange_draws_anew_and_the_nth_alike_for_every_algorithm():
    three, two = ([r.state for r in records(asking(*names), FOUR, 30)] for names in (("a", "b", "a"), ("c", "d")))
    for t, seen in enumerate(three):
        for slot in ("begin", "step", "uplink"):
            assert len({draw[slot] for draw in seen}) == 3
        assert seen[:2] == two[t]
    for i, j in itertools.combinations(range(3), 2):
        pairs = {(seen[i]["example"], seen[j]["example"]) for seen in three}
        assert len(pairs) > 8  # of 16: were they drawn alike, 4


def test_drfa_asks_for_losses_on_another_minibatch_than_it_learns_from():
    """Of one client's two examples, one is learnt from, and one gives the loss: all four pairs turn up, so that E v is f."""
    pair, pairs = world([(1, 0), (1, 3)]), []
    for seed in range(60):
        options = {"batch_size": 1, "steps": 1, "lr": 0.1, "average": False, "seed": seed}
        (state,) = run(pair, 1, "drfa", w=1.0, **options)
        learnt = min((0, 3), key=lambda m: abs(w(state) - (1.0 - 0.1 * (1.0 - m))))
        measured = min((0, 3), key=lambda m: abs(float(state.losses) - (w(state) - m) ** 2 / 2))
        pairs.append((learnt, measured))
    assert min(pairs.count(p) for p in itertools.product((0, 3), repeat=2)) > 5
