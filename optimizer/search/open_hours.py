"""When the user's own machines may be used, and how much longer a run takes because they are closed at times.

    w_i    what host i adds to the speed of its cluster: its workers over the seconds that a sample takes each of them
    v_k    part of the cluster's speed that is there in slot k of the day:  sum of w_i over hosts that may be used / sum
    E(W)   time from now until work W is done: the least t with  integral from 0 to t of v(s) ds = W

A slot ends where hours of some host begin or end. Hosts that stay go on meanwhile with the whole batch, as fast as they
compute: what they save of communication then is left out.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hetopt.core.hosts import Host
from hetopt.optimizer.convergence.steps_law import Array

DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class OpenHours:
    """Slots of a day that begins now, and whether each of the user's hosts may be used in each slot.

    Attributes:
        slots_s: length of each slot, seconds; together a day.
        hosts: whether each host may be used in each slot, by name; a machine that is not listed may always.
    """

    slots_s: tuple[float, ...] = (DAY_S,)
    hosts: Mapping[str, tuple[bool, ...]]

    @classmethod
    def of(cls, hosts: Sequence[Host], now: datetime.datetime) -> OpenHours | None:
        """Return the slots from ``now`` on in which the inventory's hosts may be used; None: all of them always.

        Hosts that may always be used are left out of the mapping.

        Args:
            hosts: the hosts of the inventory.
            now: beginning of the first slot, in the time of this machine.
        """
        kept = {host.name: host.hours for host in hosts if host.hours is not None}
        since_s = 3600 * now.hour + 60 * now.minute + now.second
        edges = {60.0 * minute for hours in kept.values() for span in hours.spans for minute in span}
        begins = sorted({0.0, *((edge - since_s) % DAY_S for edge in edges)})
        if len(begins) == 1:
            return None
        slots = tuple(np.diff([*begins, DAY_S]).tolist())
        middles = [
            now + datetime.timedelta(seconds=begin + slot / 2) for begin, slot in zip(begins, slots, strict=True)
        ]
        return cls(slots_s=slots, hosts={name: tuple(map(hours.has, middles)) for name, hours in kept.items()})

    def of_host(self, name: str) -> tuple[bool, ...]:
        """Return whether the machine of this name may be used, slot by slot; always True for a rented machine."""
        return self.hosts.get(name, (True,) * len(self.slots_s))


def elapsed_s(work_s: ArrayLike, speed: Array, slots_s: Sequence[float]) -> Array:
    """Return the seconds from now until work that takes ``work_s`` seconds at full speed is done.

    Args:
        work_s: seconds of work at full speed, any shape.
        speed: part of the full speed, 0 to 1, in each slot, above 0 in at least one; broadcasts to the shape of
            ``work_s`` with one axis of slots more.
        slots_s: length of each slot; the day begins anew after the last.
    """
    work = np.asarray(work_s, dtype=np.float64)
    slots = np.asarray(slots_s, dtype=np.float64)
    speed = np.broadcast_to(speed, (*work.shape, len(slots)))
    done = np.cumsum(speed * slots, axis=-1)
    day = np.maximum(done[..., -1], 1e-9)  # where no host is ever open, an end that nobody lives to see
    days = np.maximum(np.ceil(work / day) - 1, 0.0)
    rest = work - days * day
    # The first slot in which the rest is done, up to rounding.
    slot = np.minimum((done < rest[..., None] * (1 - 1e-12)).sum(axis=-1), len(slots) - 1)[..., None]
    here = np.take_along_axis(speed, slot, axis=-1)[..., 0]
    before = np.take_along_axis(done - speed * slots, slot, axis=-1)[..., 0]
    begins = (np.cumsum(slots) - slots)[slot[..., 0]]
    within = np.divide(rest - before, here, out=np.zeros_like(rest), where=here > 0)
    return np.asarray(days * DAY_S + begins + np.maximum(within, 0.0))
