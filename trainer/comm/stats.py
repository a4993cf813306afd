"""What an exchange tells about itself: bytes, seconds, and the energy that it kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetopt.trainer.comm.channel import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeStats:
    """What one exchange cost this worker, and what it brought.

    Attributes:
        sent_bytes: what it contributed (the backend forwards more, see `collective_time_s`).
        compress_s: its own work: remembering, compressing, adding up what arrived.
        sync_s: the collective operations, with the wait for slower workers.
        messages: those operations one by one.
        energy: sum of squares of gradient and residual; None where nothing can be held back.
        kept_energy: the part of it that what was sent takes away; of a selection, the energy of what was sent.
        look_energies: what the largest elements would have kept, at the ratios that were asked for.
    """

    sent_bytes: int
    compress_s: float
    sync_s: float
    messages: tuple[Message, ...] = ()
    energy: float | None = None
    kept_energy: float | None = None
    look_energies: tuple[float, ...] = ()

    @property
    def inside_s(self) -> float:
        """The part of ``sync_s`` that was between workers of one host."""
        return sum(message.time_s for message in self.messages if message.scope == "host")

    @property
    def gain(self) -> float:
        """Kept energy over energy, of this worker; 1 where nothing is held back, or nothing is."""
        if self.energy is None or self.kept_energy is None or self.energy == 0:
            return 1.0
        return self.kept_energy / self.energy


def summed(parts: Sequence[ExchangeStats]) -> ExchangeStats:
    """The stats of exchanges that follow each other, as of one; energies are known where all parts know theirs."""

    def total(energies: Sequence[float | None]) -> float | None:
        known = [energy for energy in energies if energy is not None]
        return sum(known) if known and len(known) == len(energies) else None

    return ExchangeStats(
        sent_bytes=sum(part.sent_bytes for part in parts),
        compress_s=sum(part.compress_s for part in parts),
        sync_s=sum(part.sync_s for part in parts),
        messages=tuple(message for part in parts for message in part.messages),
        energy=total([part.energy for part in parts]),
        kept_energy=total([part.kept_energy for part in parts]),
    )
