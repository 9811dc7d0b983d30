"""Norms that are bounded, whatever comes after, and the noise that clients may add."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.algorithms.options import CohortOptions
from fedfleet.middleware.compression.codecs.clip import length
from fedfleet.middleware.compression.up import transformed
from fedfleet.middleware.privacy.hidden import NORM, SHARE, WITHIN, Hidden
from fedfleet.middleware.trial import Seen
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.combination import Combination, PerClient, Shared, Tape
from fedfleet.simulator.arithmetic.noise import normals
from fedfleet.simulator.block.uplink import through
from tests.algorithms.harness import build, digits, flat, play
from tests.middleware.compression.test_transforms import made

A, B = torch.tensor([3.0, 0.0]), torch.tensor([[-4.0], [12.0]])  # 13 together


def sent(*names, at=0.0, **shared):
    """What the server has of a model that has moved by A and B."""
    shared["z"] = {"a": torch.full_like(A, at), "w": torch.full_like(B, at)}
    return through(made(*names), {"z": {"a": A + at, "w": B + at}}, shared, None, rng.key(0))


def test_all_that_a_client_sends_is_shortened_together():
    found = sent({"name": "clip", "norm": 6.5}).send["z"]
    assert (found["a"].tolist(), found["w"].tolist()) == ((A / 2).tolist(), (B / 2).tolist())
    moved = sent({"name": "clip", "norm": 6.5}, at=100.0).send["z"]
    torch.testing.assert_close(moved["a"], 100 + A / 2)
    within = sent({"name": "clip", "norm": 13.0})
    assert (within.send["z"]["w"].tolist(), within.numbers, within.bits, within.scalars) == (B.tolist(), 4, 128, {})
    slots = {"p": {"x": torch.tensor([3.0])}, "q": {"x": torch.tensor([4.0])}}
    each = through(made({"name": "clip", "norm": 1.0}), slots, {}, None, rng.key(0)).send
    assert (float(each["p"]["x"]), float(each["q"]["x"])) == (pytest.approx(0.6), pytest.approx(0.8))
    apart = made({"name": "clip", "norm": 3.5, "by": "slot"})
    each = through(apart, slots, {}, None, rng.key(0)).send
    assert (float(each["p"]["x"]), float(each["q"]["x"])) == (3.0, pytest.approx(3.5))


def test_nothing_is_left_as_it_is_and_what_is_not_finite_is_not_hidden():
    clip = made({"name": "clip", "norm": 1.0})
    assert through(clip, {"z": {"x": torch.zeros(2)}}, {}, None, rng.key(0)).send["z"]["x"].tolist() == [0, 0]
    for bad in (math.nan, math.inf):
        found = through(clip, {"z": {"x": torch.tensor([bad, 1.0])}}, {}, None, rng.key(0)).send["z"]["x"]
        assert not found.isfinite().all()


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=30), st.sampled_from([0.1, 1.0, 50.0]))
def test_no_transform_after_it_makes_a_message_longer(x, norm):
    for after in ({"name": "random_k", "share": 0.2}, {"name": "qsgd", "levels": 1}, "ternary", "sign"):
        apart = {"name": "clip", "norm": norm, "by": "slot"}
        for clip in (*made({"name": "clip", "norm": norm}, apart), Hidden(norm=norm), Hidden(norm=9e9, tells=True)):
            up, told = (clip, *made(after)), {NORM: norm}
            found = through(up, {"z": {"x": torch.tensor(x).double()}}, told, None, rng.key(1)).send["z"]["x"]
            assert float(found.norm()) <= norm * (1 + 1e-12)


def test_the_server_may_tell_another_norm_and_a_client_whether_it_was_within():
    for told, within in ((13.5, 1.0), (12.5, 0.0)):
        given = {"z": {"a": torch.zeros(2), "w": torch.zeros(2, 1)}, NORM: told}
        found = through((Hidden(norm=1.0, tells=True),), {"z": {"a": A, "w": B}}, given, None, rng.key(0))
        assert {k: float(v) for k, v in found.scalars.items()} == {WITHIN: within}
        assert float(length({"z": found.send["z"]})) == pytest.approx(min(13.0, told))


def test_a_norm_that_is_configured_stays_whatever_the_server_tells():
    given = {"z": {"a": torch.zeros(2), "w": torch.zeros(2, 1)}, NORM: 0.1}
    for clip in (*made({"name": "clip", "norm": 6.5}), Hidden(norm=6.5)):
        found = through((clip,), {"z": {"a": A, "w": B}}, given, None, rng.key(0)).send["z"]
        torch.testing.assert_close(found["a"], A / 2)


def test_a_client_adds_its_part_of_the_noise_after_it_is_shortened():
    given = {NORM: 99.0, SHARE: 0.25}  # where the norm stays, that scalar is the algorithm's own
    z = {"a": A, "w": B, "c": torch.zeros(20_000)}
    one, again, other = (
        through((Hidden(norm=6.5, noisy=True),), {"z": z}, given, None, rng.key(k)).send["z"] for k in (0, 0, 1)
    )
    assert float(one["c"].std()) == pytest.approx(0.25 * 6.5, rel=0.03)
    assert abs(float(one["c"].mean())) < 0.05
    assert torch.equal(one["c"], again["c"])
    assert abs(float((one["c"] * other["c"]).mean())) < 0.1
    for name, leaf in (("a", A), ("w", B)):  # each leaf has draws of its own
        assert float((one[name] - leaf / 2 - one["c"][:2].view_as(leaf)).abs().max()) > 0.05
    many = [
        through((Hidden(norm=6.5, noisy=True),), {"z": z}, given, None, rng.key(k)).send["z"]["w"] for k in range(300)
    ]
    torch.testing.assert_close(torch.stack(many).mean(0), B / 2, rtol=0, atol=0.4)


@pytest.mark.parametrize("net", [{"model": "mlp", "hidden": (40,)}, {"model": "mlp", "hidden": (3,)}, {"model": "cnn"}])
def test_factored_weights_are_shortened_as_they_are_and_stay_so(net):
    world = digits("classification", "quantity_skew", net=net, alpha=1.0, min_size=2)
    algorithm = build("fedavg", world.task, CohortOptions(size=8), steps=3, batch_size=4, lr=0.5)
    found = {}
    for norm in (0.05, 100.0):
        short = transformed(algorithm, made({"name": "clip", "norm": norm}), Seen({}, frozenset(), {}, {}))
        one, many = (play(short, world, 2, inner=inner) for inner in ("serial", "factored"))
        torch.testing.assert_close(flat(one[-1]), flat(many[-1]), rtol=1e-4, atol=1e-5)
        found[norm] = flat(many[-1])
    plain = play(algorithm, world, 2, inner="factored")
    torch.testing.assert_close(found[100.0], flat(plain[-1]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0.05], flat(plain[-1]), atol=1e-3)


def test_norms_of_combinations_are_those_of_what_they_are_multiplied_out():
    tape, key = Tape(None), rng.key(5)
    draw = lambda n, *shape: normals(rng.fold(key, n), shape).double()  # noqa: E731
    outer = [tape.append(draw(f"h{i}", 3, 2, 30), draw(f"d{i}", 3, 2, 20), None) for i in range(2)]
    like, shared = torch.empty(20, 30, dtype=torch.float64), Shared(draw("s", 20, 30))
    scale = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for terms in (
        [(outer[0], 0.3), (outer[1], scale)],
        [(outer[0], 0.3), (outer[1], 0.3), (shared, 0.0)],
        [(outer[0], 0.3), (shared, 0.7)],
        [(outer[0], 1.0), (PerClient(draw("p", 3, 20, 30)), 1.0)],
        [(shared, 0.0)],
        [],
    ):
        found = Combination(3, like, terms)
        want = found.dense().flatten(1).norm(dim=1)
        torch.testing.assert_close(found.norms(torch.float64), want)
