"""Captures of blocks whose plain numbers differ each time, as rates that fall."""

import math
import operator

import numpy as np
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from fedfleet.simulator.block.capture import Captures
from tests.simulator.block.test_capture import played


def falling(n=12, dtype=torch.float32, mu=0.5):
    return [{"x": torch.randn(3, 4, dtype=dtype), "lr": 0.1 * 0.97**i, "mu": mu} for i in range(n)]


def check(compute, blocks):
    """Check that all results are those of the ordinary way, to the bit; return how many were replayed."""
    found, replayed, _ = played(compute, blocks, after=3)
    assert all(torch.equal(result["y"], compute(given)["y"]) for result, given in zip(found, blocks, strict=True))
    return replayed


def test_what_is_computed_of_falling_rates_is_replayed(subtests):
    rows = {
        "a step": lambda g: g["x"] * -g["lr"],
        "decay": lambda g: g["x"] * (1 - g["lr"] * 0.01) - 2 * g["lr"] * g["x"],
        "two numbers": lambda g: g["x"] * (g["lr"] * g["mu"]) + g["mu"],
        "alpha": lambda g: torch.add(g["x"], g["x"], alpha=-g["lr"]),
        "a tensor of them": lambda g: g["x"] * torch.tensor([g["lr"], 1.0, 2 * g["lr"], 0.0]),
        "whole numbers, then a tensor of them": lambda g: g["x"] * torch.tensor([1, 2, 3, 4]) + torch.tensor(g["lr"]),
        "full": lambda g: g["x"] + torch.full((3, 1), g["lr"]),
        "a bound": lambda g: g["x"].clamp(max=g["lr"]),
        "an exponent": lambda g: g["x"].abs() ** g["lr"],
        "powers": lambda g: g["x"] * g["lr"] ** 2 + 0.9 ** g["lr"],
        "the larger": lambda g: g["x"] * max(g["lr"], 0.001),
        "a constant that is the first rate": lambda g: g["x"] * g["lr"] + g["x"] * 0.1,
        "no use of it": lambda g: g["x"] * (g["lr"] - g["lr"]) + 1.0,
    }
    for name, of in rows.items():
        for dtype in (torch.float32, torch.float64):
            with subtests.test(name, dtype=dtype):
                assert check(lambda g, of=of: {"y": of(g)}, falling(dtype=dtype)) == 7


def test_beside_it_any_number_may_stand():
    for mu in (0.0, 1.0, -1.0, 0.25, math.inf):
        computed = lambda g: {"y": (g["x"] * g["lr"]).clamp(max=g["mu"]) + (1.0 if g["mu"] == 0.0 else 2.0)}  # noqa: E731
        assert check(computed, falling(mu=mu)) == 7


def test_what_hides_a_rate_is_not_replayed(subtests):
    rows = {
        "a function": lambda g: g["x"] * math.sqrt(g["lr"]),
        "a whole number": lambda g: g["x"] * int(1000 * g["lr"]),
        "rounded": lambda g: g["x"] * round(g["lr"], 2),
        "a plain number": lambda g: g["x"] * float(g["lr"]),
        "a bound that it has passed": lambda g: g["x"] * float(np.minimum(g["lr"], 0.05)),
        "a bound that it has not passed": lambda g: g["x"] * float(np.minimum(g["lr"], 0.5)),
        "steps of another": lambda g: g["x"] * int(-math.log10(g["lr"])),
        "a comparison of NumPy's": lambda g: g["x"] * (2.0 if np.float64(0.5) > g["lr"] else 1.0),
        "a key": lambda g: g["x"] * {0.1: 3.0}.get(g["lr"], 4.0),
    }
    for name, of in rows.items():
        with subtests.test(name):
            assert check(lambda g, of=of: {"y": of(g)}, falling()) == 0
    assert played(lambda g: {"y": g["x"] + 1, "told": g["lr"]}, falling(), after=3)[1] == 0


def test_a_branch_on_a_rate_is_replayed_only_while_it_is_taken():
    for bound, replayed in ((0.085, 1), (0.075, 5), (0.001, 7)):  # the first five are counted, captured and compared
        branches = lambda g, bound=bound: {"y": g["x"] * (g["lr"] if g["lr"] > bound else 2.0)}  # noqa: E731
        assert check(branches, falling()) == replayed
    signs = [{"x": torch.ones(2), "lr": 0.1 * 0.9**i * (-1) ** (i > 7)} for i in range(12)]
    assert (
        check(lambda g: {"y": g["x"] * math.copysign(1.0, g["lr"])}, signs) == 3
    )  # of the sign that it was captured with


def test_far_from_where_it_was_compared_it_is_captured_anew():
    fast = [{"x": torch.randn(3, 4), "lr": 0.3**i} for i in range(16)]
    compute = lambda g: {"y": g["x"] * g["lr"] + g["x"]}  # noqa: E731
    captures, replayed = Captures(3), []
    for given in fast:
        key = captures.key("kind", given)
        replayed.append(captures.replay(key, given) is not None)
        if not replayed[-1]:
            captures.ran(key, compute, given, compute(given))
    assert replayed == [i in {5, 6, 9, 10, 13, 14} for i in range(16)]  # captured at 3, 7, 11, compared at 4, 8, 12
    assert check(compute, fast) == 6


def test_numbers_that_stay_are_kinds_as_before():
    assert check(lambda g: {"y": g["x"] * g["lr"]}, [{"x": torch.randn(3), "lr": 0.1} for _ in range(9)]) == 4
    whole = [{"x": torch.randn(3), "steps": i} for i in range(9)]
    assert check(lambda g: {"y": g["x"] * g["steps"]}, whole) == 0  # whole numbers may count steps


OPERATORS = (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.mod, min, max)
NUMBERS = st.sampled_from(["lr", "mu", 0.0, 1.0, -1.0, 0.5, 2, 3.7])
EXPRESSIONS = st.recursive(NUMBERS, lambda of: st.tuples(st.sampled_from(OPERATORS), of, of), max_leaves=6)


@settings(max_examples=40)
@drawn(EXPRESSIONS, st.booleans())
def test_any_arithmetic_gives_the_ordinary_bits(expression, listed):
    def value(of, g):
        if isinstance(of, tuple):
            return of[0](value(of[1], g), value(of[2], g))
        return g[of] if isinstance(of, str) else of

    def compute(g):
        try:
            y = value(expression, g)
        except (ArithmeticError, TypeError):
            y = -1.0
        y = y if not isinstance(y, complex) and abs(y) < 1e30 else 1.0
        return {"y": g["x"] * torch.tensor([y, 0.0, 1.0, 0.5], dtype=g["x"].dtype) if listed else g["x"] * y}

    check(compute, falling(8, torch.float64, 0.3))
