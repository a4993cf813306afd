"""A machine's own end: a timer of the system with an absolute time, on disk, and an end at once where it boots again.

Three units in ``/etc/systemd/system``, which outlive every process and every reboot (systemd.timer and systemd.time of
systemd 252, which Amazon Linux 2023 has):

    hetopt-end.service     shuts the machine down
    hetopt-end.timer       starts that at an absolute time; written anew with each lease
    hetopt-again.service   shuts the machine down at any boot but the first: its agent is gone, so it has nothing to do
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetopt.core.artifact import write_atomically

UNITS_FOLDER = "/etc/systemd/system"
UNITS_VARIABLE = "HETOPT_UNITS"
"""Where units are, on what only imitates a machine."""

END_SERVICE = "hetopt-end.service"
END_TIMER = "hetopt-end.timer"
AGAIN_SERVICE = "hetopt-again.service"

BOOT_ID = "/proc/sys/kernel/random/boot_id"
_SOONEST_S = 1.0
"""A timer whose time has passed when it is set never elapses."""


def end_service() -> str:
    """The unit that shuts the machine down."""
    return """\
[Unit]
Description=hetopt: ends this machine

[Service]
Type=oneshot
ExecStart=/bin/sh -c 'exec shutdown -h now'
"""


def end_timer(moment: str) -> str:
    """The unit that ends the machine at a time.

    Args:
        moment: in whole seconds since the epoch, or what a shell puts these in place of.
    """
    return f"""\
[Unit]
Description=hetopt: when this machine ends

[Timer]
OnCalendar=@{moment}
AccuracySec=1s
Persistent=true

[Install]
WantedBy=timers.target
"""


def again_service(boot_id: str) -> str:
    """The unit that ends the machine where it boots again.

    Args:
        boot_id: of the first boot, or what a shell puts it in place of.
    """
    return f"""\
[Unit]
Description=hetopt: ends this machine if it boots again

[Service]
Type=oneshot
ExecStart=/bin/sh -c 'grep -qx {boot_id} {BOOT_ID} || exec shutdown -h now'

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True, kw_only=True)
class Timer:
    """The machine's own end, as the boot script has set it.

    Attributes:
        run: carries out a command; says whether that went well.
        units: where the system's units are.
        clock: seconds since the epoch.
    """

    run: Callable[[list[str]], bool]
    units: Path
    clock: Callable[[], float]

    def set(self, end_s: float) -> None:
        """End the machine at a time, and not when it was said before."""
        now_s = self.clock()
        write_atomically(self.units / END_TIMER, end_timer(str(math.floor(max(end_s, now_s + _SOONEST_S)))))
        reloaded = self.run(["systemctl", "daemon-reload"])
        if not (self.run(["systemctl", "restart", END_TIMER]) and reloaded):
            # Without the timer, the other way that systems have to end at a time.
            self.run(["shutdown", "-h", f"+{max(1, math.floor((end_s - now_s) / 60))}"])
