"""Schedules, and which trials go on: by hand, and beside a plain writing-down of both papers' algorithms."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from fedfleet.tuning.schedules import SCHEDULES, Trial, asha, sha, winner


def played(schedule, scores: Sequence[Sequence[float | None]], rungs: int, reduction: int, at_once=1, seed=0):
    """The steps in the order in which they are begun, and the trials; ``scores`` are each trial's by rung."""
    trials: list[Trial] = []
    steps, under_way, chance = [], [], random.Random(seed)
    while True:
        while len(under_way) < at_once and (step := schedule(trials, len(scores), rungs, reduction)) is not None:
            if step.trial == len(trials):
                trials.append(Trial(step.trial, {}))
            assert trials[step.trial].begun == max(0, step.rung - 1)
            trials[step.trial].begun = step.rung
            steps.append(tuple(step))
            under_way.append(step)
        if not under_way:
            return steps, trials
        trial, rung = under_way.pop(chance.randrange(len(under_way)))
        assert len(trials[trial].scores) == rung
        trials[trial].scores.append(scores[trial][rung])


NINE = [[s, s, s] for s in (3.0, 9.0, 1.0, 4.0, 8.0, 2.0, 7.0, 6.0, 5.0)]


def test_successive_halving_by_hand():
    steps, trials = played(sha, NINE, 3, 3)
    assert steps == [*((i, 0) for i in range(9)), (1, 1), (4, 1), (6, 1), (1, 2)]
    found = winner(trials)
    assert found is not None
    assert found.number == 1


def test_asynchronous_halving_by_hand():
    """After three at a rung one goes on, after six two; trial 4 does so once it is among the best two of five, or of six."""
    steps, _ = played(asha, NINE, 3, 3)
    first = [(0, 0), (1, 0), (2, 0), (1, 1), (3, 0), (4, 0), (5, 0), (4, 1), (6, 0), (7, 0), (8, 0), (6, 1), (1, 2)]
    assert steps == first
    late = [[s, s, s] for s in (1.0, 2.0, 3.0, 9.0, 4.0, 5.0)]
    steps, trials = played(asha, late, 3, 3)
    assert steps == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (5, 0), (5, 1), (3, 2)]
    assert [t.reached for t in trials] == [0, 0, 1, 2, 0, 1], "trial 2 was promoted early, and would not be now"


def test_what_failed_counts_as_the_worst_and_somebody_comes_to_the_end():
    scores = [[None], [1.0, None], [0.5, 0.7, 0.9], [0.2]]
    for schedule in (sha, asha):
        steps, trials = played(schedule, scores, 3, 2)
        assert (2, 2) in steps
        assert winner(trials) is trials[2]
    nobody = [[None]] * 3
    for schedule in SCHEDULES.values():
        steps, trials = played(schedule, nobody, 3, 3)
        assert steps == [(0, 0), (1, 0), (2, 0)]
        assert winner(trials) is None
    two = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    assert played(asha, two, 3, 3)[0] == [(0, 0), (1, 0), (1, 1), (1, 2)], "too few for a promotion: the best goes on"


def test_what_counts_for_a_promotion():
    assert played(SCHEDULES["none"], [[1.0]] * 3, 1, 3)[0] == [(0, 0), (1, 0), (2, 0)], "none: every trial in full"
    failed = [[None], [None], [1.0, 1.0], [2.0, 2.0]]
    assert played(sha, failed, 2, 2)[0][4:] == [(3, 1), (2, 1)], "two of four, though two have failed"
    assert played(asha, failed[:3] * 2, 2, 3)[0][3] == (2, 1), "one of three"
    alike = [[1.0, 1.0]] * 4
    assert played(sha, alike, 2, 2)[0][4:] == [(0, 1), (1, 1)], "of equally good ones the first drawn"
    trials = [Trial(i, {}, [float(i), float(i)][: 1 + (i > 2)], int(i > 2)) for i in range(6)]
    trials += [Trial(i, {}, [float(i)]) for i in (6, 7, 8)]
    assert asha(trials, 99, 3, 3) == (5, 2), "the highest rung first, though trial 8 may go on, too"


def plain_sha(scores, rungs: int, reduction: int) -> set[tuple[int, int]]:
    alive, begun = list(range(len(scores))), set()
    for rung in range(rungs):
        begun |= {(i, rung) for i in alive}
        if rung == rungs - 1:
            break
        order = sorted((i for i in alive if scores[i][rung] is not None), key=lambda i: -scores[i][rung])
        alive = order[: max(1, len(alive) // reduction)]
    return begun


def plain_asha(scores, rungs: int, reduction: int) -> list[tuple[int, int]]:
    """Algorithm 2 of Li et al. for one worker, with its sets of what was promoted, until nobody is left to draw."""
    came: list[dict[int, float]] = [{} for _ in range(rungs)]
    promoted: list[set[int]] = [set() for _ in range(rungs)]
    steps: list[tuple[int, int]] = []

    def job() -> tuple[int, int] | None:
        for k in range(rungs - 2, -1, -1):
            top = sorted(came[k], key=lambda i: (-came[k][i], i))[: len(came[k]) // reduction]
            candidates = [i for i in top if i not in promoted[k]]
            if candidates:
                promoted[k].add(candidates[0])
                return candidates[0], k + 1
        drawn = len(came[0])
        return (drawn, 0) if drawn < len(scores) else None

    while (step := job()) is not None:
        steps.append(step)
        came[step[1]][step[0]] = scores[step[0]][step[1]]
    return steps


@pytest.mark.parametrize("reduction", [2, 3, 4])
@pytest.mark.parametrize("rungs", [2, 4])
def test_both_are_what_their_papers_say(reduction, rungs):
    for case in range(30):
        chance = random.Random(1000 * reduction + 100 * rungs + case)
        scores = [[chance.random() for _ in range(rungs)] for _ in range(chance.randint(1, 40))]
        steps, trials = played(sha, scores, rungs, reduction)
        assert set(steps) == plain_sha(scores, rungs, reduction)
        several, _ = played(sha, scores, rungs, reduction, at_once=5, seed=case)
        assert set(several) == set(steps), "how many run at a time decides nothing"
        wanted = plain_asha(scores, rungs, reduction)
        steps, trials = played(asha, scores, rungs, reduction)
        assert steps[: len(wanted)] == wanted
        assert len(steps) == len(wanted) or max(r for _, r in wanted) < rungs - 1
        assert max(t.reached for t in trials) == rungs - 1
