"""The state of NumPy's global generator, as `np.random.get_state` and `set_state` have it, in a microsecond.

These take 60 each, as they go through 624 words one by one, and a session exchanges states twice a batch. The words lie
in memory whose address `BitGenerator.ctypes` gives. What does not lie there is the second of a pair of normal numbers,
which is kept for the next call: where there may be one, NumPy is asked.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

_WORD_BYTES = 4
_MEMORY_BYTES = 625 * _WORD_BYTES  # the words of a Mersenne twister, and the place of the next


class NumPyState:
    """Reads and writes the state of the global generator."""

    def __init__(self) -> None:
        self._memory, self._state = b"", None  # of the newest state that keeps no number; empty: not known

    def now(self) -> Any:
        """As `np.random.get_state` gives it."""
        address = _address()
        memory = b"" if address is None else ctypes.string_at(address, _MEMORY_BYTES)
        if memory and memory == self._memory:
            return self._state
        state: Any = np.random.get_state()
        keeps_none = memory != b"" and not state[3] and memory == _memory_of(state)
        self._memory, self._state = (memory, state) if keeps_none else (b"", None)
        return state

    def use(self, state: Any) -> None:
        """Do what `np.random.set_state` does."""
        address = _address()
        if address is None or state[3] or ctypes.string_at(address, _MEMORY_BYTES) != self._memory:
            np.random.set_state(state)
            return
        self._memory, self._state = _memory_of(state), state
        ctypes.memmove(address, self._memory, _MEMORY_BYTES)


def _address() -> int | None:
    """Where the words are; None: the script has put another kind of generator there."""
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # NumPy's gap
    return int(generator.ctypes.state_address) if isinstance(generator, np.random.MT19937) else None


def _memory_of(state: Any) -> bytes:
    _, words, place, *_ = state
    return bytes(words.astype(np.uint32, copy=False).tobytes()) + int(place).to_bytes(_WORD_BYTES, sys.byteorder)
