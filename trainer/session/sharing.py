"""A session's periods: what each worker measured is gathered, and shares and exchange are decided alike by all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetopt.core.events.log import Event
from hetopt.core.run_spec import Compression
from hetopt.trainer.agreement import gather_numbers
from hetopt.trainer.policies.choose import choose_policy
from hetopt.trainer.session.batches import Part, ShareTable
from hetopt.trainer.session.exchange import SessionExchange
from hetopt.trainer.session.loaders import SlicedLoader
from hetopt.trainer.session.plan import SessionPlan
from hetopt.trainer.statistics import Period, PeriodLog
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Stopwatch

PERIOD_STEPS = 20
"""Steps between looks at what the workers measured."""

_NUMBERS_OF_A_PLACE = 2

_NO_WAY = "none"
"""Of steps in which no gradients are exchanged."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a period was like.

    Attributes:
        period: as gathered.
        step: steps done.
        epoch: completed.
        samples_seen: by all workers.
        before: shares of the period.
        after: shares from now on.
        reason: why they changed; None: they did not.
        compression: of the period's gradients.
        exchange: field of the ``step`` event that tells how they travelled.
        exchange_changed: how that is changed from now on; None: it is not.
    """

    period: Period
    step: int
    epoch: int
    samples_seen: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    reason: str | None
    compression: Compression
    exchange: Event
    exchange_changed: Event | None


class Sharing:
    """The same on every worker. Steps over incomplete batches, and over shares of before, are not judged.

    Args:
        plan: of the session.
        table: of shares.
        loader: whose batches they are; None: a single worker's, which shares nothing.
        exchange: of gradients; None: there is none.
        learning_rate: tells that of the first parameter group.
        minimum: least share of a worker.
        stopwatch: of the device.
    """

    def __init__(
        self,
        plan: SessionPlan,
        table: ShareTable,
        *,
        loader: SlicedLoader | None,
        exchange: SessionExchange | None,
        learning_rate: Callable[[], float],
        minimum: int,
        stopwatch: Stopwatch,
    ) -> None:
        self._policy = choose_policy(plan.run_spec(table.newest), minimum=minimum)
        self._state: Any = self._policy.initial()
        self._plan = plan
        self._table = table
        self._loader = loader
        self._exchange = exchange
        self._learning_rate = learning_rate
        self._period_steps = PERIOD_STEPS if exchange is None else exchange.period_steps(PERIOD_STEPS)
        self._probe_s = 0.0
        self._log = PeriodLog(stopwatch)
        self._since = 0
        self._step = 0
        self._samples = 0

    @property
    def shares(self) -> tuple[int, ...]:
        """Local batch sizes of a full batch, in rank order."""
        return self._table.newest

    def resume(self) -> None:
        """An epoch begins: what the script did since the last batch is no part of a step."""
        self._log.resume()

    @property
    def ends_period(self) -> bool:
        """Whether the next step is the last of its period."""
        return self._since + 1 >= self._period_steps

    def after(self, trace: StepTrace, part: Part, *, samples: int) -> Told | None:
        """One more step; at the end of a period what it was like, with shares changed where that is worth it.

        Args:
            trace: of the step.
            part: of its last batch.
            samples: of the step, of all workers.
        """
        self._step += 1
        self._since += 1
        self._samples += samples
        if part.shares == self.shares:
            self._log.add(trace)
        else:
            self._log.resume()
        if self._since < self._period_steps:
            return None
        self._since = 0
        if not self._log.unread:
            return None
        return self._close()

    def _close(self) -> Told:
        workers, exchange = len(self.shares), self._exchange
        traffic = self._log.traffic(
            way=_NO_WAY if exchange is None else exchange.way,
            dense_bytes=0 if exchange is None else exchange.dense_bytes,
            looks=0 if exchange is None else exchange.looks,
            probe_s=self._probe_s,
        )
        row = self._log.close(pace_use=0.0, memory_bound=0, stop_wished=False, since_checkpoint_s=0.0)
        place = (0, 0) if self._loader is None else self._loader.drawn
        rows = gather_numbers([*map(float, place), *row.to_list(), *traffic.to_list()], workers)
        before = self.shares
        period = Period.of([one[_NUMBERS_OF_A_PLACE:] for one in rows], local_batch_sizes=before)
        # No worker may have drawn a batch that it is to share in another way than the others.
        epoch, number = max((int(one[0]), int(one[1])) for one in rows)
        reason = None
        if workers > 1:
            self._state, decision = self._policy.decide(self._state, period.observation(max(0, epoch)))
            reason = decision.reason
            if decision.changed:
                self._table.change(decision.local_batch_sizes, since=(epoch, number))
            self._log.judged(changed=decision.changed)
        compression = Compression() if exchange is None else exchange.compression
        told = {} if exchange is None else exchange.event(period.traffic)
        changed = self._steer(period, epoch + number / self._batches if self._batches else float(epoch))
        self._log.resume()
        return Told(
            period=period,
            step=self._step,
            epoch=max(0, epoch),
            samples_seen=self._samples,
            before=before,
            after=self.shares,
            reason=reason,
            compression=compression,
            exchange=told,
            exchange_changed=changed,
        )

    def _steer(self, period: Period, epoch: float) -> Event | None:
        """Decide how gradients travel in the next period, and how long that is; how it changed."""
        exchange = self._exchange
        if exchange is None:
            return None
        changed = exchange.judge(
            period.traffic, step=self._step, epoch=epoch, learning_rate=self._learning_rate(), loss=period.loss
        )
        self._period_steps = exchange.period_steps(PERIOD_STEPS)
        self._probe_s = exchange.probe_s()
        return changed

    @property
    def _batches(self) -> int | None:
        """Of an epoch; None: a stream's are not known."""
        try:
            return None if self._loader is None else len(self._loader)
        except TypeError:
            return None
