"""FedAU's weights: one over the chance of a client to be heard, estimated from when it was.

Wang & Ji, "A lightweight method for tackling unknown participation statistics in federated averaging", ICLR 2024, Algorithm 2.

    paper       here
    omega_n     Counts.weights: the mean of the intervals between answers that are complete, 1 where there is none
    K           cutoff: after so many silent rounds an interval is complete, too
    t           now: the round; or, to count invitations, how often the client has been invited before

The weight of an answer excludes the interval that it completes. Between answers nothing is done: with the last answer at t' (-1 at
first), m complete intervals by then, and c = floor((t - t' - 1) / K),

    omega = (t' + 1 + c K) / (m + c);   after an answer  m <- m + c + 1,  t' <- t

Where hardly anybody is met twice, clients of a domain are counted together (``Tally``), which is not the paper's: invitations by
answers of the domain before the exchange, 1 where there is no answer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Counts(NamedTuple):
    """Who answered when: clients (n,) int64 rising, and of each (n,) int64 its invitations, when it last answered, and the
    intervals that are complete.
    """

    clients: Tensor
    asked: Tensor
    last: Tensor
    complete: Tensor

    @staticmethod
    def nothing() -> Counts:
        """Return the counts before the first round."""
        none = torch.zeros(0, dtype=torch.int64)
        return Counts(none, none, none, none)

    def with_new(self, clients: Tensor) -> Counts:
        """Return the counts with rows for more clients, that have not answered yet."""
        every, place = torch.cat([self.clients, clients]).unique(return_inverse=True)
        here = place[: len(self.clients)]

        def column(known: Tensor, new: int) -> Tensor:
            return torch.full_like(every, new).index_copy(0, here, known)

        return Counts(every, column(self.asked, 0), column(self.last, -1), column(self.complete, 0))

    def weights(self, clients: Tensor, now: Tensor, cutoff: int | None) -> Tensor:
        """Return omega (S,) of clients that have rows: the mean of their complete intervals, 1 where there is none."""
        at = torch.searchsorted(self.clients, clients)
        complete = self.complete[at] + self._cut(at, now, cutoff)
        passed = self.last[at] + 1 + self._cut(at, now, cutoff) * (cutoff or 0)
        return torch.where(complete > 0, passed.double() / complete.clamp(min=1), 1.0)

    def invited(self, clients: Tensor) -> Counts:
        """Return the counts after an invitation of clients that have rows."""
        at = torch.searchsorted(self.clients, clients)
        return self._replace(asked=self.asked.index_add(0, at, torch.ones_like(at)))

    def answered(self, clients: Tensor, now: Tensor, cutoff: int | None) -> Counts:
        """Return the counts after answers of clients that have rows."""
        at = torch.searchsorted(self.clients, clients)
        complete = self.complete.index_add(0, at, self._cut(at, now, cutoff) + 1)
        return self._replace(last=self.last.index_copy(0, at, now), complete=complete)

    def _cut(self, at: Tensor, now: Tensor, cutoff: int | None) -> Tensor:
        """Return how many intervals (S,) of the cutoff's length have been completed by silence since the last answer."""
        if cutoff is None:
            return torch.zeros_like(now)
        return ((now - self.last[at] - 1) // cutoff).clamp(min=0)  # -1 of who has answered in this round already


class Tally(NamedTuple):
    """Invitations and answers of each domain so far: (p,) int64, for the domains that were met."""

    asked: Tensor
    heard: Tensor

    @staticmethod
    def nothing() -> Tally:
        """Return the tally before the first round."""
        none = torch.zeros(0, dtype=torch.int64)
        return Tally(none, none)

    def weights(self, domains: Tensor) -> Tensor:
        """Return omega (S,) of clients of these domains."""
        none = torch.zeros(0, dtype=torch.int64)
        asked, heard = (_more(n, none, int(domains.max()) + 1)[domains] for n in self)
        return torch.where(heard > 0, asked.double() / heard.clamp(min=1), 1.0)

    def invited(self, domains: Tensor) -> Tally:
        """Return the tally after an invitation of clients of these domains."""
        return self._replace(asked=_more(self.asked, domains))

    def answered(self, domains: Tensor) -> Tally:
        """Return the tally after answers of clients of these domains."""
        return self._replace(heard=_more(self.heard, domains))


def _more(counts: Tensor, domains: Tensor, least: int = 0) -> Tensor:
    """Return counts (p,) with one more for each of some domains (S,), of at least so many domains."""
    result = domains.bincount(minlength=max(len(counts), least))
    result[: len(counts)] += counts
    return result
