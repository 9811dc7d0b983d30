"""Clients at fault in whole rounds: those dropped leave no trace, and their outcome is on record."""

from dataclasses import replace

import pytest
import torch
from harness import Bowl, Fixed, World, build, digits, flat, records, rows, script

from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.faults import Faults
from fedfleet.simulator.driver.memory import Memory
from fedfleet.simulator.errors import ClientError, ClientTimeout, FedfleetError
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.fleet import buffer
from fedfleet.simulator.fleet.devices import Homogeneous
from fedfleet.simulator.fleet.policies import First
from fedfleet.simulator.fleet.responses import Federation, Outcome
from fedfleet.simulator.fleet.selection import Oort, PowerOfChoice
from tests.parts import slow_but

DROP = Faults(on_client_error="drop_client", non_finite="drop_client")
KEEP = Faults(non_finite="keep")
INNERS = ["serial", "batched", "factored"]
BAD = (2, 3)
OPTIONS = {
    "fedavg": ("classification", {"epochs": 1, "batch_size": 7}),
    "scaffold": ("classification", {"epochs": 1, "batch_size": 7}),
    "cdma_ada": ("auc", {"steps": 3, "batch_size": 7, "alpha": 0.9}),
    "fedbuff": ("classification", {"steps": 3, "batch_size": 7, "buffer": 4, "concurrency": 6}),
}


class Without:
    """Some clients are never online."""

    def __init__(self, clients):
        self.clients = torch.tensor(clients)

    def online(self, key, clients, seconds):
        return ~torch.isin(clients, self.clients)


def spoilt(task, fault, clients=8):
    """Digits, of which clients ``BAD`` hold what cannot be trained on: bad pixels, or labels that do not exist."""
    world = digits(task, clients=clients)
    population = world.population
    mine = torch.cat([population.indices[population.offsets[c] : population.offsets[c + 1]] for c in BAD])
    x, y = population.data["x"].clone(), population.data["y"].clone()
    if fault == "label":
        y[mine] = 99
    else:
        x[mine] = {"nan": torch.nan, "overflow": 1e34}[fault]
    return World(world.task, replace(population, data={"x": x, "y": y}))


def play(name, world, inner="batched", rounds=3, options=None, **given):
    options = {**OPTIONS[name][1], **(options or {})}
    algorithm = build(name, world.task, CohortOptions(size=6), **options)
    return list(records(algorithm, world, rounds, inner=inner, **given))


def phases(found):
    return [p for r in found for p in r.phases]


@pytest.fixture
def memories(monkeypatch):
    """What the engine remembers, a run."""
    made = []
    init = Memory.__init__

    def watched(self, *given):
        made.append(self)
        init(self, *given)

    monkeypatch.setattr(Memory, "__init__", watched)
    return made


@pytest.mark.parametrize("inner", slow_but(INNERS, "factored"))
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("fedavg", "nan"),
        ("fedavg", "label"),
        ("fedavg", "overflow"),
        ("scaffold", "nan"),
        ("scaffold", "label"),
        ("cdma_ada", "nan"),
    ],
)
def test_who_is_dropped_leaves_no_more_trace_than_who_is_offline(memories, name, fault, inner):
    world = spoilt(OPTIONS[name][0], fault)
    one_block: dict = {"block_size": 6}
    if fault == "overflow":  # layer inputs, gradients and rate are finite, and only their product is not
        one_block |= {"options": {"epochs": None, "steps": 1, "lr": 1e8}, "rounds": 1}
    found = play(name, world, inner, faults=DROP, **one_block)
    gone = play(name, world, inner, federation=Federation(availability=Without(BAD)), **one_block)
    assert any(p.counts["failed"] for p in phases(found))
    for a, b in zip(found, gone, strict=True):
        T.map(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), a.state, b.state)
    dropped, offline = memories
    assert len(dropped.store) == len(offline.store)
    for c in [c for c in range(8) if c not in BAD] if name == "scaffold" else []:
        T.map(
            lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0),
            *(m.store.get(torch.tensor([c]), lambda z=gone[0].state.z: T.zeros_like(z)) for m in memories),
        )
    for p, q in zip(phases(found), phases(gone), strict=True):
        assert p.clients.tolist() == q.clients.tolist()
        bad = torch.isin(p.clients, torch.tensor(BAD))
        assert torch.equal(p.responses.outcome == Outcome.FAILED, bad)
        assert torch.equal(q.responses.outcome == Outcome.UNAVAILABLE, bad)
        assert p.counts["failed"] == q.counts["unavailable"] == int(bad.sum())
        for same in ("invited", "completed", "client_steps", "floats_up", "bytes_up"):
            assert p.counts[same] == q.counts[same]
        assert p.train_loss == q.train_loss
        assert sorted(e["client"] for e in p.events) == sorted(p.clients[bad].tolist())
        assert {(e["event"], e["bit_exact"]) for e in p.events} <= {("client_dropped", fault != "label")}
        assert all(("traceback" in e) == (fault == "label") for e in p.events)
        assert q.events == []


@pytest.mark.parametrize("inner", INNERS)
def test_blocks_of_the_others_are_summed_in_another_order_at_most(inner):
    world = spoilt("classification", "nan")
    found = play("fedavg", world, inner, faults=DROP, block_size=2)
    gone = play("fedavg", world, inner, federation=Federation(availability=Without(BAD)), block_size=2)
    torch.testing.assert_close(flat(found[-1].state), flat(gone[-1].state), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("fault", ["nan", "label"])
def test_a_dropped_answer_of_a_buffer_is_a_flight_that_failed(monkeypatch, inner, fault):
    world = spoilt("classification", fault)
    federation = Federation(devices=Homogeneous(1.0, 0.7))
    found = play("fedbuff", world, inner, 5, faults=DROP, federation=federation)
    timelines = buffer.timelines

    def failing(federation, clients, *given):
        result = timelines(federation, clients, *given)
        return result._replace(failed=result.failed | (result.online & torch.isin(clients, torch.tensor(BAD))))

    monkeypatch.setattr(buffer, "timelines", failing)
    failed = play("fedbuff", world, inner, 5, federation=federation)
    assert sum(p.counts["failed"] for p in phases(found)) > 2
    for a, b in zip(found, failed, strict=True):
        assert torch.equal(flat(a.state.z), flat(b.state.z))
        assert (a.virtual_s, a.metrics) == (b.virtual_s, b.metrics)
        (p,), (q,) = a.phases, b.phases
        assert torch.equal(p.responses.outcome, q.responses.outcome)
        assert p.counts == q.counts
        assert p.counts["completed"] + p.counts["stale"] == 4
        assert len(p.events) == p.counts["failed"]
        assert not q.events


def test_a_buffer_that_nobody_can_fill_is_a_clear_error():
    world = World(Bowl(), rows(*[[(1.0, torch.nan)]] * 5))
    algorithm = build("fedbuff", world.task, buffer=2, concurrency=3, steps=1, batch_size=1)
    with pytest.raises(FedfleetError) as e:
        list(records(algorithm, world, 1, faults=DROP, attempts=2))
    said = str(e.value)
    assert said.startswith(
        "round 0, phase 'train': 0 of 2 answers came in, and then none, however many clients were invited (6 "
    )
    assert "dropped, the first client " in said
    assert "(it sends a value that is not finite in 'dz', first seen after stage 0, step 0)): raise the rate of" in said


def bowl(*minima):
    return World(Bowl(), rows(*[[(1.0, m)] for m in minima]))


def fedavg(world, invite=2):
    return build("fedavg", world.task, CohortOptions(size=invite), steps=1, batch_size=1, lr=0.5, weight="uniform")


def test_with_too_few_left_the_round_starts_again_with_others(monkeypatch):
    world = bowl(1.0, torch.nan, 3.0)
    script(monkeypatch, [[0, 1], [2, 1], [0, 2]])
    (found,) = records(fedavg(world), world, 1, faults=DROP, min_responses=2)
    assert float(found.state.z["x"]["w"]) == pytest.approx((1.0 + 2.0) / 2)
    assert [p.responses.outcome.tolist() for p in found.phases] == [[0, 2], [0, 2], [0, 0]]
    assert [p.counts["floats_up"] for p in found.phases] == [1, 1, 2]
    assert [[e["client"] for e in p.events] for p in found.phases] == [[1], [1], []]


def test_where_everybody_is_dropped_the_run_ends_with_the_reason(monkeypatch):
    world = bowl(torch.nan, torch.nan, 3.0)
    script(monkeypatch, [[0, 1]] * 3)
    with pytest.raises(FedfleetError) as e:
        list(records(fedavg(world), world, 1, faults=DROP, attempts=3))
    assert str(e.value) == (
        "round 0, phase 'train': 0 of 2 invited answered, and 2 dropped, the first client 0 (it sends a value that is not finite "
        "in 'z', first seen after stage 0, step 0), in 3 cohorts in a row (needed: 1): let such a round count "
        "(cohort.on_abort=skip), or raise cohort.size, the rate of availability, cohort.deadline_s or, where all are offline "
        "together, cohort.retry_s"
    )
    script(monkeypatch, [[2, 1]])
    with pytest.raises(ClientError) as e:
        list(records(fedavg(world), world, 1))
    assert str(e.value) == (
        "round 0: client 1, phase 'train': it sends a value that is not finite in 'z', first seen after stage 0, step 0: training "
        "diverged, so lower the learning rates, or clip gradients, as by algorithm.client_optimizer.clip_norm"
    )


def test_a_dropped_late_answer_is_not_merged(monkeypatch):
    # Client 3 is late in round 0 and comes in while round 2 waits for client 2; it would have sent NaN.
    world = bowl(1.0, 2.0, 3.0, torch.nan)
    federation = Federation(devices=Fixed((1.0, 1.0, 2.0, 3.5)), policy=First(1))
    script(monkeypatch, [[0, 3], [1, 3], [2, 3]])
    found = list(records(fedavg(world), world, 3, federation=federation, stale_discount=0.5, faults=DROP))
    assert [float(r.state.z["x"]["w"]) for r in found] == pytest.approx([1.0, 1.5, 2.25])
    assert [p.counts["merged_stale"] for p in phases(found)] == [0, 0, 0]
    assert [p.counts["stale"] for p in phases(found)] == [1, 1, 1]  # the outcome of the invitation
    assert [[e["client"] for e in p.events] for p in phases(found)] == [[], [], [3]]
    assert phases(found)[2].responses.outcome.tolist() == [Outcome.COMPLETED, Outcome.STALE]


def test_late_answers_of_an_attempt_that_drops_made_void_are_thrown_away(monkeypatch):
    world = bowl(torch.nan, 2.0, 3.0)
    federation = Federation(devices=Fixed((1.0, 2.0, 1.0)), policy=First(1))
    script(monkeypatch, [[0, 1], [2, 1]])
    (found,) = records(fedavg(world), world, 1, federation=federation, stale_discount=0.5, faults=DROP)
    assert [[Outcome(f) for f in p.responses.outcome.tolist()] for p in found.phases] == [
        [Outcome.FAILED, Outcome.LATE],
        [Outcome.COMPLETED, Outcome.STALE],
    ]
    assert float(found.state.z["x"]["w"]) == pytest.approx(2.0)


def test_who_works_in_vain_may_be_at_fault_without_a_trace(monkeypatch):
    world = bowl(1.0, torch.nan)
    federation = Federation(devices=Fixed((1.0, 2.0)), policy=First(1))
    for train_all in (False, True):
        script(monkeypatch, [[0, 1]])
        (found,) = records(fedavg(world), world, 1, federation=federation, train_all=train_all, faults=DROP)
        assert [Outcome(f) for f in found.phases[0].responses.outcome.tolist()] == [Outcome.COMPLETED, Outcome.LATE]
        assert found.phases[0].events == []


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedbuff", "cdma_ada"])
def test_an_error_ends_with_the_original_traceback(name):
    world = digits(OPTIONS[name][0])

    def loss(z, batch, ctx, key):
        raise RuntimeError("no such luck")

    world.task.objectives["train"] = replace(world.task.objectives["train"], loss=loss)
    with pytest.raises(ClientError) as e:
        play(name, world)
    first, *_, last = str(e.value).splitlines()
    assert first.startswith("round 0: client ")
    assert first.endswith(", phase 'train', stage 0, step 0: RuntimeError: no such luck") or name == "cdma_ada"
    assert last == "RuntimeError: no such luck"
    assert ", in loss" in str(e.value)


@pytest.mark.parametrize("selection", [Oort(explore=0.3), PowerOfChoice()])
def test_infinite_losses_do_not_upset_a_selection(memories, selection):
    world = bowl(1.0, 2.0, 3.0, 1e200, 5.0, 6.0)  # (w - 1e200)^2 overflows, its gradient does not
    found = list(records(fedavg(world, 4), world, 6, selection=selection))
    assert any(p.train_loss == torch.inf for p in phases(found))
    assert all(len(p.clients.unique()) == 4 for p in phases(found))
    assert bool(torch.isfinite(flat(found[-1].state.z)).all())
    known = memories[0].selection
    known = known if isinstance(selection, PowerOfChoice) else known[0]
    assert all(bool(torch.isfinite(column).all()) for column in known.columns.values())


@pytest.mark.parametrize("selection", [Oort(explore=0.3), PowerOfChoice()])
@pytest.mark.parametrize("faults", [KEEP, DROP])
def test_selections_that_learn_from_losses_are_not_upset(selection, faults):
    world = spoilt("classification", "nan")
    found = play("fedavg", world, rounds=6, faults=faults, selection=selection)
    assert all(len(p.clients.unique()) == 6 for p in phases(found))
    assert bool(torch.isfinite(flat(found[-1].state.z)).all()) == (faults is DROP)


def test_dropped_clients_are_not_learnt_of(memories):
    world = spoilt("classification", "nan")
    play("fedavg", world, rounds=6, faults=DROP, selection=PowerOfChoice())
    known = memories[0].selection.clients.tolist()
    assert known == [c for c in range(8) if c not in BAD]


class Stopping(LocalExecutor):
    """Stops blocks with certain clients, and those of certain sizes, as an executor with workers does those that take too long."""

    def __init__(self, slow=(), sizes=()):
        super().__init__(1)
        self.slow, self.sizes, self.limits = set(slow), sizes, []

    def map(self, job, shared, tasks, *, timeout_s=None, **how):
        self.limits.append((max(len(t.clients) for t in tasks), timeout_s))
        return map(lambda t: self._one(job, shared, t), tasks)  # goes on after an error

    def _one(self, job, shared, task):
        if self.slow & set(task.clients.tolist()) or len(task.clients) in self.sizes:
            raise ClientTimeout("a block")
        return job(self._setup, shared, task)


SLOW = replace(DROP, client_timeout_s=2.0)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_clients_that_take_too_long_are_found_one_by_one_and_dropped(name):
    world, executor = (
        spoilt("classification", "nan"),
        Stopping([2, 5]),
    )  # 3 is dropped for its NaN in the block of the others
    found = play(name, world, faults=SLOW, block_size=6, executor=executor)
    gone = play(name, world, block_size=6, federation=Federation(availability=Without([2, 3, 5])))
    assert torch.equal(flat(found[-1].state), flat(gone[-1].state))
    for p, q in zip(phases(found), phases(gone), strict=True):
        assert p.clients.tolist() == q.clients.tolist()
        assert torch.equal(p.responses.outcome == Outcome.FAILED, torch.isin(p.clients, torch.tensor([2, 3, 5])))
        assert {e["client"]: (e["why"], e["bit_exact"]) for e in p.events if e["client"] != 3} == {
            c: ("not done after 2 s", False) for c in {2, 5} & set(p.clients.tolist())
        }
    assert set(executor.limits) >= {(6, 12.0), (1, 2.0)}
    assert all(limit == 2.0 * size for size, limit in executor.limits)


def test_a_client_that_takes_too_long_is_named():
    world = digits("classification", clients=6)
    with pytest.raises(ClientTimeout) as e:
        play("fedavg", world, faults=Faults(client_timeout_s=0.5), executor=Stopping([4]))
    assert str(e.value) == (
        "round 0: client 4, phase 'train': not done after 0.5 s: look for a loop without end, or raise faults.client_timeout_s"
    )


def test_a_block_of_which_nobody_takes_too_long_alone_is_an_error():
    world = digits("classification", clients=6)
    with pytest.raises(ClientTimeout) as e:
        play("fedavg", world, faults=SLOW, executor=Stopping(sizes=[3]))
    assert str(e.value) == (
        "round 0: phase 'train': a block of 3 clients is not done in 3 times faults.client_timeout_s=2, though each of them alone "
        "is: raise it"
    )


def test_where_all_take_too_long_the_run_ends(monkeypatch):
    world = bowl(1.0, 2.0)
    script(monkeypatch, [[0, 1]])
    with pytest.raises(
        FedfleetError, match=r"0 of 2 invited answered, and 2 dropped, the first client 0 \(not done after 2 s\)"
    ):
        list(records(fedavg(world), world, 1, faults=SLOW, attempts=1, executor=Stopping([0, 1])))


def test_two_cohorts_in_a_row_that_hang_end_the_run_whatever_attempts_are_left(monkeypatch):
    world = bowl(1.0, 2.0, 3.0)
    script(monkeypatch, [[0, 1]] * 9)
    executor = Stopping([0, 1])
    with pytest.raises(
        FedfleetError, match=r"in 2 cohorts in a row no client came to an end in faults\.client_timeout_s"
    ):
        list(records(fedavg(world), world, 1, faults=SLOW, attempts=9, executor=executor))
    assert executor.limits == [(2, 4.0), (1, 2.0)] * 2
    script(monkeypatch, [[0, 1], [0, 2], [0, 1], [1, 2]])  # never two in a row
    found = list(records(fedavg(world), world, 2, faults=SLOW, attempts=9, executor=Stopping([0, 1])))
    assert [len(r.phases) for r in found] == [2, 2]
