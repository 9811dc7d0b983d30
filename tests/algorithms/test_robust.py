"""Robust rules beside versions of their own in numpy, on what clients send in a round; and the wrapper."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from harness import Bowl, World, build, digits, flat, play, records, rows

from fedfleet.algorithms import robust as module
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.robust import RobustOptions, aggregated
from fedfleet.algorithms.robust_rules import foolsgold, geometric_median, norm_bound, trust
from fedfleet.algorithms.wrapping import Asked, Exchange
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.upload_matrix import UploadMatrix
from fedfleet.simulator.block.faults import Faults
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.policies import Siwer

WHERE = digits("classification", "dirichlet", alpha=1.0, min_size=8)
AUC = digits("auc", "dirichlet", alpha=1.0, min_size=8)
BN = digits("classification", "dirichlet", net={"model": "cnn_bn"}, alpha=1.0, min_size=8)
OF = {"name": "fedavg", "steps": 3, "batch_size": 7}
KEY = rng.key(7)


def drawn(size: int = 11, *, models: bool = True, counts: bool = False) -> tuple[Exchange, np.ndarray, np.ndarray]:
    """Uploads in three blocks, what they moved by (S, d), and their shares (S,). The last two are far off."""
    gen = torch.Generator().manual_seed(size)
    x = torch.randn(size, 6, generator=gen, dtype=torch.float64)
    x[-2:] = 20 * x[-2:] + 30
    origin = torch.randn(6, generator=gen, dtype=torch.float64) if models else torch.zeros(6, dtype=torch.float64)
    weight = torch.rand(size, generator=gen, dtype=torch.float64) + 0.1

    def tree(v: torch.Tensor) -> Any:
        buffers = {"b": {"seen": 2 + v[..., :2].abs()}} if counts else {}
        return {"x": {"w": v[..., :4].reshape(*v.shape[:-1], 2, 2), "c": v[..., 4:]}, **buffers}

    cuts = [slice(0, 3), slice(3, 4), slice(4, size)]
    kept = UploadMatrix(tuple(tree(origin + x[c]) for c in cuts), tuple(weight[c] for c in cuts))
    given = Exchange(kept, tree(origin) if models else None, torch.arange(size), KEY, Asked("train"))
    return given, x.numpy(), (weight / weight.sum()).numpy()


def median(x: np.ndarray, w: np.ndarray, o: RobustOptions) -> np.ndarray:
    return np.median(x, axis=0)


def trimmed(x: np.ndarray, w: np.ndarray, o: RobustOptions) -> np.ndarray:
    f = int(o.byzantine * 11)
    return np.sort(x, axis=0)[f : len(x) - f].mean(0)


def krum(x: np.ndarray, w: np.ndarray, o: RobustOptions) -> np.ndarray:
    f = int(o.byzantine * 11)
    squared = ((x[:, None] - x[None]) ** 2).sum(-1)
    score = [sorted(np.delete(row, i))[: len(x) - f - 2] for i, row in enumerate(squared)]
    order = np.argsort([sum(s) for s in score])
    return x[order[: 1 if o.rule == "krum" else o.keep or len(x) - f]].mean(0)


def weiszfeld(x: np.ndarray, w: np.ndarray, o: RobustOptions) -> np.ndarray:
    v = w @ x
    for _ in range(o.updates):
        beta = w / np.maximum(o.nu, np.linalg.norm(x - v, axis=1))
        v = beta @ x / beta.sum()
    return v


def bounded(x: np.ndarray, w: np.ndarray, o: RobustOptions) -> np.ndarray:
    norms = np.linalg.norm(x, axis=1)
    most = np.median(norms) if o.bound == "median" else o.bound
    return (w * np.minimum(1, most / norms)) @ x


RULES = [
    ({"rule": "median"}, median),
    ({"rule": "trimmed_mean"}, trimmed),
    ({"rule": "trimmed_mean", "byzantine": 0.4}, trimmed),
    ({"rule": "krum"}, krum),
    ({"rule": "krum", "byzantine": 0.45}, krum),
    ({"rule": "multi_krum", "byzantine": 0.3}, krum),
    ({"rule": "multi_krum", "keep": 3}, krum),
    ({"rule": "geometric_median"}, weiszfeld),
    ({"rule": "geometric_median", "updates": 1, "nu": 4.0}, weiszfeld),
    ({"rule": "norm_bound"}, bounded),
    ({"rule": "norm_bound", "bound": 1.5}, bounded),
]


EACH = [
    (RobustOptions(of={"name": "fedavg"}, bucket=bucket, **given), law) for given, law in RULES for bucket in (1, 2, 3)
]
ENOUGH = [(o, law) for o, law in EACH if o.enough(11)]  # buckets


@pytest.mark.quick
@pytest.mark.parametrize("models", [True, False])
@pytest.mark.parametrize(("o", "law"), ENOUGH, ids=lambda v: str(v) if isinstance(v, RobustOptions) else "")
def test_rules_are_those_of_the_papers(o, law, models):
    bucket = o.bucket
    exchange, x, w = drawn(models=models)
    if bucket > 1:
        groups = np.array_split(rng.permutation(rng.fold(KEY, "buckets"), 11).numpy(), range(bucket, 11, bucket))
        assert [len(g) for g in groups[:-1]] == [bucket] * (len(groups) - 1)
        inside = w if law in (weiszfeld, bounded) else np.ones(11)  # who is taken as alike is so in a bucket, too
        x = np.stack([inside[g] @ x[g] / inside[g].sum() for g in groups])
        w = np.array([w[g].sum() for g in groups])
    found = flat(aggregated(o, exchange)) - (flat(exchange.origin) if models else 0)
    np.testing.assert_allclose(found.numpy(), law(x, w, o), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("given", [g for g, _ in RULES], ids=str)
def test_what_layers_count_stays_within_what_clients_count(given):
    exchange, _, w = drawn(counts=True)
    found = aggregated(RobustOptions(of={"name": "fedavg"}, **given), exchange)["b"]["seen"]
    seen = exchange.uploads.stacked()["b"]["seen"]
    assert (found >= seen.min(0).values).all()
    assert (found <= seen.max(0).values).all()
    if given["rule"] == "norm_bound":
        torch.testing.assert_close(found, torch.from_numpy(w) @ seen)
    if given["rule"] == "median":
        torch.testing.assert_close(found, seen.median(0).values)


@pytest.mark.parametrize("given", [g for g, _ in RULES], ids=str)
def test_updates_that_are_not_finite_are_left_out(given):
    """As ``faults.non_finite: keep`` lets them in: the two far-off ones are infinite and NaN, and so is what their layers count."""
    exchange, x, _ = drawn(counts=True)
    for leaf in (block := exchange.uploads.blocks[-1])["x"].values():
        leaf[-2], leaf[-1] = torch.inf, torch.nan
    block["b"]["seen"][-2:] = torch.nan
    found = aggregated(RobustOptions(of={"name": "fedavg"}, **given), exchange)
    assert flat(found).isfinite().all()
    moved = flat(found["x"]) - flat(exchange.origin["x"])
    assert float(moved.norm()) <= np.linalg.norm(x[:-2], axis=1).max()


def test_a_run_leaves_a_client_out_that_is_infinite(subtests):
    """By every rule, where such a client is not refused; FoolsGold takes those that are all alike for attackers, and stays."""
    means = [2.0, 2.1, 1.9, 2.05, 1.95, 2.02, torch.inf]
    where = World(Bowl(), rows(*([(1.0, m)] for m in means)), rows([(1.0, 2.0)]))
    of = {"name": "fedavg", "steps": 1, "batch_size": 1, "lr": 0.5}
    for given in [*(given for given, _ in RULES), {"rule": "fltrust"}, {"rule": "foolsgold"}]:
        with subtests.test(**given):
            algorithm = build("robust", where.task, CohortOptions(size=7, min_responses=7), of=of, **given)
            (z,) = play(algorithm, where, 1, faults=Faults(non_finite="keep"))
            assert float(z["x"]["w"]) == pytest.approx(1.0 if given["rule"] == "foolsgold" else 1.5, abs=0.08)


def test_the_geometric_median_is_what_distances_are_least_to():
    _, x, w = drawn()
    gram = torch.from_numpy(x @ x.T)
    v = geometric_median(gram, torch.from_numpy(w), 400, 1e-12).numpy() @ x
    cost = lambda p: (w * np.linalg.norm(x - p, axis=1)).sum()  # noqa: E731
    gen = np.random.default_rng(0)
    assert all(cost(v) <= cost(v + 1e-3 * gen.standard_normal(6)) for _ in range(200))
    assert cost(v) < cost(w @ x) / 1.2


def test_alike_updates_have_themselves_for_a_geometric_median():
    x = torch.ones(4, 3, dtype=torch.float64)
    w = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    torch.testing.assert_close(geometric_median(x @ x.T, w, 3, 1e-6), w)


def test_a_norm_of_nought_is_within_any_bound():
    assert norm_bound(torch.tensor([0.0, 1.0, 4.0, torch.inf, torch.nan]), 2.0).tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_what_is_infinite_is_not_trusted():
    products, norms = torch.tensor([1.0, torch.inf, torch.nan]), torch.tensor([2.0, torch.inf, torch.nan])
    assert trust(products, norms, 1.0).tolist() == [0.5, 0.0, 0.0]


def released(history: np.ndarray) -> np.ndarray:
    """FoolsGold as its authors have written it, but for the last line, which there sets what is below 0 to 0 as here."""
    n = len(history)
    unit = history / np.linalg.norm(history, axis=1, keepdims=True)
    cs = unit @ unit.T - np.eye(n)
    most = cs.max(1)
    for i in range(n):
        for j in range(n):
            if i != j and most[i] < most[j]:
                cs[i][j] = cs[i][j] * most[i] / most[j]
    wv = np.clip(1 - cs.max(1), 0, 1)
    wv = wv / wv.max()
    wv[wv == 1] = 0.99
    wv = np.log(wv / (1 - wv)) + 0.5
    wv[np.isinf(wv) | (wv > 1)] = 1
    wv[wv < 0] = 0
    return wv


@pytest.mark.parametrize("seed", range(5))
def test_foolsgold_is_as_released(seed):
    gen = np.random.default_rng(seed)
    x = gen.standard_normal((8, 5))
    x[6:] = x[5] + 0.05 * gen.standard_normal((2, 5))
    found = foolsgold(torch.from_numpy(x @ x.T)).numpy()
    np.testing.assert_allclose(found, released(x), rtol=1e-6, atol=1e-6)
    assert found[5:].max() < 0.05 < found[:5].max()


def test_foolsgold_where_all_or_nothing_is_alike():
    same = torch.tensor([[2.0, 0.0]] * 3, dtype=torch.float64)
    assert foolsgold(same @ same.T).tolist() == [0.0] * 3
    twins = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).repeat(2, 1) * torch.tensor(
        [[1.0], [3.0]]
    ).repeat(4, 1)
    assert foolsgold(twins.double() @ twins.double().T).tolist() == [0.0] * 8
    alone = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).double()
    broken = alone.clone()
    broken[1] = torch.inf
    without = alone[[0, 2, 3, 4]]
    assert foolsgold(broken @ broken.T)[[0, 2, 3, 4]].tolist() == foolsgold(without @ without.T).tolist()
    assert foolsgold(broken @ broken.T)[1] == 0.0
    assert foolsgold(torch.zeros(2, 2, dtype=torch.float64)).tolist() == [1.0] * 2
    assert foolsgold(torch.ones(1, 1, dtype=torch.float64)).tolist() == [1.0]


def remembering(**given: Any) -> Any:
    return build("robust", WHERE.task, CohortOptions(size=6), of=OF, rule="foolsgold", **given)


def test_foolsgold_weighs_by_all_that_clients_have_sent(monkeypatch):
    """By hand, round by round: half a cohort is heard."""
    seen: list[Exchange] = []
    ruled = module.ruled
    monkeypatch.setattr(
        module, "ruled", lambda rnd, phases, rule: ruled(rnd, phases, lambda g: seen.append(g) or rule(g))
    )
    history = np.zeros((30, len(flat(WHERE.task.init(0)))))
    found = list(records(remembering(), WHERE, 4, policy=Siwer()))
    asked = [c for given in seen for c in given.received.tolist()]
    assert len(set(asked)) < len(asked)
    for given, record in zip(seen, found, strict=True):
        start = flat(given.origin).numpy()
        x = np.stack([flat(T.index(given.uploads.stacked(), i)).numpy() for i in range(len(given.received))]) - start
        history[given.received.numpy()] += x
        w = given.shares.numpy() * released(history[given.received.numpy()])
        np.testing.assert_allclose(flat(record.state.state.z).numpy(), start + w @ x / w.sum(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(record.state.history.numpy(), history, rtol=1e-4, atol=1e-5)


def test_histories_that_are_too_large_are_refused(monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 1000)
    with pytest.raises(ConfigError, match=r"algorithm\.rule='foolsgold': the histories of 30 clients"):
        play(remembering(), WHERE, 1)


@pytest.mark.parametrize("given", [*(g for g, _ in RULES), {"rule": "foolsgold"}], ids=str)
def test_a_run_is_the_same_however_clients_are_computed_and_wherever_uploads_lie(given):
    algorithm = build("robust", WHERE.task, CohortOptions(size=9, min_responses=6), of=OF, **given)
    more = {"policy": Siwer(0.7, 1.0), "min_responses": 6, "attempts": 20}
    one = play(algorithm, WHERE, 2, spilled_bytes=sys.maxsize, **more)[-1]
    assert torch.equal(flat(one), flat(play(algorithm, WHERE, 2, spilled_bytes=0, **more)[-1]))
    for inner in ("batched", "factored"):
        other = play(algorithm, WHERE, 2, inner=inner, **more)[-1]
        torch.testing.assert_close(flat(other), flat(one), rtol=1e-4, atol=1e-5)


def test_the_mean_is_the_algorithm_itself():
    inner = build("fedavg", WHERE.task, CohortOptions(size=5), **{k: v for k, v in OF.items() if k != "name"})
    mean = build("robust", WHERE.task, CohortOptions(size=5), of=OF, rule="mean")
    assert mean.name is None
    assert torch.equal(flat(play(mean, WHERE, 2)[-1]), flat(play(inner, WHERE, 2)[-1]))


@pytest.mark.parametrize(
    ("name", "where"),
    [(name, WHERE) for name in ("scaffold", "fedper", "ditto", "fedopt", "fediir")]
    + [(name, AUC) for name in ("local_sgda", "local_sgda_plus", "coda_plus", "extra_step")],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_it_is_put_on_algorithms_that_average(name, where):
    algorithm = build(
        "robust", where.task, CohortOptions(size=5), of={**OF, "name": name}, rule="norm_bound", bound=1e9
    )
    plain = build(name, where.task, CohortOptions(size=5), steps=3, batch_size=7)
    torch.testing.assert_close(
        flat(play(algorithm, where, 2)[-1]), flat(play(plain, where, 2)[-1]), rtol=1e-4, atol=1e-5
    )


def test_nets_that_count_keep_counting():
    algorithm = build("robust", BN.task, CohortOptions(size=5), of=OF, rule="median")
    z = play(algorithm, BN, 2)[-1]
    assert not torch.equal(flat(z["b"]), flat(BN.task.init(0)["b"]))


@pytest.mark.parametrize("of", ["omg", "robust", "afl"])
def test_what_averages_nothing_is_refused(of):
    with pytest.raises((ConfigError, ValueError), match=r"unknown; |does not take a mean"):
        build("robust", WHERE.task, of=of)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rule": "median", "byzantine": 0.1}, r"byzantine=0\.1 is not for rule=median"),
        ({"rule": "krum", "keep": 3}, "keep=3 is not for rule=krum"),
        ({"rule": "foolsgold", "bucket": 2}, "bucket=2 is not for rule=foolsgold"),
        ({"rule": "mean", "bucket": 2}, "bucket=2 is not for rule=mean"),
        ({"rule": "norm_bound", "bound": 0}, "an update has to be of some length"),
        ({"rule": "median", "nu": 1e-3}, "nu=0.001 is not for rule=median"),
    ],
)
def test_options_that_do_not_apply_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        RobustOptions(of={"name": "fedavg"}, **given)


@pytest.mark.parametrize(
    ("given", "least"),
    [
        ({"rule": "krum"}, 3),
        ({"rule": "krum", "byzantine": 0.45}, 4),
        ({"rule": "multi_krum", "keep": 6}, 6),
        ({"rule": "trimmed_mean", "bucket": 2, "byzantine": 0.2}, 1),
        ({"rule": "krum", "bucket": 2}, 7),
    ],
)
def test_too_few_answers_are_refused_before_the_run(given, least):
    o = RobustOptions(of={"name": "fedavg"}, **given)
    bad = [n for n in range(1, 13) if not o.enough(n)]
    fewest = max(bad, default=0) + 1
    assert fewest == least
    build("robust", WHERE.task, CohortOptions(size=12, min_responses=fewest), of=OF, **given)
    if bad:
        with pytest.raises(ConfigError, match=r"raise cohort\.min_responses"):
            build("robust", WHERE.task, CohortOptions(size=12, min_responses=max(bad)), of=OF, **given)


def test_to_keep_more_than_may_be_honest_is_refused():
    given = {"rule": "multi_krum", "byzantine": 0.2, "of": OF}
    few = CohortOptions(size=12, min_responses=10)
    build("robust", WHERE.task, few, keep=10, **given)
    with pytest.raises(
        ConfigError, match=r"keep=11: of the 12 .* of 12 answers, 2 may be attackers'.*: lower it to 10"
    ):
        build("robust", WHERE.task, CohortOptions(size=12, min_responses=11), keep=11, **given)
    build("robust", WHERE.task, few, keep=4, bucket=2, **given)
    with pytest.raises(ConfigError, match=r"keep=5: of the 6 updates .* lower it to 4"):
        build("robust", WHERE.task, few, keep=5, bucket=2, **given)


@pytest.mark.parametrize("rule", ["trimmed_mean", "krum", "multi_krum"])
def test_a_rule_is_refused_where_half_of_the_buckets_may_have_an_attacker(rule):
    """Of 20 answers 6 may be attackers', each in one of 10 buckets."""
    few = CohortOptions(size=20, min_responses=20)
    build("robust", WHERE.task, few, of=OF, rule=rule, bucket=2, byzantine=0.24)
    with pytest.raises(ConfigError, match=r"of 20 answers it sees 10 updates and leaves 6 out of account"):
        build("robust", WHERE.task, few, of=OF, rule=rule, bucket=2, byzantine=0.3)
