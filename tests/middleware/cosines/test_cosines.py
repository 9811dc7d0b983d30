"""Cosines of updates, beside a version of their own, and a run that is watched beside one that is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity

import fedfleet
from fedfleet.algorithms.options import CohortOptions
from fedfleet.middleware.cosines import watched as cosines
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import CollectUploads, Rows, merge
from tests.algorithms.harness import Bowl, World, build, digits, play, records, rows
from tests.parts import slow_but
from tests.refusals import all_refused

GIVEN = {"steps": 3, "batch_size": 7}
WHERE = digits("classification", "dirichlet", alpha=1.0, min_size=8)
BN = digits("classification", "dirichlet", net={"model": "cnn_bn"}, alpha=1.0, min_size=8)


def stored(*updates: list[float], weights: list[float]) -> Any:
    """Uploads in two blocks."""
    leaves = torch.tensor(updates)
    w = torch.tensor(weights, dtype=torch.float64)
    of = lambda i: Rows(w[i], torch.zeros_like(w[i]).long(), torch.ones_like(w[i]))  # noqa: E731
    blocks = [
        CollectUploads().block({"x": {"w": leaves[i]}, "b": {"seen": 100 * leaves[i]}}, of(i)) for i in ([0, 1], [2])
    ]
    return merge(CollectUploads(), *blocks)


def test_cosines_of_clients_and_of_domains():
    moved = [[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]]
    before, after = ({"x": {"w": torch.tensor(v)}, "b": {"seen": torch.ones(2)}} for v in ([5.0, 5.0], [5.0, 6.0]))
    alone = torch.tensor([4, 7, 2])
    kept = stored(*moved, weights=[1.0, 2.0, 5.0])
    groups, found = cosines.cosines(kept, None, (before, after), alone)
    assert groups.tolist() == [2, 4, 7]
    assert found.tolist() == pytest.approx([0.8, 0.0, 1.0])
    groups, found = cosines.cosines(kept, None, (before, after), torch.tensor([3, 3, 1]))
    assert groups.tolist() == [1, 3]
    assert found.tolist() == pytest.approx([0.8, 4 / 17**0.5])  # of (1, 4), the weighted sum
    ends = stored(*([5 + a, 5 + b] for a, b in moved), weights=[1.0, 2.0, 5.0])
    torch.testing.assert_close(
        cosines.cosines(ends, before, (before, after), alone)[1], torch.tensor([0.8, 0, 1]).double()
    )
    # Clients may be sent another model than the server's.
    elsewhere = (T.map(lambda v: v + 7, before), T.map(lambda v: v + 7, after))
    assert cosines.cosines(ends, before, elsewhere, alone)[1].tolist() == pytest.approx([0.8, 0.0, 1.0])
    assert not cosines.cosines(kept, None, (before, before), alone)[1].isfinite().any()


SAME = (
    *("fedavg", "fedopt", "scaffold", "ditto", "fedper", "fedrod"),
    *("peravg", "mofedsam", "fediir", "fedas", "fedpac", "omg"),
)


@pytest.mark.parametrize("inner", slow_but(["serial", "factored"], "factored"))
@pytest.mark.parametrize("name", slow_but(SAME, "scaffold", "fediir", "omg"))
def test_a_watched_run_is_the_run(name, inner):
    given = {"of": {"name": "fedavg", **GIVEN}} if name == "omg" else GIVEN
    algorithm = build(name, WHERE.task, CohortOptions(size=6), **given)
    plain = play(algorithm, WHERE, 3, inner=inner)
    for domains in (1, 3):
        seen = cosines.watched(algorithm, domains)
        run = list(records(seen, WHERE, 3, inner=inner))
        for a, record in zip(plain, run, strict=True):
            b = seen.views["global"].params(record.state)
            assert all(torch.equal(x, y) for x, y in zip(T.leaves(a), T.leaves(b), strict=True))
            assert {"cosine_worst", "cosine_mean", "cosine_variance"} <= set(record.metrics)
            assert -1 <= record.metrics["cosine_worst"] <= record.metrics["cosine_mean"] <= 1
            assert (seen.domains is not None) == (domains > 1)


def updates_of(algorithm: Any, where: World) -> tuple[Any, Any]:
    """The first round's uploads, which its only phase keeps besides, and its record."""
    caught: list[Any] = []
    inner = cosines.watched(algorithm, 3)
    original = cosines.cosines
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cosines, "cosines", lambda *given: caught.append(given) or original(*given))
        (record,) = records(inner, where, 1)
    return caught[0], record


@pytest.mark.parametrize("where", [WHERE, BN], ids=["mlp", "cnn_bn"])
@pytest.mark.parametrize("name", ["fedavg", "fedopt", "scaffold"])
def test_domains_of_a_round_are_those_in_all_coordinates(name, where):
    if name == "scaffold" and where is BN:
        pytest.skip("its server does not average models")
    algorithm = build(name, where.task, CohortOptions(size=9), **GIVEN)
    (kept, origin, (before, after), of), record = updates_of(algorithm, where)
    flat = lambda z: torch.cat([leaf.flatten() for leaf in T.leaves(z["x"])]).double()  # noqa: E731
    each = [
        flat(T.index(b, i)) for b in kept.blocks for i in range(len(b["x"]["1.bias" if where is WHERE else "0.bias"]))
    ]
    moved = torch.stack(each) - (0 if origin is None else flat(origin))
    step = flat(after) - flat(before)
    assert sorted(of.tolist()) == sorted(where.population.domain[record.phases[0].clients].tolist())
    want = torch.full((3,), torch.nan).double()
    for d in of.unique():
        mine = (of == d).double() * kept.weight
        want[d] = cosine_similarity(mine @ moved, step, dim=0)
    torch.testing.assert_close(record.state.cosine, want, equal_nan=True, rtol=1e-4, atol=1e-5)
    known = want[want.isfinite()]
    assert record.metrics["cosine_mean"] == pytest.approx(float(known.mean()), abs=1e-5)
    assert record.metrics["cosine_worst"] == pytest.approx(float(known.min()), abs=1e-5)
    assert record.metrics["cosine_variance"] == pytest.approx(float(known.var(correction=0)), abs=1e-5)


def test_nothing_is_said_where_nothing_moves():
    still = World(Bowl(), rows(*[[(1.0, 1.0)]] * 3))  # the minimum of all is where they start
    run = cosines.watched(build("fedavg", still.task, CohortOptions(size=3), steps=1, batch_size=1, lr=0.1), 1)
    assert [dict(r.metrics) for r in records(run, still, 2)] == [{}, {}]


BASE: dict[str, Any] = {
    "rounds": 4,
    "population": {
        "dataset": {"name": "digits", "classes": [1, 4, 8], "label_domains": True},
        "clients": 9,
        "partition": {"kind": "by_domain"},
    },
    "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "fedavg", "lr": 0.05},
    "cohort": {"size": 9},
    "executor": {"kind": "local"},
    "evaluation": {"every": 2, "cosines": True},
}


def test_a_run_tells_them_by_domain(tmp_path):
    done = fedfleet.run(BASE, out=tmp_path / "run")
    by_domain = done.table("domains")
    assert by_domain["round"].tolist() == [1] * 3 + [3] * 3
    for at, of_round in by_domain.groupby("round"):
        row = done.rounds.iloc[int(at)]  # type: ignore[call-overload]
        assert row["algorithm/cosine_worst"] == pytest.approx(of_round["cosine"].min())
        assert row["algorithm/cosine_mean"] == pytest.approx(of_round["cosine"].mean())
        assert row["algorithm/cosine_variance"] == pytest.approx(of_round["cosine"].var(ddof=0))
    plain = fedfleet.run(BASE, {"evaluation.cosines": False}, out=tmp_path / "plain")
    assert (plain.folder / "model.safetensors").read_bytes() == (done.folder / "model.safetensors").read_bytes()
    assert plain.summary["final"] == done.summary["final"]
    assert "cosine" not in plain.table("domains")


def test_a_target_has_none_and_clients_of_one_domain_are_told_one_by_one(tmp_path):
    left = fedfleet.run(BASE, {"domains.target": 4, "cohort.size": 6}, out=tmp_path / "left")
    assert left.table("domains").query("round == 3")["cosine"].isna().tolist() == [False, True, False]
    iid = fedfleet.run(BASE, {"population.partition": "iid"}, out=tmp_path / "iid")
    assert "cosine" not in iid.table("domains")
    assert iid.rounds["algorithm/cosine_variance"].gt(0).all()


def test_algorithms_that_average_nothing_are_refused(subtests):
    cohorts = {"fedbuff": 10, "afl": 9, "qffl": 9}
    given = [{"algorithm": {"name": name}, "cohort": {"size": size}} for name, size in cohorts.items()]
    rows = [(one, "evaluation.cosines=true") for one in given]
    all_refused(subtests, lambda given: fedfleet.Experiment(fedfleet.load({**BASE, **given})), rows)
