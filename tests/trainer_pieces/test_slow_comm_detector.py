"""The slow-communication detector rings on all workers at once, and only if the network is slow for all of them."""

from __future__ import annotations

import pytest

from hetopt.trainer import slow_comm_detector
from hetopt.trainer.slow_comm_detector import SlowCommDetector


class Bits:
    """What gathering the workers' bits gives, where every other worker says ``others``."""

    others: tuple[float, ...] = ()
    pending = 0

    def __init__(self, row: list[float], world_size: int) -> None:
        self.rows = [row, *([other] for other in Bits.others)]
        Bits.pending += 1

    def wait(self) -> list[list[float]]:
        Bits.pending -= 1
        return self.rows


@pytest.fixture
def bits(monkeypatch: pytest.MonkeyPatch) -> type[Bits]:
    monkeypatch.setattr(slow_comm_detector, "Gathering", Bits)
    Bits.others, Bits.pending = (1.0, 1.0), 0
    return Bits


def rings(bell: SlowCommDetector, times_s: list[float | None]) -> list[bool]:
    return [bell.rings(time_s) for time_s in times_s]


def test_it_rings_one_step_after_the_bits_that_tell_of_two_slow_exchanges_in_a_row(bits: type[Bits]) -> None:
    bell = SlowCommDetector(3)
    bell.set(1.0)
    assert rings(bell, [0.5, 2.0, 0.5, 2.0, None, 2.0, 2.0, 2.0, 2.0]) == [False] * 8 + [True]
    bell.rest()
    assert bits.pending == 0


def test_it_is_silent_while_some_worker_finds_exchanges_short(bits: type[Bits]) -> None:
    bits.others = (1.0, 0.0)
    bell = SlowCommDetector(3)
    bell.set(1.0)
    assert not any(rings(bell, [5.0] * 12))


def test_nobody_listens_without_a_limit(bits: type[Bits]) -> None:
    bell = SlowCommDetector(3)
    bell.set(None)
    assert not any(rings(bell, [5.0] * 12))
    assert bits.pending == 0


def test_a_new_limit_begins_anew(bits: type[Bits]) -> None:
    bell = SlowCommDetector(3)
    bell.set(1.0)
    rings(bell, [2.0] * 4)
    bell.rest()
    bell.set(3.0)
    assert rings(bell, [2.0, 2.0, 4.0, 2.0, 2.0, 4.0, 2.0]) == [False] * 7
