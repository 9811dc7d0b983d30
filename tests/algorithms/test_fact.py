"""FACT against its specification, section 7, and what a round does when clients are away."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from adaptation import SIZES, build, population, records, same, states, world
from harness import World, flat

from fedfleet.algorithms.fact import merged
from fedfleet.algorithms.fact_work import WorkOptions, model, net
from fedfleet.config.population import problem
from fedfleet.simulator.algorithm import Cohort
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.driver.memory import Memory
from fedfleet.simulator.driver.round import Conditions, EngineRound
from fedfleet.simulator.driver.simulate import play, start
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.work import Batch
from fedfleet.tasks.stateful import Dropout
from tests.parts import slow_but

WORLD = world()
BN = {"model": "digits_small"}
NF = {"fine_tune": False}
LAST = {"select": "last"}
STILL = {"momentum": 0.0, "weight_decay": 0.0}


def sizes_of(where: World) -> tuple[int, int]:
    """Floats of a generator and of a head, statistics included."""
    z = where.task.init(0)
    return T.count(net(z, "x")), T.count(net(z, "head"))


def parts(state, *names: str):
    return {p: state.model[p] for p in names}


@pytest.mark.parametrize("task", [{}, BN])
def test_a_round_by_its_messages(task):
    """8g + 6h, and 6g + 6h without fine-tuning, 2g less; beside that the running statistics of both heads, from the target."""
    where = world(**task)
    g, h = sizes_of(where)
    more = 2 * T.count(net(where.task.init(0), "head")["b"])
    wanted = {"source": (2 * (g + h), 2 * g), "fine_tune": (2 * g, 2 * h), "target": (g + 2 * h, g + more)}
    total = {}
    for name, options in (("fact", {}), ("nf", NF), ("average", {**NF, "idd": False})):
        for r in records(build(where.task, **options), where, 2):
            found = {p.phase: (p.counts["floats_down"], p.counts["floats_up"]) for p in r.phases}
            if name != "fact":
                wanted["source"] = (2 * (g + h), 2 * (g + h))
            assert found == {k: v for k, v in wanted.items() if k in found}
            total[name] = sum(map(sum, found.values()))
            assert [p.phase for p in r.phases] == {
                "fact": ["source", "fine_tune", "target"],
                "nf": ["source", "target"],
                "average": ["source"],
            }[name]
    assert total == {"fact": 8 * g + 6 * h + more, "nf": 6 * g + 6 * h + more, "average": 4 * (g + h)}


def test_target_clients_return_no_more_than_the_heads_statistics():
    where = world(**BN)
    g, _ = sizes_of(where)
    of_head = T.count(net(where.task.init(0), "head")["b"])
    assert of_head == 2 * 128
    for returned, more in ((True, 2 * of_head), (False, 0)):
        algorithm = build(where.task, return_target_head_buffers=returned)
        (r,) = records(algorithm, where, 1)
        assert r.phases[-1].counts["floats_up"] == g + more


def test_the_same_two_clients_train_and_tune_and_no_target_is_among_them():
    where = world(targets=(1, 4))
    for r in records(build(where.task), where, 8):
        source, tune, target = (p.clients.tolist() for p in r.phases)
        assert set(source) == set(tune)
        assert len(set(source)) == 2
        assert not {1, 4} & set(source)
        assert set(target) == {1, 4}


def test_so_many_target_clients_are_asked():
    where = world(targets=(1, 3, 4))
    seen = Counter(c for r in records(build(where.task, targets=1), where, 12) for c in r.phases[-1].clients.tolist())
    assert set(seen) == {1, 3, 4}
    assert sum(seen.values()) == 12


def test_pairs_are_drawn_uniformly():
    """Each of n sources takes part with the frequency 2 / n, each pair with 2 / (n (n - 1)); of two both always do."""
    of, rounds = problem(WORLD.population), 3000
    pairs = Counter()
    for t in range(rounds):
        turn = EngineRound(t, 0, 0.0, of, *engine())
        pairs[tuple(sorted(turn.invite(2, role="source").clients.tolist()))] += 1
    assert len(pairs) == 6
    for count in pairs.values():
        assert abs(count / rounds - 1 / 6) < 5 * math.sqrt(5 / 36 / rounds)
    two = world(SIZES[:3], (2,))
    assert all(set(r.phases[0].clients.tolist()) == {0, 1} for r in records(build(two.task), two, 5))


def engine():
    conditions = Conditions(seed=0)
    return conditions, LocalExecutor(1), Memory(conditions.selection)


@pytest.mark.parametrize("options", [{}, {"epochs": 2, "optimizer_state": "reset"}])
def test_no_epochs_of_tuning_are_fact_nf(options):
    found = [states(WORLD, 4, rounds=4, **o, **options) for o in (NF, {"finetune_epochs": 0}, {"fine_tune": True})]
    assert all(same(a.model, b.model) for a, b in zip(*found[:2], strict=True))
    assert not same(found[0][-1].model, found[2][-1].model)


@pytest.mark.parametrize(("task", "kept"), [({}, "reset"), ({}, "persist"), (BN, "reset"), (BN, "persist")])
def test_a_target_rate_of_0_is_unweighted_averaging_of_the_pair(task, kept):
    """What the trained parts are: the generator's statistics do move."""
    where = world(**task)
    still = states(where, 4, **NF, target_lr=0.0, optimizer_state=kept)
    average = states(where, 4, **NF, idd=False, optimizer_state=kept)
    for a, b in zip(still, average, strict=True):
        assert same(parts(a, "x", "head", "second"), parts(b, "x", "head", "second"))
    plain = build(
        where.task, "fedavg", weight="uniform", epochs=1, client_optimizer={"momentum": 0.9, "weight_decay": 5e-4}
    )
    first = next(records(build(where.task, **NF, idd=False, optimizer_state="reset"), where, 1))
    sources = World(where.task, replace(where.population, labelled=None))  # as FedAvg is given them
    of_plain = plain_average(sources, plain, first.phases[0].clients)
    torch.testing.assert_close(flat(merged(first.state.model)), flat(of_plain), rtol=1e-6, atol=1e-7)


def plain_average(where: World, plain, clients: torch.Tensor):
    """A round of FedAvg with these clients."""

    class Given(EngineRound):
        def invite(self, size, *, replace=False, role=None):
            return Cohort(clients, torch.zeros_like(clients))

    conditions, executor, memory = engine()
    executor.start(Setup.of(plain, where.task, where.population, "serial"))
    of = problem(where.population)
    turn = Given(0, 0, 0.0, of, conditions, executor, memory)
    state = plain.init(where.task.init(0), turn.key, of)
    return plain.round(state, turn)[0].z


@pytest.mark.parametrize("options", [{}, NF])
def test_the_order_of_the_pair_means_nothing(options, monkeypatch):
    """Nor does the order of the blocks, which those of equal size have of the order of invitations."""
    where = world((21, 21, 21, 21), (3,))
    draw, found = EngineRound.invite, []
    for turned in (False, True):

        def invite(self, size, *, replace=False, role=None, turned=turned):
            cohort = draw(self, size, replace=replace, role=role)
            return cohort if not turned or role == "target" else type(cohort)(cohort.clients.flip(0), cohort.copies)

        monkeypatch.setattr(EngineRound, "invite", invite)
        found.append(states(where, 3, **options))
    for a, b in zip(*found, strict=True):
        assert same(net(a.model, "x"), net(b.model, "x"))
        assert same(merged(a.model), merged(b.model))
        assert same(net(a.model, "head"), net(b.model, "second"))
        assert a.idd == b.idd
    x = Batch({"x": where.population.data["x"]}, torch.ones(84))
    one, other = (where.task.functions["predict"](f[-1].model, x) for f in found)
    assert torch.equal(one, other)  # no ties


@pytest.mark.parametrize("task", [{}, BN])
def test_step_3_leaves_heads_as_they_are_and_step_2_the_generator(task):
    """The heads of the round are those the pair has sent; with a rate of 0 in step 3, the generator is the mean of step 1."""
    where = world(**task)
    moved, still = (states(where, 1, target_lr=lr)[0] for lr in (0.5, 0.0))
    assert same(parts(moved, "head", "second"), parts(still, "head", "second"))
    assert not same(parts(moved, "x"), parts(still, "x"))
    untuned = states(where, 1, target_lr=0.0, **NF)[0]
    assert same(parts(still, "x"), parts(untuned, "x"))
    assert not same(parts(still, "head"), parts(untuned, "head"))
    if task:
        assert not same(net(moved.model, "head")["b"], net(untuned.model, "head")["b"])


def test_statistics_of_the_heads_are_the_targets_or_the_sources():
    where = world(**BN)
    (returned,), (kept,) = (states(where, 1, return_target_head_buffers=back) for back in (True, False))
    average = states(where, 1, idd=False)[0]
    for part in ("head", "second"):
        assert same(net(kept.model, part), net(average.model, part))
        assert same(net(returned.model, part)["w"], net(kept.model, part)["w"])
        assert not same(net(returned.model, part)["b"], net(kept.model, part)["b"])
    assert same(net(returned.model, "x"), net(kept.model, "x"))


def test_equal_heads_leave_the_generator_alone():
    """Clients of equal examples in one batch have equal heads: nothing but weight decay moves G."""
    one = world((20,), (), dtype=torch.float64).population.data
    x, y = (torch.cat([one[k]] * 3) for k in ("x", "y"))
    where = World(WORLD.task, population(x, y, (20, 20, 20), (2,)))
    z = T.map(torch.Tensor.double, WORLD.task.init(0))
    whole = {"batch_size": 20, "idd": True, **LAST}
    for decay in (0.0, 0.01):
        given = {**whole, "momentum": 0.0, "weight_decay": decay}
        still, moved = (
            [r.state for r in records(build(where.task, **given, target_lr=lr), where, 1, z=z)] for lr in (0.0, 0.5)
        )
        r = next(records(build(where.task, **given), where, 1, z=z))
        assert r.metrics["idd"] < 1e-12
        want = T.scale(1 - 0.5 * decay, still[0].model["x"])
        torch.testing.assert_close(flat(moved[0].model["x"]), flat(want), rtol=0, atol=1e-9)


def test_the_schedule():
    """Spec 7.8: 1 at the beginning, 6^-0.75 in the middle, 11^-0.75 at the end."""
    options = WorkOptions(lr=2.0, epochs=3, rounds=40)
    rates = [float(options.rate(torch.tensor(e, dtype=torch.float64), 2.0)) for e in (0, 60, 120)]
    assert rates == pytest.approx([2.0, 2 * 0.2608, 2 * 0.1656], abs=2e-4)
    assert float(WorkOptions(lr=2.0).rate(torch.tensor(9.0), 2.0)) == 2.0


@pytest.mark.parametrize("clock", ["client", "global"])
def test_a_client_keeps_its_own_clock(clock):
    """Epochs trained in steps 1 and 3; one that was never drawn has none, and the rate it begins with."""
    where, epochs = world((20, 20, 20, 20, 20, 20, 20), (6,)), 2
    algorithm = build(where.task, epochs=epochs, finetune_epochs=3, rounds=3, lr_clock=clock)
    drawn: Counter = Counter()
    memory = None
    seen = watch(algorithm, where, 3)
    for t, (r, memory) in enumerate(seen):
        drawn.update(r.phases[0].clients.tolist())
        drawn.update(r.phases[2].clients.tolist())
        assert len(memory.store) == len(drawn)
        for c in drawn:
            (client_state,) = memory.store.get(torch.tensor([c]), dict)["epochs"]
            trained = {*r.phases[0].clients.tolist(), *r.phases[2].clients.tolist()}
            if clock == "client":
                assert float(client_state) == epochs * drawn[c]
            elif c in trained:
                assert float(client_state) == epochs * (t + 1)
    assert len(drawn) < 7


def watch(algorithm, where, rounds):
    """Records, and what the engine remembers."""
    conditions, executor, _ = engine()
    executor.start(Setup.of(algorithm, where.task, where.population, "serial"))
    of = problem(where.population)
    at = start(algorithm, where.task.init(0), of, conditions)
    for _ in range(rounds):
        record = play(algorithm, at, of, conditions, executor)
        at.accept(record)
        yield record, at.memory


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {"epochs", "x", "head", "kept head"}),
        ({"optimizer_state": "reset"}, {"epochs", "head", "kept head"}),
        (NF, {"epochs", "x", "head"}),
        ({**NF, "optimizer_state": "reset"}, {"epochs"}),
        (STILL, {"epochs", "kept head"}),
    ],
)
@pytest.mark.parametrize("task", [{}, BN])
def test_what_clients_keep_between_rounds(options, kept, task):
    """Momentum has no running statistics; the head that is kept between steps 1 and 2 has."""
    where = world(**task)
    z = where.task.init(0)
    want = {"epochs": 1, "x": T.count(z["x"]), "head": T.count(z["head"]), "kept head": T.count(net(z, "head"))}
    for _, memory in watch(build(where.task, **options), where, 1):
        state = T.index(memory.store.get(torch.tensor([4]), dict), 0)
        assert T.count(state) == sum(want[k] for k in kept)


def test_the_discrepancy_is_that_of_the_last_epoch_before_its_steps():
    """With a rate of 0 it is that of every epoch; with one batch, that of the model that step 3 starts from."""
    where, whole = world(dtype=torch.float64), {"batch_size": 100, **LAST}
    z = T.map(torch.Tensor.double, where.task.init(0))
    found = {
        (lr, e): next(records(build(where.task, **whole, epochs=e, target_lr=lr), where, 1, z=z)).metrics["idd"]
        for lr in (0.0, 3.0)
        for e in (1, 2)
    }
    assert found[0.0, 1] == found[3.0, 1]
    assert found[3.0, 2] != found[0.0, 2]
    ends = next(records(build(where.task, **whole, target_lr=0.0), where, 1, z=z)).state.model
    held = where.population.local_data(torch.tensor([4]))
    rows = held.rows[0]
    assert found[0.0, 1] == pytest.approx(idd_of(where, ends, rows), rel=1e-9)
    small = next(records(build(where.task, batch_size=7, target_lr=0.0, **LAST), where, 1, z=z))
    want = idd_of(where, small.state.model, rows)  # batches of equal size: the mean of their means
    assert small.metrics["idd"] == pytest.approx(want, rel=1e-9)


def idd_of(where, z, rows) -> float:
    data = {k: v[rows] for k, v in where.population.data.items()}
    return float(where.task.objectives["idd"].loss(z, Batch(data, torch.ones(len(rows))), None, rng.key(0))[0])


def test_the_model_of_least_discrepancy_is_kept():
    rounds = 12
    given = {"rounds": rounds, "target_lr": 0.5}
    algorithm, last = (build(WORLD.task, select=s, **given) for s in ("idd", "last"))
    found = list(records(algorithm, WORLD, rounds))
    other = list(records(last, WORLD, rounds))
    idd = [r.metrics["idd"] for r in found]
    assert idd == [r.metrics["idd"] for r in other]
    burn_in = math.ceil(0.1 * rounds)
    assert burn_in == 2
    view, of_last = (a.views["global"].params for a in (algorithm, last))
    for t, (a, b) in enumerate(zip(found, other, strict=True)):
        assert same(of_last(b.state), b.state.model)
        assert same(a.state.model, b.state.model)  # what is selected is not trained on
        best = t if t < burn_in else min(range(burn_in, t + 1), key=lambda i: idd[i])
        assert same(view(a.state), found[best].state.model)
    chosen = min(range(burn_in, rounds), key=lambda i: idd[i])
    assert burn_in < chosen < rounds - 1


def test_the_burn_in_counts():
    """The least discrepancy is often the first, of two heads that have learnt nothing yet."""
    found = list(records(build(WORLD.task, rounds=10, lr=0.02, select_burn_in=0.5), WORLD, 10))
    idd = [r.metrics["idd"] for r in found]
    assert [r.state.selected is None for r in found] == [True] * 5 + [False] * 5
    assert found[-1].state.idd == min(idd[5:])
    none = list(records(build(WORLD.task, lr=0.02), WORLD, 3))
    assert [r.state.idd for r in none] == [
        min(idd_ for idd_ in (r.metrics["idd"] for r in none[: t + 1])) for t in range(3)
    ]


def test_the_mean_of_the_heads_can_be_evaluated():
    algorithm = build(WORLD.task, evaluate="mean")
    (r,) = records(algorithm, WORLD, 1)
    z = algorithm.views["global"].params(r.state)
    assert list(z) == ["x", "head"]
    assert same(z["head"], T.mean([r.state.model["head"], r.state.model["second"]]))
    assert same(z["x"], r.state.model["x"])
    of = r.state._replace(
        selected=T.map(lambda leaf: leaf + 1, r.state.model)
    )  # of the model that was selected, if one was
    torch.testing.assert_close(flat(algorithm.views["global"].params(of)), flat(merged(of.selected)))
    assert not same(algorithm.views["global"].params(of), z)


def test_a_model_and_its_nets():
    z = world(**BN).task.init(0)
    assert list(z) == ["x", "head", "b"]
    assert same(model(x=net(z, "x"), head=net(z, "head")), z)
    assert list(net(z, "head")["b"]) == ["2.running_mean", "2.running_var"]


@pytest.mark.parametrize("task", slow_but([{}, BN], BN))
@pytest.mark.parametrize("inner", slow_but(["batched", "factored"], "factored"))
@pytest.mark.parametrize("options", [{"epochs": 2}, {**NF, "optimizer_state": "reset"}])
def test_many_at_once_are_one_at_a_time(inner, options, task):
    """Clients of very different sizes, minibatches, several targets; dropout too."""
    where = world((30, 17, 24, 4, 21), (1, 4), dtype=torch.float64, **task)
    algorithm = build(where.task, rounds=3, batch_size=6, **options)
    z = T.map(torch.Tensor.double, where.task.init(0))
    one, many = (list(records(algorithm, where, 3, z=z, inner=i, block_size=b)) for i, b in (("serial", 1), (inner, 4)))
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(flat(a.state.model), flat(b.state.model), rtol=1e-6, atol=1e-8)
        assert a.metrics["idd"] == pytest.approx(b.metrics["idd"], rel=1e-6)
        for p, q in zip(a.phases, b.phases, strict=True):
            assert p.counts == q.counts
            assert p.clients.tolist() == q.clients.tolist()


def test_a_run_is_a_function_of_its_seed():
    a, b, c = (states(WORLD, 3, {"seed": s, "inner": "batched"})[-1] for s in (1, 1, 2))
    assert same(a.model, b.model)
    assert not same(a.model, c.model)


def test_dropout_is_another_in_each_head():
    """Of equal clients the heads are equal, and so far from each other by their dropout alone."""
    where = world((20, 20, 20), (2,), **BN)
    assert any(isinstance(m, Dropout) for m in where.task._nets.head.modules())
    plain = states(where, 1, lr=1e-9)[0]
    assert plain.idd > 1e-5
    still = world((20, 20, 20), (2,), **BN, idd_heads_eval=True)
    assert states(still, 1, lr=1e-9)[0].idd < 0.2 * plain.idd  # running statistics differ a little


@pytest.mark.parametrize("rate", [0.4, 0.8])
def test_rounds_end_when_clients_are_away(rate):
    """One of the pair: its head alone is the new one, without step 3. Nobody: another pair."""
    where = world(targets=(3, 4))
    federation = Federation(availability=Bernoulli(rate=rate))
    seen, before = Counter(), None
    given = {"federation": federation, "attempts": 200}
    for r in records(build(where.task, **LAST), where, 30, **given):
        phases = [p.phase for p in r.phases if p.attempt == r.phases[-1].attempt]
        heard = {p.phase: int(p.counts["completed"]) for p in r.phases if p.attempt == r.phases[-1].attempt}
        state = r.state
        assert all(leaf.isfinite().all() for leaf in T.leaves(state.model))
        if heard["fine_tune"] == 2:
            assert phases == ["source", "fine_tune", "target"]
            assert math.isfinite(r.metrics["idd"])
        else:
            assert phases == ["source", "fine_tune"]
            assert math.isnan(r.metrics["idd"])
            assert same(net(state.model, "head"), net(state.model, "second"))
            assert before is None or not same(state.model, before)
        before = state.model
        seen[heard["source"], heard["fine_tune"]] += 1
        assert r.phases[1 if len(r.phases) < 4 else -1].clients.numel() >= 1
    assert {(2, 2), (2, 1), (1, 1)} <= set(seen)
