"""Names of clients, classes, features and tokens, as the data's owners write them; nothing is computed with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedfleet.datasets.vocabulary import Vocabulary

SOME = 6  # names that a line has, at most


@dataclass(frozen=True)
class Names:
    """Names, of each kind none where they are not known.

    Attributes:
        clients: of every client, in their order.
        tested: of the clients whose examples are the test examples.
        held_out: of those of them that are no clients here.
        classes: of every label.
        features: of what makes an example, in its order.
        vocabulary: which token stands for what.

    """

    clients: Sequence[str] = ()
    tested: Sequence[str] = ()
    held_out: Sequence[str] = ()
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    vocabulary: Vocabulary | None = None

    def whose(self) -> str:
        """Say in a few words whose the test examples are; nothing where they are nobody's."""
        if not self.tested:
            return ""
        several = len(self.tested) > 1
        held = f" that {'are' if several else 'is'} held out: {some(self.tested)}"
        whole = len(self.held_out) == len(self.tested)
        return f"of {len(self.tested):,} client{'s' * several}{held if whole else ''}"

    def tested_on(self, y: Tensor, classes: int, share: float) -> str:
        """Say which examples models are tested on, by their labels (n, ...), and which of so many classes they have none of.

        They are this ``share`` of all, which is told where whole clients are held out, beside the share of clients, which is what
        was asked for: those have more examples than others, or fewer.
        """
        told = " ".join(filter(None, [f"{len(y):,} examples", self.whose()]))
        if self.held_out:
            clients = len(self.held_out) / (len(self.held_out) + len(self.clients))
            told += f", {share:.0%} of all examples and {clients:.0%} of all clients"
        counted = y[y >= 0] if classes and y.dim() == 1 and not y.is_floating_point() else None
        if counted is not None and len(lacking := (counted.bincount(minlength=classes) == 0).nonzero().flatten()):
            called = [self.classes[i] if self.classes else str(i) for i in lacking.tolist()]
            told += f"; none of {'class' if len(called) == 1 else 'classes'} {some(called)}"
        return told

    def of_clients(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return the names of some clients; none where they are not known."""
        return tuple(self.clients[i] for i in ids) if self.clients else ()


NO_NAMES = Names()


def some(names: Sequence[str], most: int = SOME) -> str:
    """Return names in a line, the first of them where they are many."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[i] for i in range(min(most, len(names)))) + more
