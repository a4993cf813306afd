"""Looks at the real network between periods: a small sum, or some larger ones once it has jumped."""

from __future__ import annotations

import torch

from hetopt.trainer.comm.calibration import handed_on, measure_again
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.hierarchical import HostGroups
from hetopt.trainer.comm.network_tracker import Timed


class NetworkProbe:
    """Of the workers that exchange between machines; the others take part in nothing, and are told.

    Args:
        gradient_bytes: of the dense gradient.
        device: where gradients lie.
        groups: of workers that exchange as one by host; None: all exchange.
    """

    def __init__(self, gradient_bytes: int, *, device: torch.device, groups: HostGroups | None) -> None:
        self._gradient_bytes = gradient_bytes
        self._device = device
        self._by_hosts = groups is not None
        self._group = None if groups is None else groups.between
        self._takes_part = groups is None or groups.between is not None

    def sum_s(self, payload_bytes: int) -> float:
        """Seconds that a sum of so many bytes takes here; 0 where this worker has no part in it."""
        if not self._takes_part:
            return 0.0
        channel = Channel(self._group, on=self._device)
        channel.all_reduce(torch.zeros(max(1, payload_bytes // 4), device=self._device))
        return max(1e-9, channel.messages[-1].time_s)

    def measure(self) -> tuple[Timed, ...]:
        """Sums as they are now; all workers of the default group must ask at the same time."""
        timings: tuple[Timed, ...] = ()
        if self._takes_part:
            timings = measure_again(self._gradient_bytes, device=self._device, group=self._group)
        # The first worker of all leads its host.
        return handed_on(timings, 0, scope="network") if self._by_hosts else timings
