"""Plain numbers of a block that a capture computes anew, such as learning rates that fall: what client code makes of them.

While a block is captured, each number is a ``Traced`` float of an odd value. Arithmetic with it is noted, and so is the outcome of
each comparison. A constant of the captured operations that has the value of a noted result is computed from then on, by the same
operations on Python floats. A block whose numbers would compare otherwise is not replayed. What hides a number from this, such as
``math.sqrt``, leaves a constant in the capture, which then differs from the ordinary way and is refused. So that a hidden bound
shows, too, a capture is compared at numbers far smaller and larger, and serves those between alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

LISTED = 4096
"""Numbers of a constant tensor that are looked at, at most."""
DIGITS = 24
"""Binary digits of a number that may as well be somebody's constant."""


SEEDS = 8
"""Ways to make numbers odd that are tried."""
FACTORS = 0.0103, 0.13, 1.9, 11.7
"""Multiples of its numbers at which a capture is compared; it serves those between the first and the last."""


class Otherwise(Exception):
    """Numbers compare otherwise than those that a capture was made with, or are far from them."""


class NotTraced(Exception):
    """Client code makes something of a number that cannot be noted."""


class _Step(NamedTuple):
    of: Callable[..., Any]
    places: tuple[int, ...]


def free(x: Any) -> bool:
    """Say whether a leaf is a number that may be another in the next block; zeros and what is not finite may not."""
    return isinstance(x, float) and x != 0.0 and math.isfinite(x)


def odd(x: float, time: int) -> float:
    """Return a number near x, of its sign, that is like no other."""
    return x * (1.0 + 0.01 * math.sin(0.7 + 1.3 * time))


def far(x: float, time: int, place: int) -> float:
    """Return one of the numbers at which a capture is compared, for the number at a place."""
    return odd(x * FACTORS[time % len(FACTORS)], time + place + 1)


class Recipe:
    """Computation of a capture's numbers from those of a block. Each has a place: the block's, constants, and results in order.

    Args:
        numbers: of the block it is made at.
        seed: by which they are made odd.

    Attributes:
        given: the numbers, as client code gets them.

    """

    def __init__(self, numbers: Sequence[float], seed: int = 0):
        self._numbers, self._steps = [*numbers], list[_Step | float]()
        self._places = dict[Any, int]()
        self._outcomes = dict[_Step, bool]()
        self._wanted: list[int] = []
        self.given = [Traced.at(self, place, x) for place, x in enumerate(self._odd(seed))]
        self._found = {x.hex(): place for place, x in enumerate(self.given)}

    def better(self) -> Recipe | None:
        """Return an empty recipe at which fewer results have few digits, as a rate times its inverse has or has not."""

        def rounded(seed: int) -> int:
            return sum(_round(x) for x in self._results(self._odd(seed))[len(self._numbers) :])

        seed = min(range(SEEDS), key=rounded)
        return Recipe(self._numbers, seed) if seed else None

    def _odd(self, seed: int) -> list[float]:
        return [odd(x, place + seed * (len(self._numbers) + 1)) for place, x in enumerate(self._numbers)]

    def _results(self, numbers: Sequence[float]) -> list[float]:
        found = [*numbers]
        for step in self._steps:
            found.append(step.of(*(found[place] for place in step.places)) if isinstance(step, _Step) else step)
        return found

    def made(self, of: Callable[..., Any], *numbers: Any) -> Any:
        """Return the result of an operation on numbers, and note it."""
        if not all(isinstance(x, int | float) for x in numbers):
            return NotImplemented
        value = of(*map(_plain, numbers))
        if type(value) is not float:
            raise NotTraced(f"a number becomes {value!r}")
        step = _Step(of, tuple(map(self._place, numbers)))
        place = self._new(step, step)
        if _round(value):  # as constants are that come of nothing
            self._outcomes[_Step(operator.eq, (place, self._place(value)))] = True
        else:
            self._found.setdefault(value.hex(), place)
        return Traced.at(self, place, value)

    def compared(self, of: Callable[..., bool], *numbers: Any) -> Any:
        """Return the outcome of a comparison, and note it."""
        if not all(isinstance(x, int | float) for x in numbers):
            return NotImplemented
        result = of(*map(_plain, numbers))
        self._outcomes[_Step(of, tuple(map(self._place, numbers)))] = result
        return result

    def near(self, numbers: Sequence[float]) -> bool:
        """Say whether a block's numbers lie where the capture has been compared."""
        least, most = 0.98 * FACTORS[0], 1.02 * FACTORS[-1]
        return all(least <= x / mine <= most for x, mine in zip(numbers, self._numbers, strict=True))

    def knows(self, x: Any) -> bool:
        """Say whether a number is one that has been noted."""
        return isinstance(x, float) and x.hex() in self._found

    def __call__(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers that a capture wants, for those of a block. Raises Otherwise, and what the operations raise."""
        if not self.near(numbers):
            raise Otherwise("numbers are far from those that were compared")
        found = self._results(numbers)
        for step, outcome in self._outcomes.items():
            if step.of(*(found[place] for place in step.places)) != outcome:
                raise Otherwise("numbers compare otherwise")
        return [found[place] for place in self._wanted]

    def put_into(self, made: fx.GraphModule) -> None:
        """Let a graph take the numbers that it has as constants, after its tensors."""
        graph, numbers = made.graph, dict[int, fx.Node]()
        nodes = [*graph.nodes]
        first = next(node for node in nodes if node.op != "placeholder")

        def number(place: int) -> fx.Node:
            if place not in numbers:
                with graph.inserting_before(first):
                    numbers[place] = graph.placeholder(f"number_{place}")
            return numbers[place]

        def put(x: Any) -> Any:
            place = self._found.get(x.hex()) if type(x) is float else None
            return x if place is None else number(place)

        for node in nodes:
            if node.op != "get_attr":
                node.args, node.kwargs = map_aggregate(node.args, put), map_aggregate(node.kwargs, put)  # pyright: ignore
                continue
            constant = getattr(made, str(node.target))
            if not isinstance(constant, Tensor) or not constant.is_floating_point() or constant.numel() > LISTED:
                continue
            rounded = {torch.tensor(float.fromhex(x), dtype=constant.dtype).item(): p for x, p in self._found.items()}
            listed = constant.flatten().tolist()
            if not rounded.keys().isdisjoint(listed):
                listed = [number(rounded[x]) if x in rounded else x for x in listed]
                with graph.inserting_before(node):
                    of = (listed, tuple(constant.shape), constant.dtype, constant.device)
                    node.replace_all_uses_with(graph.call_function(filled, of))
                graph.erase_node(node)
        self._wanted = [*numbers]

    def _place(self, x: float) -> int:
        if isinstance(x, Traced):
            return x.place
        return self._new((type(x), repr(x)), x)  # -0.0 is not 0.0

    def _new(self, key: Any, step: _Step | float) -> int:
        if key not in self._places:
            self._places[key] = len(self._numbers) + len(self._steps)
            self._steps.append(step)
        return self._places[key]


def filled(numbers: list[float], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of numbers."""
    return torch.tensor(numbers, dtype=dtype, device=device).view(shape)


def _round(x: float) -> bool:
    """Say whether a number has few digits."""
    return not math.isfinite(x) or (math.frexp(x)[0] * 2.0**DIGITS).is_integer()


def _plain(x: float) -> float:
    return float.__float__(x) if isinstance(x, Traced) else x


def _operation(of: Callable[..., Any]) -> Any:
    return lambda self, *others: self.recipe.made(of, self, *others)


def _turned(of: Callable[..., Any]) -> Any:
    return lambda self, other: self.recipe.made(of, other, self)


def _comparison(of: Callable[..., bool]) -> Any:
    return lambda self, *others: self.recipe.compared(of, self, *others)


def _hidden(self: Traced, *_: Any) -> NoReturn:
    raise NotTraced("a number is looked at")


class Traced(float):
    """A number of a block in client code that is captured: a float whose arithmetic and comparisons are noted."""

    recipe: Recipe
    place: int

    @staticmethod
    def at(recipe: Recipe, place: int, value: float) -> Traced:
        """Make the number at a place of a recipe."""
        new = Traced(value)
        new.recipe, new.place = recipe, place
        return new

    __add__, __radd__ = _operation(operator.add), _turned(operator.add)
    __sub__, __rsub__ = _operation(operator.sub), _turned(operator.sub)
    __mul__, __rmul__ = _operation(operator.mul), _turned(operator.mul)
    __truediv__, __rtruediv__ = _operation(operator.truediv), _turned(operator.truediv)
    __floordiv__, __rfloordiv__ = _operation(operator.floordiv), _turned(operator.floordiv)
    __mod__, __rmod__ = _operation(operator.mod), _turned(operator.mod)
    __pow__, __rpow__ = _operation(operator.pow), _turned(operator.pow)
    __neg__, __pos__, __abs__ = _operation(operator.neg), _operation(operator.pos), _operation(operator.abs)
    __eq__, __ne__, __bool__ = _comparison(operator.eq), _comparison(operator.ne), _comparison(bool)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    __float__ = __int__ = __trunc__ = __floor__ = __ceil__ = __round__ = __divmod__ = __rdivmod__ = _hidden
    is_integer = as_integer_ratio = _hidden
    __hash__ = None  # pyright: ignore[reportAssignmentType] # as a key of a dict it would be compared unseen
