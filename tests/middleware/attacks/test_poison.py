"""Examples that attackers hold, and those their success is measured on."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.middleware.attacks.attackers import Attackers, drawn
from fedfleet.middleware.attacks.kinds.poison import Backdoor, LabelFlip
from fedfleet.middleware.attacks.poisoned import Poisoned
from fedfleet.simulator.held_out import HeldOut
from fedfleet.simulator.population import InMemoryPopulation

pytestmark = pytest.mark.quick

SIZES = [5, 9, 1, 6, 8]
BAD = Attackers(torch.tensor([1, 3]))


def clients(dtype: torch.dtype = torch.uint8) -> InMemoryPopulation:
    """Five clients with images of 4 x 4 pixels, of which no two are alike, dealt at random."""
    total = sum(SIZES)
    gen = torch.Generator().manual_seed(0)
    x = torch.arange(total * 16).reshape(total, 1, 4, 4).remainder(250).to(dtype)
    y = torch.randint(0, 10, (total,), generator=gen)
    offsets = torch.tensor([0, *SIZES]).cumsum(0)
    return InMemoryPopulation({"x": x, "y": y}, torch.randperm(total, generator=gen), offsets, torch.zeros(5).long())


def held_by(population: Any, ids: list[int], *, held: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    local = population.local_data(torch.tensor(ids))
    rows, counts = (local.held.rows, local.held.counts) if held else (local.rows, local.counts)
    return [tuple(local.data[k][r[:n]] for k in ("x", "y")) for r, n in zip(rows, counts, strict=True)]


def poisoned(attack: Any, whole: Any, seed: int = 0) -> Poisoned:
    return Poisoned(whole, BAD, lambda x, y: attack.poison(x, y, 10), attack.poisoned_share, seed)


@pytest.mark.parametrize(
    ("attack", "law"),
    [
        (LabelFlip(share=0), lambda y: 9 - y),
        (LabelFlip(share=0, source=4, target=7), lambda y: torch.where(y == 4, 7, y)),
    ],
)
def test_attackers_hold_wrong_labels_and_nobody_else_does(attack, law):
    whole = clients()
    found, before = (held_by(p, [0, 1, 2, 3, 4]) for p in (poisoned(attack, whole), whole))
    for client, ((x, y), (x0, y0)) in enumerate(zip(found, before, strict=True)):
        assert torch.equal(x, x0)
        assert torch.equal(y, law(y0) if client in (1, 3) else y0)
    assert sum(int((law(y) != y).sum()) for c, (_, y) in enumerate(before) if c in (1, 3)) > 0
    assert torch.equal(whole.data["y"], clients().data["y"]), "what all clients share was written into"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("share", "counts"), [(0.5, {1: 5, 3: 3}), (0.1, {1: 1, 3: 1}), (1.0, {1: 9, 3: 6})])
def test_a_share_of_attackers_images_get_the_pattern_and_the_label(share, counts, dtype):
    attack = Backdoor(share=0, target=3, size=2, value=0.6, examples=share)
    whole = clients(dtype)
    pixel = 153 if dtype == torch.uint8 else 0.6
    found, before = (held_by(p, [0, 1, 2, 3, 4]) for p in (poisoned(attack, whole), whole))
    for client, ((x, y), (x0, y0)) in enumerate(zip(found, before, strict=True)):
        turned = (x != x0).flatten(1).any(1)
        assert int(turned.sum()) == counts.get(client, 0)
        assert (y[turned] == 3).all()
        assert torch.equal(y[~turned], y0[~turned])
        want = x0[turned].clone()
        want[:, :, 2:, 2:] = pixel
        assert torch.equal(x[turned], want)


def test_what_a_client_holds_depends_on_the_seed_and_nobody_else():
    attack = Backdoor(share=0, examples=0.5, size=1)
    population = poisoned(attack, clients())
    (alone,) = held_by(population, [1])
    for ids in ([1, 3], [4, 1], [0, 2, 1, 3]):
        among = held_by(population, ids)[ids.index(1)]
        assert all(torch.equal(a, b) for a, b in zip(alone, among, strict=True))
    other = held_by(poisoned(attack, clients(), seed=1), [1])[0]
    assert not torch.equal(alone[0], other[0])
    local = population.local_data(torch.tensor([0, 2]))
    assert local.data["x"] is population.whole.data["x"], "a block without attackers was copied"


def test_what_is_held_out_of_work_is_left_as_it_is():
    for order in ("around", "within"):
        whole = HeldOut(clients().keeping(torch.arange(29) != 14), 0.25, 0)
        if order == "around":
            population = poisoned(LabelFlip(share=0), whole)
            ids = [0, 1, 3]
            now, before = (held_by(p, ids, held=True) for p in (population, whole))
            assert all(torch.equal(a, b) for x, y in zip(now, before, strict=True) for a, b in zip(x, y, strict=True))
            work, clean = (held_by(p, ids) for p in (population, whole))
            assert torch.equal(work[1][1], 9 - clean[1][1])
            assert torch.equal(work[0][1], clean[0][1])


def test_a_poisoned_population_is_otherwise_the_one_it_was():
    whole = clients()
    population = poisoned(LabelFlip(share=0), whole)
    ids = torch.arange(5)
    assert population.size == 5
    assert population.summary() == whole.summary()
    assert torch.equal(population.num_examples(ids), torch.tensor(SIZES))
    assert torch.equal(population.grouped(ids).domains(ids), ids)
    assert torch.equal(population.domains(ids), whole.domains(ids))
    assert torch.equal(held_by(population.to(torch.device("cpu")), [1])[0][1], held_by(population, [1])[0][1])


def test_what_an_attack_is_aimed_at():
    x, y = torch.zeros(4, 1, 4, 4), torch.tensor([0, 4, 4, 9])
    at, want = LabelFlip(share=0).aimed(x, y, 10)
    assert want.tolist() == [9, 5, 5, 0]
    at, want = LabelFlip(share=0).aimed(x, torch.tensor([0, 1, 2, 1]), 3)
    assert want.tolist() == [2, 0]  # the middle one of three stays
    at, want = LabelFlip(share=0, source=4, target=7).aimed(x, y, 10)
    assert (len(at), want.tolist()) == (2, [7, 7])
    x = 0.1 * torch.arange(5.0)[:, None, None, None].expand(5, 1, 4, 4)
    at, want = Backdoor(share=0, target=4, size=1).aimed(x, torch.tensor([0, 4, 4, 9, 9]), 10)
    assert want.tolist() == [4, 4, 4]
    assert torch.equal(at[:, 0, 0, 0], x[[0, 3, 4], 0, 0, 0])
    assert (at[:, 0, 3, 3] == 1).all()
    assert x.max() < 0.5


@pytest.mark.parametrize("share", [0.0, 0.05, 0.15, 0.29, 0.5, 1.0])
def test_a_share_of_clients_is_drawn_by_the_seed(share):
    found = drawn(3, 100, share)
    assert len(found) == round(100 * share)
    assert found.clients.tolist() == sorted({*found.clients.tolist()})
    assert torch.equal(found.clients, drawn(3, 100, share).clients)
    assert set(found.clients.tolist()) <= set(drawn(3, 100, 1.0).clients.tolist()) == set(range(100))
    assert found.among(found.clients).all()
    if 0 < share < 1:
        assert found.clients.tolist() != drawn(4, 100, share).clients.tolist()
        assert set(drawn(3, 100, share / 2).clients.tolist()) < set(found.clients.tolist())


def test_halves_are_rounded_up():
    assert [len(drawn(0, n, 0.1)) for n in (4, 5, 14, 15, 25)] == [0, 1, 1, 2, 3]


@given(
    st.sampled_from([Backdoor(share=0.5, target=3, size=2, value=2.0), LabelFlip(share=0.5, source=1, target=4)]),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.sampled_from([torch.uint8, torch.float32, torch.int64]),
    st.integers(1, 5),
)
def test_what_no_attack_can_be_on_is_refused_by_an_option_and_its_value(attack, shape, dtype, classes):
    said = ""
    try:
        attack.check(torch.zeros(shape, dtype=dtype), classes)
    except ValueError as e:
        said = str(e)
    option = re.match(r"(\w+)=[^ ]+: ", said)
    assert not said or (option is not None and option[1] in ({"kind"} | type(attack).model_fields.keys())), said
