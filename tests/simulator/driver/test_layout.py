"""Places of numbers in memory, which decide no bit: what is kept, and what clients are given, is laid out as new."""

from dataclasses import replace

import pytest
import torch

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.work import LocalWork
from tests.algorithms.harness import build, digits, records

WORLD = digits("classification")


def odd(leaf):
    """Return a tensor whose axes lie in the other order, and that begins four bytes late."""
    room = torch.empty(leaf.numel() + 1, dtype=leaf.dtype)[1:].view(leaf.shape[::-1])
    return room.permute(tuple(reversed(range(leaf.dim())))).copy_(leaf)


def is_as_new(tree):
    return all(a is b for a, b in zip(T.leaves(T.as_new(tree)), T.leaves(tree), strict=True))


@pytest.mark.parametrize("inner", ["serial", "batched", "factored"])
def test_a_state_of_views_gives_the_bits_of_one_that_is_new(inner):
    plain = build("fedavg", WORLD.task, steps=2, batch_size=5)
    (phase,) = plain.phases
    seen = []

    def client_init(shared, *given):
        seen.append(is_as_new(shared["z"]))
        return phase.work.client_init(shared, *given)

    def round_(state, turn):
        seen.append(is_as_new(state))
        new, metrics = plain.round(T.map(odd, state), turn)
        return T.map(odd, new), metrics

    watched = replace(
        phase, work=LocalWork(client_init=client_init, loops=phase.work.loops, client_final=phase.work.client_final)
    )
    views = plain._replace(phases=(watched,), round=round_, init=lambda *given: T.map(odd, plain.init(*given)))
    assert not is_as_new(T.map(odd, WORLD.task.init(0)))
    (*_, expected), (*_, found) = (list(records(a, WORLD, 3, inner=inner)) for a in (plain, views))
    assert all(seen)
    assert all(torch.equal(a, b) for a, b in zip(T.leaves(found.state), T.leaves(expected.state), strict=True))
