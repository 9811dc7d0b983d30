"""Sets of mixtures and their projections, against the vectors of the AFL specification, section 2, and the laws of projections."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.algorithms import lambda_sets as S
from fedfleet.algorithms.lambda_sets import Capped, Hull

SIZES = torch.tensor([7.0, 2.0, 1.0], dtype=torch.float64)
LOSSES = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def vector(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


HULL = Hull(torch.stack([vector(0.7, 0.3, 0.0), vector(0.1, 0.2, 0.7)]))
THREE = {
    "simplex": S.simplex(3),
    "face": S.face([0, 2], 3),
    "capped": Capped(vector(0.0, 0.1, 0.0), vector(0.5, 0.5, 0.9)),
    "hull": HULL,
    "hull of three": Hull(torch.stack([vector(0.7, 0.3, 0.0), vector(0.1, 0.2, 0.7), vector(0.2, 0.8, 0.0)])),
    "point": Hull(vector(0.7, 0.2, 0.1)[None]),
}
numbers = st.floats(-5, 5, allow_subnormal=False)
triples = st.tuples(numbers, numbers, numbers).map(lambda v: vector(*v))


@pytest.mark.parametrize(
    ("v", "wanted"),
    [
        ((0.5, 0.4, 0.3), (13 / 30, 10 / 30, 7 / 30)),
        ((1.2, 0.1, -0.3), (1, 0, 0)),
        ((0.9, 0.6, -0.2), (0.65, 0.35, 0)),
        ((0, 0, 0, 0), (0.25,) * 4),
        ((5, 5, -1), (0.5, 0.5, 0)),
    ],
)
def test_simplex(v, wanted):
    assert S.simplex(len(v)).project(vector(*v)).tolist() == pytest.approx(list(wanted), abs=1e-12)


@pytest.mark.parametrize(("v", "wanted"), [((0.9, 0.6, -0.2), (0.5, 0.5, 0)), ((0.9, 0.2, 0.1), (0.5, 0.3, 0.2))])
def test_capped(v, wanted):
    half = Capped(torch.zeros(3, dtype=torch.float64), torch.full((3,), 0.5, dtype=torch.float64))
    assert half.project(vector(*v)).tolist() == pytest.approx(list(wanted), abs=1e-12)


def test_hull():
    wanted = (0.38604651, 0.24767442, 0.36627907)
    assert HULL.project(vector(0.5, 0.5, 0.5)).tolist() == pytest.approx(wanted, abs=1e-8)
    assert S.face([0, 2], 3).project(vector(0.9, 5.0, 0.3)).tolist() == pytest.approx([0.8, 0, 0.2])


@pytest.mark.parametrize("kind", THREE)
@given(v=triples, w=triples, shift=numbers)
def test_projections_are_feasible_idempotent_nearest_and_do_not_expand(kind, v, w, shift):
    of = THREE[kind]
    found = of.project(v)
    assert of.contains(found)
    assert abs(float(found.sum()) - 1) < 1e-12
    torch.testing.assert_close(of.project(found), found, atol=1e-9, rtol=0)
    torch.testing.assert_close(of.project(v + shift), found, atol=1e-8, rtol=0)  # mixtures lie in a plane
    assert float((of.project(w) - found).norm()) <= float((w - v).norm()) + 1e-9
    # The nearest point of a convex set: no member of it lies further along v - found.
    assert S.support_max(of, v - found) <= float(found @ (v - found)) + 1e-8


@given(v=st.lists(numbers, min_size=1, max_size=9).map(lambda v: vector(*v)), data=st.data())
def test_the_simplex_does_not_care_for_the_order(v, data):
    order = torch.tensor(data.draw(st.permutations(range(len(v)))))
    found, threshold = S.project_simplex(v), None
    torch.testing.assert_close(S.project_simplex(v[order]), found[order], atol=1e-12, rtol=0)
    inside = found > 0  # the conditions of optimality
    threshold = (v - found)[inside]
    assert float(threshold.max() - threshold.min()) < 1e-9
    assert (v[~inside] <= threshold.max() + 1e-9).all()


@given(points=st.lists(triples, min_size=1, max_size=7).map(torch.stack))
def test_wolfes_point_is_the_nearest_to_zero(points):
    found = S.nearest(points) @ points
    assert float(found @ found - (points @ found).min()) <= 1e-9


@pytest.mark.parametrize("kind", THREE)
@given(losses=triples)
def test_the_best_mixture_is_in_the_set_and_no_projection_beats_it(kind, losses):
    of = THREE[kind]
    best = of.best(losses)
    assert of.contains(best)
    far = of.project(of.project(losses) + 1e4 * losses)  # ascent by a huge step
    assert float(far @ losses) <= S.support_max(of, losses) + 1e-7
    assert S.support_max(S.simplex(3), losses) == pytest.approx(float(losses.max()))


def test_the_capped_best_fills_up_the_largest_losses():
    assert THREE["capped"].best(vector(3, 1, 2)).tolist() == pytest.approx([0.5, 0.1, 0.4])


def test_entropy():
    half, g = vector(0.5, 0.5), vector(1.0, 2.0)
    wanted = [0.37754067, 0.62245933]
    assert S.simplex(2).project_entropy(half.log() + 0.5 * g).tolist() == pytest.approx(wanted, abs=1e-8)
    wide = Capped(torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    assert wide.project_entropy(half.log() + 0.5 * g).tolist() == pytest.approx(wanted, abs=1e-8)
    found = THREE["capped"].project_entropy(vector(0.1, 0.3, 0.6).log() + vector(9.0, 0.0, 0.0))
    assert THREE["capped"].contains(found)
    assert found[0] == 0.5


@given(
    shares=st.lists(st.floats(0.01, 1), min_size=1, max_size=5),
    low=st.one_of(st.floats(0, 1), st.sampled_from([0.95, 1.0])),
    high=st.floats(1, 5),
    data=st.data(),
)
def test_the_capped_entropic_projection_is_the_nearest_mixture(shares, low, high, data):
    """Also where ``low`` leaves hardly anything to give away: its logs differ from the nearest's by a constant between the caps."""
    shares = vector(*shares) / sum(shares)
    of = Capped(low * shares, (high * shares).clamp(max=1.0))
    logs = vector(*data.draw(st.lists(st.floats(-30, 30), min_size=len(shares), max_size=len(shares))))
    found = of.project_entropy(logs)
    assert of.contains(found, 1e-9)
    up, down = found > of.low * (1 + 1e-9), found < of.high * (1 - 1e-9)
    price = found.log() - logs  # the gradient of the relative entropy, but for a constant
    if up.any() and down.any():  # no weight can go from where it may fall to where it may rise, and come nearer
        assert float(price[up].max()) <= float(price[down].min()) + 1e-6


def test_the_capped_entropic_projection_sums_to_one_near_its_lower_caps():
    shares = vector(0.9, 0.1)
    found = Capped(0.95 * shares, (2 * shares).clamp(max=1.0)).project_entropy(vector(0.0, 0.0))
    assert found.tolist() == pytest.approx([0.855, 0.145])


def test_radii():
    assert S.radius(S.simplex(3)) == 1.0
    assert S.radius(HULL) == pytest.approx(max(0.7**2 + 0.3**2, 0.1**2 + 0.2**2 + 0.7**2) ** 0.5)
    half = Capped(torch.zeros(3, dtype=torch.float64), torch.full((3,), 0.5, dtype=torch.float64))
    assert S.radius(half) == pytest.approx(0.5**0.5)  # at (1/2, 1/2, 0)
    assert S.radius(THREE["capped"]) >= (0.1**2 + 0.9**2) ** 0.5


def test_chi_squared_and_skewness():
    for k in range(3):
        vertex = torch.zeros(3, dtype=torch.float64).index_fill(0, torch.tensor(k), 1.0)
        assert S.chi2(vertex, SIZES) == pytest.approx(10 / float(SIZES[k]) - 1)
    assert S.skewness(S.simplex(3), SIZES) == pytest.approx(10.0)
    assert S.skewness(Hull((SIZES / 10)[None]), SIZES) == pytest.approx(1.0)
    assert S.initial(S.simplex(3), SIZES).tolist() == pytest.approx([0.7, 0.2, 0.1])


def test_minus_regulariser():
    """The specification's 9.2, item 11."""

    def value(mixture, mu):
        return float(mixture @ LOSSES) - mu * S.chi2(mixture, SIZES)

    best = S.soft_best(LOSSES, SIZES, 4.0)
    assert best.tolist() == pytest.approx([0.665, 0.215, 0.12])
    assert value(best, 4.0) == pytest.approx(1.4275)
    best = S.soft_best(LOSSES, SIZES, 0.3)
    assert best.tolist() == pytest.approx([7 / 30, 0.4, 11 / 30])
    assert value(best, 0.3) == pytest.approx(1.4 + 0.44 / 1.2)
    assert S.soft_best(LOSSES, SIZES, 1e-6).tolist() == pytest.approx([0, 0, 1], abs=1e-4)


FLAT = Hull(
    torch.stack([vector(0.7, 0.3, 0), vector(0.1, 0.9, 0), vector(0.2, 0, 0.8), vector(0.8, 0, 0.2), vector(0, 0, 1)])
)
"""Five mixtures of three domains, more than are independent."""


@pytest.mark.parametrize("kind", ["simplex", "face", "capped", "hull", "point", "dependent"])
@given(losses=triples, a=st.lists(st.floats(0.01, 1), min_size=12, max_size=12), mu=st.floats(0.1, 4))
def test_plus_regulariser(kind, losses, a, mu):
    """Where max <lambda, L> + mu chi2 is, and a concave function above it, equal at extreme points, for ascent (1.1)."""
    of = FLAT if kind == "dependent" else THREE[kind]
    rule = S.bonus(of, SIZES, mu)
    value = lambda m: float(m @ losses) + mu * S.chi2(m, SIZES)  # noqa: E731
    best = rule.best(losses)
    assert of.contains(best)
    assert float(best @ losses) + rule.value(best) == pytest.approx(value(best), abs=1e-6)
    one, two = (of.project(vector(*a[k : k + 3]) * 3 - 1) for k in (0, 3))
    for mixture in (one, two):
        assert rule.value(mixture) >= mu * S.chi2(mixture, SIZES) - 1e-6
        assert value(mixture) <= value(best) + 1e-6
    slope = rule.gradient(one)
    assert rule.value(two) <= rule.value(one) + float(slope @ (two - one)) + 1e-6  # a supergradient


def test_plus_regulariser_by_hand():
    """The specification's 9.2, item 11: 39 at the third vertex; and the corners of a capped set."""
    simplex = S.bonus(S.simplex(3), SIZES, 4.0)
    best = simplex.best(LOSSES)
    assert float(best @ LOSSES) + simplex.value(best) == pytest.approx(39.0)
    half = Capped(vector(0, 0, 0), vector(0.5, 0.5, 0.5))
    assert half.corners().tolist() == [[0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]]
    assert Capped(vector(0.2, 0.1), vector(1, 0.4)).corners().tolist() == [
        pytest.approx(c) for c in ([0.6, 0.4], [0.9, 0.1])
    ]
    with pytest.raises(ValueError, match="can for 10 domains, not 11"):
        Capped(torch.zeros(11, dtype=torch.float64), torch.ones(11, dtype=torch.float64)).corners()


def test_sets_that_are_none():
    with pytest.raises(ValueError, match="no mixture is between"):
        Capped(vector(0, 0), vector(0.3, 0.3))
    with pytest.raises(ValueError, match="vertex 1 is no mixture"):
        Hull(torch.stack([vector(0.5, 0.5), vector(0.5, 0.6)]))
