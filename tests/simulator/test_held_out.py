import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.datasets.synthetic import SyntheticOptions, load
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.block.batches import schedule, walked, work
from fedfleet.simulator.held_out import HeldOut
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.work import BatchPlan, LocalLoop, LocalWork, Message, Phase

SIZES = (2, 7, 3, 40)


def population(sizes=SIZES, share=0.25, seed=0) -> HeldOut:
    total = sum(sizes)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1))
    data = {"x": torch.arange(total), "y": torch.arange(total) % 3}
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return HeldOut(InMemoryPopulation(data, order, offsets, torch.arange(len(sizes)) % 2), share, seed)


def parts(clients: HeldOut, ids: list[int]) -> list[tuple[list[int], list[int]]]:
    local = clients.local_data(torch.tensor(ids))
    assert local.held is not None
    kept = [r[:n].tolist() for r, n in zip(local.rows, local.counts.tolist(), strict=True)]
    held = [r[:n].tolist() for r, n in zip(local.held.rows, local.held.counts.tolist(), strict=True)]
    return list(zip(kept, held, strict=True))


@given(st.lists(st.integers(2, 30), min_size=1, max_size=6), st.floats(0.01, 0.9), st.integers(0, 3))
def test_every_example_is_on_one_side(sizes, share, seed):
    clients = population(sizes, share, seed)
    whole = clients.whole.local_data(torch.arange(len(sizes)))
    for c, (kept, held) in enumerate(parts(clients, list(range(len(sizes))))):
        assert sorted(kept + held) == sorted(whole.rows[c, : sizes[c]].tolist())
        assert len(held) == min(max(1, int(sizes[c] * share + 0.5)), sizes[c] - 1)
        assert int(clients.num_examples(torch.tensor(c))) == len(kept)


def test_it_is_the_same_whoever_else_is_asked_and_another_with_another_seed():
    clients = population()
    assert parts(clients, [3]) == [parts(clients, [0, 1, 2, 3])[3]] == [parts(clients, [3, 0])[0]]
    assert parts(clients, [3]) != parts(population(seed=1), [3])
    _, held = parts(clients, [3])[0]
    assert held != clients.whole.local_data(torch.tensor([3])).rows[0, :10].tolist()  # not the first of them


def test_what_is_known_of_all_clients():
    clients = population()
    assert clients.size == 4
    assert clients.summary() == (1, 30, (1 + 5 + 2 + 30) / 4, 2)
    assert clients.domains(torch.tensor([0, 1])).tolist() == [0, 1]
    assert clients.grouped(torch.tensor([1, 1, 0, 0])).domains(torch.tensor([0])).tolist() == [1]
    assert parts(clients.to(torch.device("cpu")), [1]) == parts(clients, [1])
    many = HeldOut(load(SyntheticOptions(examples=[8, 16]), 10_000_000, 0).population, 0.25, 0)
    assert (many.summary().min_examples, many.summary().max_examples) == (6, 12)
    assert many.summary().mean_examples == pytest.approx(0.75 * many.whole.summary().mean_examples)
    last = torch.tensor(9_999_999)
    wanted = [(int(many.num_examples(last)), int(many.held(many.whole.num_examples(last))))]
    assert [(len(k), len(h)) for k, h in parts(many, [9_999_999])] == wanted


def phase(*plans: BatchPlan) -> Phase:
    nothing = lambda *given: None  # noqa: E731
    stages = tuple(LocalLoop(step=nothing, batches=p) for p in plans)
    return Phase(
        name="p",
        work=LocalWork(client_init=nothing, loops=stages, client_final=lambda *g: (Message(), None)),
        reduce={},
    )


def test_a_look_is_no_work_and_is_not_cut_short():
    train, look = BatchPlan(size=4, epochs=2), BatchPlan(size=3, epochs=1, shuffle=False, held_out=True)
    free = BatchPlan(size=50, epochs=1, shuffle=False, free=True)
    counts = torch.tensor([6, 9])
    for alone, more in zip(work(phase(train), counts), work(phase(look, train, free), counts), strict=True):
        assert alone.tolist() == more.tolist()
    clients = population()
    local, keys = clients.local_data(torch.tensor([3])), rng.key(0)[None]
    looked, trained, free_walk = walked(phase(look, train, free), local, keys, None, torch.tensor([3]))
    assert int(trained.active.sum()) == 3
    assert local.held is not None
    assert looked.rows[looked.weight > 0].tolist() == local.held.rows[0].tolist()
    assert free_walk.rows[free_walk.weight > 0].tolist() == local.rows[0].tolist()
    limit = torch.tensor([3])
    alone = schedule(train, local.rows, local.counts, rng.fold(keys, "stage", 1), limit=limit)
    assert torch.equal(trained.rows, alone.rows)
    assert len(walked(phase(look, train), local, keys, 2)[0].rows[0]) == 4  # a number of steps is of work alone
