"""Blocks go to fast and slow actors so that none waits long for another, on a clock made up."""

import heapq
import random
from itertools import count

import pytest

from fedfleet.simulator.executors.throughput import Worker, choose, forgotten, paced

MOST = 2


class Round:
    """Blocks on actors of given paces, whose ``believed`` ones go on from round to round."""

    def __init__(self, paces, jitter=0.2):
        self.paces, self.jitter = paces, jitter
        self.believed = [None] * len(paces)
        self.random = random.Random(0)

    def play(self, blocks):
        """Run so many blocks; return the time, and how many each actor has done."""
        load, ends, order, done = [0] * len(self.paces), [], count(), [0] * len(self.paces)
        now, waiting = 0.0, blocks

        def begin(i):
            spent = self.paces[i] * (1 + self.jitter * self.random.uniform(-1, 1))
            heapq.heappush(ends, (now + spent, next(order), i, spent))

        while waiting or ends:
            while waiting:
                i = choose([Worker(n, p) for n, p in zip(load, self.believed, strict=True)], MOST, waiting)
                if i is None:
                    break
                waiting, load[i] = waiting - 1, load[i] + 1
                if load[i] == 1:
                    begin(i)
            assert ends, "blocks wait, and nobody works"
            now, _, i, spent = heapq.heappop(ends)
            load[i], done[i] = load[i] - 1, done[i] + 1
            self.believed[i] = paced(self.believed[i], spent * 7, 7)
            if load[i]:
                begin(i)
        return now, done


def least(paces, blocks):
    """The time that whole blocks take at the least."""
    times = sorted(k * p for p in paces for k in range(1, blocks + 1))
    return next(t for t in times if sum(int(t / p + 1e-9) for p in paces) >= blocks)


@pytest.mark.parametrize("paces", [[1, 4], [1, 1, 4, 4], [1, 2, 3], [1] * 8 + [5] * 8, [1, 10]])
@pytest.mark.parametrize("blocks", [4, 16, 64])
def test_a_round_on_unlike_actors_is_within_a_tenth_of_the_shortest(paces, blocks):
    game = Round(paces)
    game.play(blocks)  # to learn
    game.play(blocks)
    times = [game.play(blocks)[0] for _ in range(20)]
    assert sum(times) / 20 < (1.1 + game.jitter / 4) * least(paces, blocks)


@pytest.mark.parametrize("blocks", [2, 7, 40])
def test_like_actors_share_alike(blocks):
    game = Round([1.0, 1.0, 1.3], jitter=0.1)
    done = [game.play(blocks)[1] for _ in range(10)]
    assert all(max(d) - min(d) <= max(1, blocks // 10) for d in done)


def test_who_has_fewest_goes_first_while_nothing_is_known():
    assert choose([Worker(1), Worker(0), Worker(0)], MOST, 5) == 1
    assert choose([Worker(2), Worker(1)], MOST, 5) == 1
    assert choose([Worker(2), Worker(2)], MOST, 5) is None
    assert choose([], MOST, 5) is None


def test_a_slow_actor_waits_only_where_the_others_end_before_it():
    fast, slow = Worker(2, 1.0), Worker(0, 4.5)
    assert choose([fast, slow], MOST, 3) == 1  # the fast one would take until 5
    assert choose([fast, slow], MOST, 2) is None  # until 4
    assert choose([fast, slow._replace(pace=4.0)], MOST, 2) == 1  # no sooner
    assert choose([fast, slow._replace(pace=1.4)], MOST, 1) == 1  # alike
    assert choose([Worker(1, 1.0), slow], MOST, 1) == 0
    assert choose([Worker(1, 1.0), Worker(0)], MOST, 1) == 1  # of which nothing is known


def test_a_pace_goes_by_the_last_blocks_and_is_forgotten():
    assert paced(None, 6.0, 3) == 2.0
    assert paced(2.0, 12.0, 3) == 3.0
    assert forgotten(10.0, 1.0) == pytest.approx(9.73)
    game = Round([1.0, 1.0])
    game.believed = [1.0, 50.0]  # it was held up once
    rounds = 0
    while not game.play(2)[1][1]:
        game.believed[1] = forgotten(game.believed[1], game.believed[0])
        rounds += 1
    assert 50 < rounds < 200
