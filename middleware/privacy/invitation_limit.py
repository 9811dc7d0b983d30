"""A limit on invitations: a round may ask only the cohort that the accountant reckons with before a run."""

from __future__ import annotations

from typing import Any

from fedfleet.simulator.algorithm import Cohort, Round
from fedfleet.simulator.errors import FedfleetError


class Asked:
    """The cohort of a round: of so many clients, by the selection, once; any where ``invites`` is None."""

    def __init__(self, invites: int | None, what: str):
        self._invites, self._what = invites, what
        self._cohort: Cohort | None = None

    def invite(self, rnd: Round, size: int, **given: Any) -> Cohort:
        """Do as the round does. Raises FedfleetError where more may be asked, or more often, than is reckoned with."""
        wanted = self._invites
        if wanted is not None and (size != wanted or given.get("role") is not None or self._cohort is not None):
            raise FedfleetError(f"{self._what} is reckoned for rounds that invite {wanted} of all clients, once")
        self._cohort = rnd.invite(size, **given)
        return self._cohort

    def check(self, cohort: Cohort) -> None:
        """Raise FedfleetError where another cohort is asked."""
        if self._invites is not None and cohort is not self._cohort:
            raise FedfleetError(
                "clients are asked whom the selection has not drawn in this round, which is not reckoned with"
            )
