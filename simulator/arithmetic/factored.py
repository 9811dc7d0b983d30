"""Factored leaves: client code sees tensors by their shape, but their content is a combination.

Steps, proximal terms, momentum and corrections by other gradients only change the numbers of a combination. Any
operation that is not linear in the leaf multiplies it out. The ledger of a block holds what its leaves have in
common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import vmap_internals
from fedfleet.simulator.arithmetic.combination import Combination, Number, Outer, PerClient, Shared, Tape, Term


@dataclass
class Notes:
    """What was found out while client code ran: about factoring, and about what phases take.

    Attributes:
        dense: objective -> leaves it uses in another way than as the weight of a linear layer or a convolution.
        reasons: leaf -> the operations that need it multiplied out.
        products: objective -> multiplications that its layers do for one example, forward.
        step_examples: examples a client takes in a step, in the stage where they are fewest; padding counted.
        examples: examples a client takes in a stage, where they are most.
        flop: phase -> floating-point operations for one of the examples that pass through its steps (padding is no example less).
        bytes_down, bytes_up: phase -> bytes of the messages to and from one client.
        sent: phase -> what a client sends, before any transform: tensors without content.
        kept: phase -> bytes of the state that a client keeps.

    """

    dense: dict[str, set[str]] = field(default_factory=dict)
    reasons: dict[str, set[str]] = field(default_factory=dict)
    products: dict[str, int] = field(default_factory=dict)
    step_examples: int | None = None
    examples: int = 1
    flop: dict[str, float] = field(default_factory=dict)
    bytes_down: dict[str, float] = field(default_factory=dict)
    bytes_up: dict[str, float] = field(default_factory=dict)
    sent: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)

    def walked(self, steps: int, rows: int) -> None:
        """Note a stage of so many steps of so many examples."""
        self.step_examples = rows if self.step_examples is None else min(self.step_examples, rows)
        self.examples = max(self.examples, steps * rows)

    def worked(self, phase: str, stages: Iterable[tuple[list[int], int, int]]) -> None:
        """Note what each step of each stage cost a client that was done, the examples of a step, and how many steps there are.

        Where not all were done, the first and the last are what they are, and those between them stand for the others.
        """
        cost, examples = 0.0, 0
        for flop, rows, steps in stages:
            cost += sum(flop)
            examples += rows * steps
            if (left := steps - len(flop)) > 0:
                cost += left * sum(flop[1:-1]) / (len(flop) - 2)
        if examples:
            self.flop[phase] = cost / examples


class Walk:
    """The inputs of all steps of a block, (C, N, i), and their products with shared matrices, each computed once."""

    def __init__(self, inputs: Tensor):
        self.inputs = inputs
        self._products: dict[int, Tensor] = {}

    def product(self, matrix: Tensor, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop`` of the inputs times ``matrix`` (o, i) transposed: (C, r, o), not to be written to."""
        if id(matrix) not in self._products:  # shared terms live as long as the ledger, so their ids stay theirs
            self._products[id(matrix)] = torch.matmul(self.inputs, matrix.mT)
        return self._products[id(matrix)][:, start:stop]


class Ledger:
    """What the factored leaves of one block have in common: the number of clients C, the tapes, the notes.

    ``products`` are the multiplications of layers in the gradient under way, ``flop`` the operations done so far; of one client.
    ``last`` says that the step under way is the last one, and takes one batch: its weights are used for the last time.
    """

    def __init__(self, clients: int, notes: Notes):
        self.clients, self.notes = clients, notes
        self.products, self.flop, self.last = 0, 0, False
        self._shared: dict[int, Shared] = {}
        self._tapes: dict[tuple[str, int, int, Walk | None], Tape] = {}
        self._walks: dict[int, Walk] = {}
        self._shells: dict[tuple[Any, ...], Tensor] = {}

    def walk(self, inputs: Tensor) -> None:
        """Make known the inputs (C, T, R, ...) of all steps, unless they are labels."""
        if not inputs.is_floating_point():
            return
        flat = inputs.reshape(inputs.shape[0], inputs.shape[1] * inputs.shape[2], -1)
        self._walks[inputs.untyped_storage().data_ptr()] = Walk(flat)

    def on_walk(self, h: Tensor) -> tuple[Walk, int] | None:
        """Return the walk that ``h`` (C, r, i) is a slice of, and its first row; None if it is none."""
        walk = self._walks.get(h.untyped_storage().data_ptr())
        if walk is None or h.shape[2] != walk.inputs.shape[2] or h.stride() != walk.inputs.stride():
            return None
        rows, within = divmod(int(h.storage_offset() - walk.inputs.storage_offset()), h.shape[2])
        return None if within else (walk, rows)

    def shell(self, like: Tensor) -> Tensor:
        """Return a tensor of the shape, dtype and device of ``like`` that takes no memory."""
        key = (like.shape, like.dtype, like.device)
        if key not in self._shells:
            self._shells[key] = torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)
        return self._shells[key]

    def shared(self, value: Tensor) -> Shared:
        """Return the term of a shared tensor, the same one each time."""
        return self._shared.setdefault(id(value), Shared(value))

    def outer(self, path: str, h: Tensor, d: Tensor, on: tuple[Walk, int] | None) -> Outer:
        """Record a pair of the leaf at ``path``, whose inputs ``h`` are ``on`` a walk."""
        walk, place = on or (None, None)
        key = (path, d.shape[2], h.shape[2], walk)
        if key not in self._tapes:
            self._tapes[key] = Tape(None if walk is None else walk.inputs)
        return self._tapes[key].append(h, d, place)


class Factored(Tensor):
    """A leaf of client code whose content is a combination: linear operations stay factored, any other multiplies it out."""

    ledger: Ledger
    path: str
    terms: dict[Term, Number]

    @staticmethod
    def of(ledger: Ledger, path: str, like: Tensor, terms: dict[Term, Number]) -> Factored:
        """Make a leaf with the shape, dtype and device of ``like``."""
        new = ledger.shell(like).as_subclass(Factored)
        new.ledger, new.path, new.terms = ledger, path, terms
        return new

    def combination(self) -> Combination:
        """Return the content for all clients of the block."""
        clients = self.ledger.clients

        def whole(c: Number) -> Number:
            if not isinstance(c, Tensor):
                return c
            value, batched = vmap_internals.lower(c)
            return value if batched else value.expand(clients)

        return Combination(clients, self, [(t, whole(c)) for t, c in self.terms.items()])

    def fold(self, value: Tensor) -> None:
        """Take ``value`` (C, ...), the content multiplied out, as the content from now on."""
        self.terms = {PerClient(value): 1.0}

    def multiplied_out(self, reason: str | None = None) -> Tensor:
        """Return an ordinary tensor of client code; with no reason, once its work is done, the leaf still counts as factored."""
        if reason is not None:
            self.ledger.notes.reasons.setdefault(self.path, set()).add(reason)
        content = self.combination()
        with vmap_internals.beneath():
            value = content.dense()
        return vmap_internals.lift(value)

    def norm_of_all(self, dtype: torch.dtype) -> Tensor:
        """Return the Euclidean norm of a client's leaf, a number of client code."""
        content = self.combination()
        with vmap_internals.beneath():
            value = content.norms(dtype)
        return vmap_internals.lift(value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = named(func)
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in LINEAR and not kwargs:
            result = LINEAR[name](*args)
            if result is not NotImplemented:
                return result
        if name == "linalg_vector_norm" and len(args) == 1 and set(kwargs or {}) <= {"dtype"}:
            return args[0].norm_of_all((kwargs or {}).get("dtype") or args[0].dtype)
        own = any(isinstance(a, Tensor) and not isinstance(a, Factored) and a.dim() for a in args)
        reason = f"{name} with a tensor of each client's own" if own else name
        dense = [a.multiplied_out(reason) if isinstance(a, Factored) else a for a in args]
        return func(*dense, **(kwargs or {}))


METADATA = {
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_cuda",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "__hash__",
}
"""What may be asked of a leaf without looking at its content. A transpose is no such thing, though ``w.T`` is an attribute too."""


def named(func: Any) -> str:
    """Return the name of a function, or of the attribute that it gets."""
    return func.__self__.__name__ if func.__name__ == "__get__" else func.__name__


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) or (isinstance(x, Tensor) and not isinstance(x, Factored) and x.dim() == 0)


def _as_leaf(s: Any, leaf: Factored) -> Number:
    """Return a number in a type at least as fine as the leaf's: a float and a float32 make a float32, whatever they multiply."""
    return s.to(torch.promote_types(s.dtype, leaf.dtype)) if isinstance(s, Tensor) else s * 1.0


def _terms(x: Any, ledger: Ledger) -> dict[Term, Number] | None:
    """Return a leaf as terms; None where it is a tensor that differs from client to client."""
    if isinstance(x, Factored):
        return x.terms
    if not isinstance(x, Tensor) or vmap_internals.is_batched(x):
        return None
    return {ledger.shared(x): 1.0}


def _joined(a: Any, b: Any, each: Callable[[Number, Number], Number]) -> Any:
    leaf: Factored = a if isinstance(a, Factored) else b
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape):
        return NotImplemented
    left, right = _terms(a, leaf.ledger), _terms(b, leaf.ledger)
    if left is None or right is None:
        return NotImplemented
    terms = {t: each(left.get(t, 0.0), right.get(t, 0.0)) for t in {**left, **right}}
    return Factored.of(leaf.ledger, leaf.path, leaf, terms)


def _scale(a: Any, s: Any) -> Any:
    if _is_number(a):
        a, s = s, a
    if not (isinstance(a, Factored) and _is_number(s)):
        return NotImplemented
    s = _as_leaf(s, a)
    return Factored.of(a.ledger, a.path, a, {t: c * s for t, c in a.terms.items()})


def _divide(a: Any, s: Any) -> Any:
    return _scale(a, 1.0 / _as_leaf(s, a)) if isinstance(a, Factored) and _is_number(s) else NotImplemented


def _choose(condition: Any, a: Any, b: Any) -> Any:
    if not (isinstance(condition, Tensor) and condition.dim() == 0):
        return NotImplemented

    def pick(x: Number, y: Number) -> Number:
        if isinstance(x, float) and isinstance(y, float) and x == y:
            return x
        return torch.where(condition, number(x), number(y))

    leaf = a if isinstance(a, Factored) else b
    number = lambda x: torch.as_tensor(x, dtype=leaf.dtype, device=leaf.device)  # noqa: E731
    return _joined(a, b, pick)


LINEAR: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: _joined(a, b, lambda x, y: x + y),
    "sub": lambda a, b: _joined(a, b, lambda x, y: x - y),
    "rsub": lambda a, b: _joined(b, a, lambda x, y: x - y),
    "mul": _scale,
    "div": _divide,
    "neg": lambda a: _scale(a, -1.0),
    "where": _choose,
    "zeros_like": lambda a: Factored.of(a.ledger, a.path, a, {}),
    "clone": lambda a: a,
    "detach": lambda a: a,
}
LINEAR |= {"__radd__": LINEAR["add"], "__rmul__": _scale, "__rsub__": LINEAR["rsub"], "true_divide": _divide}
