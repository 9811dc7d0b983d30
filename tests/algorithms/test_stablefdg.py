"""StableFDG beside a version of its own: a net of convolutions by hand, an image, a channel and a copy at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from harness import World, build, flat, play, records
from test_domain_methods import SOME, heard, mean, same
from test_personalised import LR, B, Params, X, Y, down
from torch import Tensor

import fedfleet
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.batches import schedule
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.policies import First
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.work import Batch, BatchPlan
from fedfleet.tasks.mixstyle import kept
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.registry import TASKS
from fedfleet.tasks.styles import Change

CLIENTS, CLASSES, ALPHA = 8, 10, 0.4


def task(size: int = 8, **options: Any) -> Any:
    return TASKS["attentive"].build(TASKS["attentive"].options(dims=4, **options), DataShape((1, size, size), CLASSES))


SIZES = torch.tensor([13, 4, 7, 17, 5, 9, 2, 8])
ENDS = torch.cat([torch.zeros(1, dtype=torch.int64), SIZES.cumsum(0)])
ORDER = rng.permutation(rng.key(9), len(X))[: int(SIZES.sum())]
PEOPLE = InMemoryPopulation({"x": X, "y": Y}, ORDER, ENDS, torch.arange(CLIENTS))


def world(**options: Any) -> World:
    return World(task(**options), PEOPLE)


class Kind(NamedTuple):
    """A net: names of the convolutions with padding, which blocks end with a pooling, the linear layers behind them."""

    convolutions: tuple[str, ...]
    padding: int
    pooled: int
    linear: tuple[str, ...]


CNN, CONVNET = Kind(("0", "3"), 1, 2, ("7",)), Kind(("0", "3", "6"), 0, 2, ("9", "11"))


def style_of(image: Tensor) -> Tensor:
    """The mean of each channel of one image's maps, and then each deviation."""
    deviations = [((c - c.mean()).square().sum() / (c.numel() - 1) + 1e-6).sqrt() for c in image]
    return torch.stack([c.mean() for c in image] + deviations)


def restyled(image: Tensor, old: Tensor, new: Tensor) -> Tensor:
    k = len(image)
    return torch.stack([(image[c] - old[c]) / old[k + c] * new[k + c] + new[c] for c in range(k)])


def centres_of(points: list[Tensor], u: list[float]) -> list[Tensor]:
    """k-means++ and a step of Lloyd's, for as many centres as there are draws."""
    seeds: list[Tensor] = []
    for draw in u:
        mass = [min((float((p - s).square().sum()) for s in seeds), default=1.0) for p in points]
        left, at = draw * sum(mass), 0
        while left >= mass[at]:
            left -= mass[at]
            at += 1
        seeds.append(points[at])
    nearest = [min(range(len(seeds)), key=lambda j, p=p: float((p - seeds[j]).square().sum())) for p in points]
    return [torch.stack([p for p, n in zip(points, nearest, strict=True) if n == j]).mean(0) for j in range(len(seeds))]


def all_count(n: int) -> Tensor:
    return torch.ones(n) > 0


def share(key: Tensor, images: list[Tensor], change: Change) -> list[Tensor]:
    if not bool(change.foreign.any()) or float(rng.uniform(rng.fold(key, "batch"), (), torch.float64)) >= change.share:
        return images
    n, old = len(images), [style_of(image.detach()) for image in images]
    own = centres_of(old, rng.uniform(rng.fold(key, "centres"), n - n // 2, torch.float64).tolist())
    noise = rng.normal(rng.fold(key, "foreign"), (n, len(old[0])), torch.float64)
    found = []
    for i, slot in enumerate(rng.partners(rng.fold(key, "rows"), all_count(n)).tolist()):
        if slot < len(own):
            new = own[slot]
        else:
            new = change.foreign[0] + change.foreign[1] * noise[slot]
            k = len(new) // 2
            new = torch.cat([new[:k], new[k:].clamp(min=0)])
        found.append(restyled(images[i], old[i], new))
    return found


def to_copy(key: Tensor, y: list[int], copies: int) -> list[int]:
    """Which examples are repeated: again and again one of the class that there are fewest of."""
    number, dealt = [y.count(c) for c in range(CLASSES)], [0] * CLASSES
    tie = rng.uniform(rng.fold(key, "class"), (CLASSES, copies), torch.float64)
    found = []
    for u in rng.uniform(rng.fold(key, "row"), copies, torch.float64).tolist():
        c = min((c for c in range(CLASSES) if y.count(c)), key=lambda c: (number[c], float(tie[c, dealt[c]])))
        number[c], dealt[c] = number[c] + 1, dealt[c] + 1
        members = [i for i, label in enumerate(y) if label == c]
        found.append(members[int(u * len(members))])
    return found


def attend(p: Params, images: list[Tensor], y: list[int]) -> Tensor:
    """What the classifier is given, with scores of every pair of places."""
    queries, keys, rows = [], [], []
    for image in images:
        q, k = (
            torch.einsum("dc,chw->dhw", p[f"highlight.{n}.weight"][:, :, 0, 0], image).flatten(1)
            + p[f"highlight.{n}.bias"][:, None]
            for n in ("queries", "keys")
        )
        queries.append(q / q.square().sum(0).sqrt())
        keys.append(k / k.square().sum(0).sqrt())
    for i, image in enumerate(images):
        after = [j % len(y) for j in range(i + 1, i + 1 + len(y))]
        j = next(j for j in after if y[j] == y[i])
        pairs = ((queries[i] + queries[j]) / 2).T @ keys[i]
        weight = pairs.mean(0).exp() / pairs.mean(0).exp().sum()
        flat = image.flatten(1)
        rows.append(torch.cat([flat.mean(1), flat @ weight]))
    return torch.stack(rows)


def loss(p: Params, x: Tensor, y: list[int], key: Tensor, change: Change | None, kind: Kind = CNN) -> Tensor:
    images, explored, of, room = [*x], False, [], 0
    if change is not None:
        of, room = to_copy(rng.fold(key, "copies"), y, change.copies), change.copies
    for i, name in enumerate(kind.convolutions):
        maps = F.conv2d(torch.stack(images), p[f"{name}.weight"], p[f"{name}.bias"], padding=kind.padding).relu()
        images = [*(F.max_pool2d(maps, 2) if i < kind.pooled else maps)]
        at = rng.fold(key, "styles", i)
        if change is None:
            continue
        if i == 0:
            images = share(rng.fold(at, "share"), images, change)
        if i + 1 == len(kind.convolutions) or not bool(rng.bernoulli(rng.fold(at, "batch"), change.explore)):
            continue
        n, new = len(images), [style_of(image.detach()) for image in images]
        if not explored:
            middle = torch.stack(new).mean(0)
            beyond = [new[j] + change.factor * (new[j] - middle) for j in of]
            images, new, y = [images[j] for j in of] + images, beyond + new, [y[j] for j in of] + y
            explored, n = True, n + room
        own = kept(rng.fold(at, "share"), room + len(x), ALPHA)
        other = rng.partners(rng.fold(at, "partner"), all_count(n))
        images = [
            restyled(image, style_of(image), own[j] * new[j] + (1 - own[j]) * new[int(other[j])])
            for j, image in enumerate(images)
        ]
    h = attend(p, images, y) if "highlight.keys.bias" in p else torch.stack(images).flatten(1)
    for name in kind.linear:
        h = (h if name == kind.linear[0] else h.relu()) @ p[f"{name}.weight"].T + p[f"{name}.bias"]
    return F.cross_entropy(h, torch.tensor(y))


def style_over(p: Params, c: int) -> Tensor:
    """Mean and deviation of the styles of a client's examples."""
    x = X[ORDER[ENDS[c] : ENDS[c + 1]]]
    maps = F.max_pool2d(F.conv2d(x, p["0.weight"], p["0.bias"], padding=1).relu(), 2)
    each = torch.stack([style_of(image) for image in maps])
    return torch.stack([each.mean(0), (each.var(0) + 1e-6).sqrt()])


def steps(t: int, c: int, exchange: int, plan: BatchPlan):
    key = rng.fold(rng.key(0), "client", t, 0)
    for _ in range(exchange):
        key = rng.fold(key, "next")
    mine = rng.fold(key, torch.tensor([c]), torch.tensor([0]))
    local = PEOPLE.local_data(torch.tensor([c]))
    found = schedule(plan, local.rows, local.counts, rng.fold(mine, "stage", 0))
    for rows, weight, step in zip(found.rows[0], found.weight[0], found.key[0], strict=True):
        if bool((weight > 0).any()):
            yield rows[weight > 0], step


def run(where: World, name: str = "stablefdg", rounds: int = 3, policy: Any = SOME, **options: Any):
    given = {"epochs": 1, "batch_size": B, "lr": LR, "weight": "uniform", **options}
    algorithm = build(name, where.task, CohortOptions(size=5), **given)
    z = T.map(Tensor.double, where.task.init(0))
    return list(records(algorithm, where, rounds, z=z, policy=policy))


@pytest.fixture(autouse=True)
def _looks_take_several_chunks(monkeypatch):
    monkeypatch.setattr("fedfleet.algorithms.local.EVERYTHING", BatchPlan(size=6, epochs=1, shuffle=False))


OPTIONS = {"share": 0.7, "explore": 0.6, "copies": 3, "factor": 2.0, "alpha": ALPHA}


@pytest.mark.parametrize("weight", ["uniform", "num_examples"])
def test_rounds_are_those_by_hand(weight):
    where, used = world(), set()
    p: Params = {n: leaf.double() for n, leaf in where.task.init(0)["x"].items()}
    for t, record in enumerate(run(where, weight=weight, rounds=3, **OPTIONS)):
        seen, trained = heard(record)
        circle = [
            sorted(seen)[i] for i in rng.permutation(rng.fold(rng.key(0), "server", t, 0, "styles"), len(seen)).tolist()
        ]
        ends = []
        for c in trained:
            foreign = torch.zeros(2, 32, dtype=torch.float64)
            if c in circle:
                giver = circle[(circle.index(c) + 1) % len(circle)]
                assert giver != c
                foreign = style_over(p, giver)
            used.add(c in circle)
            change, q = Change(**OPTIONS, foreign=foreign), p
            for rows, key in steps(t, c, 1, BatchPlan(size=B, epochs=1)):
                q = down(q, lambda at, r=rows, k=key, e=change: loss(at, X[r], Y[r].tolist(), k, e), tuple(q))
            ends.append(q)
        sizes = PEOPLE.num_examples(torch.tensor(trained)).double().tolist()
        p = mean(ends, sizes if weight == "num_examples" else [1.0] * len(ends))
        same(record, p, lambda state: state)
    assert used == {True, False}  # some that were heard the second time alone shared no style


def test_two_places_where_styles_are_explored():
    """In a net of three blocks; copies are made at the first place that is drawn, and count from there on."""
    made, x = task(22, model="convnet"), rng.normal(rng.key(1), (6, 1, 22, 22), torch.float64)
    p = {n: leaf.double() for n, leaf in made.init(0)["x"].items()}
    y = [3, 1, 4, 1, 3, 1]
    at = {n: leaf.clone().requires_grad_() for n, leaf in p.items()}
    batch = Batch({"x": x, "y": torch.tensor(y)}, torch.ones(6, dtype=torch.float64))
    seen = set()
    for k in range(40):
        key, change = rng.key(k), Change(**OPTIONS, foreign=torch.rand(2, 64, dtype=torch.float64))
        coins = tuple(
            bool(rng.bernoulli(rng.fold(rng.fold(key, "styles", i), "batch"), change.explore)) for i in range(2)
        )
        if coins in seen:
            continue
        seen.add(coins)
        mine = made.objectives["stablefdg"].loss({"x": at}, batch, change._asdict(), key)[0]
        theirs = loss(at, x, y, key, change, CONVNET)
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
        for a, b in zip(*(torch.autograd.grad(v, [*at.values()]) for v in (mine, theirs)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-11)
    assert len(seen) == 4


def test_of_the_net_alone():
    made, rows = task(), torch.arange(7)
    p = {n: leaf.double() for n, leaf in made.init(0)["x"].items()}
    batch = Batch({"x": X[rows], "y": Y[rows]}, torch.ones(7, dtype=torch.float64))
    found = made.objectives["train"].loss({"x": p}, batch, None, rng.key(0))[0]
    torch.testing.assert_close(found, loss(p, X[rows], Y[rows].tolist(), rng.key(0), None))


def test_with_nothing_of_it_it_is_fedavg_of_the_plain_net_to_the_bit():
    shape = DataShape((1, 8, 8), CLASSES)
    plain = TASKS["classification"].build(TASKS["classification"].options(model="cnn_bn"), shape)
    where = world(model="cnn_bn", attention=False)
    assert where.task.init(3).keys() == plain.init(3).keys()
    ours = run(where, share=0.0, explore=0.0, policy=First(3), rounds=2)
    theirs = run(World(plain, PEOPLE), "fedavg", policy=First(3), rounds=2)
    for a, b in zip(ours, theirs, strict=True):
        assert a.state.keys() == b.state.z.keys()
        for part, tree in a.state.items():
            assert tree.keys() == b.state.z[part].keys()
            assert all(torch.equal(leaf, b.state.z[part][n]) for n, leaf in tree.items())
        assert len(a.phases) == 1


def test_as_many_floats_travel_as_the_page_says():
    where = world()
    d, styles = T.count(where.task.init(0)), 4 * 16
    for share, up, down_ in [(0.5, d + styles, 2 * d + styles), (0.0, d, d)]:
        (record,) = run(where, rounds=1, policy=First(3), share=share, epochs=None, steps=1, copies=2)
        counts = [sum(phase.counts[way] for phase in record.phases) for way in ("floats_up", "floats_down")]
        assert counts == [3 * up, 5 * down_]


def test_of_a_single_client_heard_nothing_is_shared():
    where = world()
    alone = run(where, rounds=1, policy=First(1), share=1.0, explore=0.0)[0]
    z = T.map(Tensor.double, where.task.init(0))["x"]
    (c,) = heard(alone)[1]
    for rows, key in steps(0, c, 1, BatchPlan(size=B, epochs=1)):
        z = down(z, lambda at, r=rows, k=key: loss(at, X[r], Y[r].tolist(), k, None), tuple(z))
    same(alone, z, lambda state: state)


@pytest.mark.parametrize("model", ["cnn_bn", "cnn"])
def test_many_at_once_are_one_at_a_time(model):
    """Clients of very different sizes, with short batches; blocks of other sizes pad to other lengths."""
    where = world(model=model)
    algorithm = build("stablefdg", where.task, CohortOptions(size=6), batch_size=20, steps=2, lr=LR, **OPTIONS)
    z = T.map(Tensor.double, where.task.init(0))
    one = play(algorithm, where, 2, z=z, block_size=1)
    for inner in ("batched", "factored"):
        for a, b in zip(one, play(algorithm, where, 2, z=z, inner=inner, block_size=4), strict=True):
            torch.testing.assert_close(flat(a), flat(b), rtol=1e-9, atol=1e-10)


def test_matching_takes_the_place_of_its_mean():
    where = world()
    of = {"name": "stablefdg", "epochs": 1, "batch_size": B, "lr": LR, **OPTIONS}
    near, far = (
        list(records(build("omg", where.task, CohortOptions(size=5), of=of, kappa=kappa), where, 1, z=z, policy=SOME))
        for kappa in (1e-9, 0.5)
        for z in [T.map(Tensor.double, where.task.init(0))]
    )
    (plain,) = run(where, rounds=1, **OPTIONS)
    torch.testing.assert_close(flat(near[0].state), flat(plain.state), rtol=1e-6, atol=1e-8)
    assert float((flat(far[0].state) - flat(plain.state)).abs().max()) > 1e-4


def test_its_parts_are_asked_for():
    made = build("stablefdg", task(), CohortOptions(size=2))
    assert made.buffers
    assert made.minimises
    assert made.same_cohort
    assert all(phase.dated for phase in made.phases)  # styles and what is learnt of them are of their round
    alone = build("stablefdg", task(), CohortOptions(size=2), share=0.0)
    assert not alone.same_cohort
    assert not any(phase.dated for phase in alone.phases)


BASE: dict[str, Any] = {
    "rounds": 1,
    "population": {"clients": 4},
    "task": {"name": "attentive"},
    "algorithm": {"name": "stablefdg", "steps": 1},
    "cohort": {"size": 2},
    "executor": {"kind": "local"},
}


def test_a_task_whose_net_knows_no_styles_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm.name='stablefdg': .*: set task.name=attentive"):
        fedfleet.Experiment(fedfleet.load(BASE, {"task": {"name": "classification", "model": "cnn"}}))


def test_algorithms_that_cut_the_net_refuse_it():
    with pytest.raises(ConfigError, match=r"algorithm.name='fedper': .*: use task.name=classification"):
        fedfleet.Experiment(fedfleet.load(BASE, {"algorithm": {"name": "fedper", "steps": 1}}))


@pytest.mark.parametrize("model", ["mlp", "logistic"])
def test_nets_without_maps_are_refused(model):
    with pytest.raises(
        ConfigError, match=rf"model={model} has no blocks of convolutions.*: choose one of cnn, cnn_bn, lenet"
    ):
        fedfleet.load(BASE, {"task.model": model})
