"""Plain values out of a pickle, without unpickling: nothing named in the file is imported, nothing in it is called.

The instructions are read one by one with the standard library's `pickletools`. Those that make None, booleans, numbers,
text, bytes, lists, tuples and dicts are followed here; all others are refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, NoReturn

PUSH = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    )
)
CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
PUT, GET = frozenset(("PUT", "BINPUT", "LONG_BINPUT")), frozenset(("GET", "BINGET", "LONG_BINGET"))
NOTHING = frozenset(("PROTO", "FRAME"))


class NotPlain(ValueError):
    """A pickle that is broken, or holds more than plain values; one line."""


def loads(data: bytes) -> Any:
    """Return the value in a pickle of any protocol. Text of Python 2 is read as latin-1. Raises NotPlain."""
    machine = _Machine()
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name == "STOP":
                (value,) = machine.stack
                return value
            machine.do(opcode.name, argument, position or 0)
    except NotPlain:
        raise
    except Exception as e:  # whatever a broken pickle brings about
        raise NotPlain(f"not a whole pickle ({type(e).__name__}: {' '.join(str(e).split())[:80]})") from None
    raise NotPlain("not a whole pickle")


class _Machine:
    """The pickle machine's stack, marks and memo."""

    def __init__(self):
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any, position: int) -> None:
        stack = self.stack
        if name in PUSH:
            stack.append(argument)
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in PUT:
            self.memo[argument] = stack[-1]
        elif name in GET:
            stack.append(self.memo[argument])
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else self._marked()
            _as(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._last(2) if name == "SETITEM" else self._marked()
            _as(dict, stack[-1]).update(zip(items[::2], items[1::2], strict=True))
        elif name in ("LIST", "TUPLE"):
            items = self._marked()
            stack.append(items if name == "LIST" else tuple(items))
        elif name in TUPLES:
            stack.append(tuple(self._last(TUPLES[name])))
        elif name == "DICT":
            items = self._marked()
            stack.append(dict(zip(items[::2], items[1::2], strict=True)))
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            self._marked()
        elif name not in NOTHING:
            self._refuse(name, argument, position)

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("empty stack")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _marked(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def _refuse(self, name: str, argument: Any, position: int) -> NoReturn:
        what = f"holds the instruction {name}"
        if name in ("GLOBAL", "INST"):
            what = f"names {'.'.join(str(argument).split())}"
        elif name == "STACK_GLOBAL":
            what = f"names {'.'.join(str(part) for part in self.stack[-2:])}"
        raise NotPlain(f"{what} at byte {position}, and only numbers, text, lists, tuples and dicts are read"[:300])


def _as(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value
