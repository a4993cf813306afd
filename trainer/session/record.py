"""What a session leaves behind for other commands: an event log, and step times to plan from."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import nn

from hetopt.core.errors import BadInput
from hetopt.core.events.log import EVENTS_FILE, Event, EventLog
from hetopt.trainer.session.plan import SessionPlan
from hetopt.trainer.session.sharing import Told

STEPS_FILE = "steps.jsonl"


class SessionRecord:
    """Written by rank 0 alone.

    Args:
        folder: where; None: nothing is written.
        plan: of the session.
        model: what is trained.
        device: where.
        world_size: workers.

    Raises:
        BadInput: the folder cannot be made.
    """

    def __init__(
        self, folder: Path | None, *, plan: SessionPlan, model: nn.Module, device: torch.device, world_size: int
    ) -> None:
        self._plan = plan
        self._device = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
        self._parameters = sum(parameter.numel() for parameter in model.parameters())
        self._step = 0
        self._steps: Path | None = None
        self._has_begun = False
        if folder is not None:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._steps = folder / STEPS_FILE
                self._events = EventLog(folder / EVENTS_FILE)
            except OSError as error:
                raise BadInput(f"{folder} cannot be written: {error.strerror}.", hint="name another folder") from None
        else:
            self._events = EventLog(None)

    def begin(self, shares: tuple[int, ...]) -> None:
        """Write the events that open a log; only the first call does."""
        if self._has_begun:
            return
        self._has_begun = True
        spec = self._plan.run_spec(shares)
        self._events.write(
            "run_started",
            task=spec.task,
            workers=[
                {
                    "host": worker.host,
                    "type": worker.type,
                    "slowdown": worker.slowdown,
                    "local_batch_size": worker.local_batch_size,
                    "device": self._device,
                }
                for worker in spec.workers
            ],
            global_batch_size=spec.global_batch_size,
            parameters=self._parameters,
            compression=spec.compression.model_dump(),
            ratio_policy=spec.ratio_policy,
            collective_policy=spec.collective_policy,
            **({"sync": spec.sync.model_dump()} if spec.is_local else {}),
            resumed_step=0,
        )
        self._events.write("training_started", step=0)

    def tell(self, told: Told, together: Event) -> None:
        """What a period was like.

        Args:
            told: of the period.
            together: what brought the models of workers together that train for themselves; empty where none do.

        Raises:
            OSError: the disk refuses.
        """
        self._step = told.step
        if not math.isfinite(told.period.loss):
            return
        event = told.period.event(step=told.step, epoch=told.epoch, samples_seen=told.samples_seen)
        self._events.write("step", **event, **told.exchange, **together)
        if told.reason is not None:
            self._events.write(
                "shares_changed",
                step=told.step,
                before=list(told.before),
                after=list(told.after),
                reason=told.reason,
            )
        if told.exchange_changed is not None:
            self._events.write("exchange_changed", step=told.step, **told.exchange_changed)
        # Steps that exchange nothing would teach that exchanges take no time.
        if self._steps is not None and not together:
            with self._steps.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(_sample(told, self._plan), allow_nan=False) + "\n")

    def end(self, digest: str) -> None:
        """Write the event that ends the log, with the digest of the parameters, and close it."""
        self._events.write("session_finished", step=self._step, parameters_sha256=digest)
        self._events.close()


def _sample(told: Told, plan: SessionPlan) -> dict[str, object]:
    """The period as a line that `hetopt profile --from-samples` reads: one machine a worker."""
    period = told.period
    compute_s = max(row.compute_s for row in period.rows)
    step_time_s = max(period.step_time_s, compute_s)
    sync_s = min(row.exchange_s for row in period.rows)
    return {
        "nodes": [{"type": name, "workers": 1} for name in plan.types],
        "local_batch_size": list(told.before),
        "compression": {"name": told.compression.name, "ratio": told.compression.ratio},
        "step_time_s": round(step_time_s, 7),
        "sync_time_s": round(min(sync_s, step_time_s), 7),
    }
