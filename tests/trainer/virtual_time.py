"""A clock that tests move."""

from __future__ import annotations


class VirtualClock:
    """Stands still but where somebody sleeps, or a test sets it."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        assert duration_s >= 0
        self.now_s += duration_s
