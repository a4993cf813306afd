"""What is sent, and how: decided between control periods by a ratio policy and a planner, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from hetopt.core.artifact import Record
from hetopt.core.comm.composition import DENSE, GATHER, why_not_controlled
from hetopt.core.comm.network_state import NetworkState
from hetopt.core.comm.options import LOOK_AT, Candidate, Candidates
from hetopt.core.comm.planner import Option, Planner, PlanState
from hetopt.core.compression_slowdown import MOST_LOST
from hetopt.core.errors import BadInput
from hetopt.core.events.log import Event
from hetopt.core.run_spec import WEIGHS_WAYS, RunSpec
from hetopt.trainer.comm.network_tracker import NetworkWatch, Timed
from hetopt.trainer.policies.ratio.auto import AutoRatio, AutoState, Outlook, is_dense
from hetopt.trainer.policies.ratio.averaging import Promise, promised
from hetopt.trainer.policies.ratio.choose import choose_ratio_policy
from hetopt.trainer.policies.ratio.gravac import Gravac, GravacState
from hetopt.trainer.policies.ratio.paired_trial import Verdict
from hetopt.trainer.policies.ratio.policy import RatioDecision, RatioObservation, RatioPolicy
from hetopt.trainer.steps.traffic import GroupTraffic

BACKWARD = 2 / 3
"""Part of a step's computation that makes gradients: backward computes two products for each one forwards."""


LOOKED_STEPS = 3
"""Of a period that looks at gains while gradients travel in buckets, at least."""


class ControllerState(Record):
    """What a checkpoint keeps.

    Attributes:
        policy: name of the ratio policy.
        policy_state: what it remembers.
        planner: what the planner remembers.
        ratio, key: the candidate that was in use.
    """

    policy: str
    policy_state: dict[str, Any]
    planner: PlanState
    ratio: float
    key: str


class AdaptiveController:
    """The same on every rank: what changes it is what all ranks read.

    Args:
        spec: of the run; it steers its exchange.
        candidates: what there is to choose from.
        network: as measured at the start; None: nothing here asks for it.
        tries_twins: whether somebody acts on `try_ratio`.

    Attributes:
        candidates: what there is to choose from.
        candidate: in use in the next steps.
        promise: of averages that the run should settle for now, with nothing held back; None: it should not.

    Raises:
        BadInput: the ratio policy cannot steer the compressor.
    """

    def __init__(
        self, spec: RunSpec, candidates: Candidates, network: NetworkState | None, *, tries_twins: bool = False
    ) -> None:
        self._name = spec.ratio_policy
        self.candidates = candidates
        self._watch = None if network is None else NetworkWatch(network=network)
        reason = why_not_controlled(candidates.asked.name, self._name, candidates.asked.collective)
        if reason is not None and not spec.weighs_ways:
            raise BadInput(reason, hint="steer topk, or leave the ratio policy at 'fixed'")
        weighed = [each.option for each in candidates.all] if spec.weighs_ways else []
        if self._name == "scan":
            weighed = [option for option in weighed if option.gain is None]
        self._policy: RatioPolicy[Any] = choose_ratio_policy(
            self._name,
            ratio=spec.compression.ratio,
            settings=spec.ratio_settings,
            options=weighed,
            coefficient=spec.slowdown_coefficient,
            most_lost=MOST_LOST,
            # Samples have to be drawn ahead, and gradients must not need scaling.
            tries_twins=tries_twins and spec.stream is None and spec.injection is None and spec.precision != "fp16",
        )
        self._state: Record = self._policy.initial()
        self._planner = Planner() if network is not None else None
        self._plan = PlanState()
        self._verdict: Verdict | None = None
        self._may_settle = spec.sync.may_settle
        self._promised: Promise | None = None
        self.promise: Promise | None = None
        self._decision = self._first(spec)
        self.candidate = self._candidate_of(self._decision, compute_s=0.0)

    def _first(self, spec: RunSpec) -> RatioDecision:
        """The policy's first wish; what leaves the choice to hetopt begins where the plan was made for."""
        wish = self._policy.first(self.network)
        if self._name == "auto" and spec.compression.ratio < 1:
            start = self.candidates.nearest(spec.compression.ratio).option
            return RatioDecision(
                ratio=start.ratio, option=start.key, measure_gain=True, look_after_steps=wish.look_after_steps
            )
        return wish

    @property
    def look_at(self) -> Sequence[float]:
        """Ratios at which the next look reads gains; none where nobody asks for one."""
        return self.looks if self._decision.measure_gain else ()

    @property
    def looks(self) -> tuple[float, ...]:
        """Ratios at which this run looks at gains, whenever it does."""
        asked = self.candidates.asked.ratio
        return tuple(sorted({*LOOK_AT, *((asked,) if asked < 1 else ())}))

    @property
    def alarm_s(self) -> float | None:
        """A time of exchange that calls for a look before the period is over."""
        return None if self._watch is None else self._watch.alarm_s(self.candidate.option.key)

    @property
    def try_ratio(self) -> float | None:
        """What twins should be trained for before the next step; None: nothing."""
        return self._decision.try_ratio if self._verdict is None else None

    def heard(self, verdict: Verdict) -> None:
        """What they have shown; the same on all ranks."""
        self._verdict = verdict

    def period_steps(self, steps: int) -> int:
        """Steps until the next look, where the run would look after so many."""
        wished = self._decision.look_after_steps
        if wished is None:
            return steps
        # Steps that look exchange after backward: no time of one in buckets. The row may travel under one step more.
        least = LOOKED_STEPS if self._decision.measure_gain and self.candidate.in_buckets else 1
        return max(1, min(steps, max(least, wished)))

    def watch(self, traffic: GroupTraffic) -> bool:
        """Compare what a period's steps took with what they did; whether the network should be measured again."""
        if self._watch is None or not _tells(traffic):
            return False
        option = self.candidate.option
        self._watch = self._watch.after(
            option.key,
            traffic.whole_s,
            traffic.sync_s,
            steps=traffic.exchanges,
            sends_all=is_dense(option),
        )
        return self._watch.wants_measurement

    def measured(self, timings: Sequence[Timed]) -> None:
        """The network was measured again; the same timings on all ranks."""
        assert self._watch is not None
        self._watch = self._watch.measured(timings)

    @property
    def slowdown_coefficient(self) -> float | None:
        """What late gradients are thought to cost (`hetopt.core.compression_slowdown`); None: nobody asks."""
        outlook = self._outlook
        return None if outlook is None else outlook.coefficient

    @property
    def _outlook(self) -> Outlook | None:
        policy, state, network = self._policy, self._state, self.network
        if network is None or not (isinstance(policy, AutoRatio) and isinstance(state, AutoState)):
            return None
        return Outlook(policy, state, network)

    @property
    def network(self) -> NetworkState | None:
        """As tracked; None: nobody asks for it."""
        return None if self._watch is None else self._watch.network

    def judge(
        self,
        traffic: GroupTraffic,
        *,
        step: int,
        epoch: float,
        learning_rate: float,
        steps_left: int | None = None,
        loss: float | None = None,
    ) -> Event | None:
        """Learn from a period that was watched, and decide; what changed, if anything did.

        Args:
            traffic: of the period, of the candidate in use.
            step: steps done.
            epoch: passes over the data completed, with fractions.
            learning_rate: of the first parameter group.
            steps_left: until the run ends by its own rules; absent: that is not known.
            loss: mean over the samples of the period; absent: nobody asks.
        """
        if self._promised is not None:  # with this period all that was held back has gone
            self.promise = self._promised
            return None
        if not _tells(traffic):
            # Nothing but a look, perhaps: not again, or nothing would ever be told of this candidate.
            self._decision = replace(self._decision, measure_gain=False)
            return None
        before = self.candidate
        compute_s = traffic.compute_s
        backward_s = BACKWARD * compute_s
        observation = RatioObservation(
            step=step,
            steps=min(traffic.exchanges, step),
            epoch=epoch,
            workers=len(traffic.rows),
            ratio=before.option.ratio,
            compute_s=compute_s,
            compress_s=traffic.compress_s,
            sync_s=traffic.sync_s,
            sent_bytes=traffic.sent_bytes,
            kept_energy=traffic.kept_energy,
            energy=traffic.energy,
            gradient_norm=traffic.gradient_norm,
            gain_curve=traffic.gain_curve(self.looks),
            backward_s=backward_s,
            network=self.network,
            changes=0 if self._watch is None else self._watch.changes,
            is_suspect=self._watch is not None and self._watch.is_suspect,
            whole_s=traffic.step_s,
            option=before.option.key,
            learning_rate=learning_rate,
            steps_left=steps_left,
            loss=loss,
            verdict=self._verdict,
            level_gains=traffic.level_gains,
        )
        self._verdict = None
        self._state, self._decision = self._policy.decide(self._state, observation)
        self._weigh_averages(before.option)
        self.candidate = self._candidate_of(self._decision, compute_s=compute_s)
        if self.candidate.option.key == before.option.key and self.candidate.compression == before.compression:
            return None
        return {
            "before": before.option.key,
            "after": self.candidate.option.key,
            "reason": self._decision.reason or self._reason or "",
        }

    def _weigh_averages(self, used: Option) -> None:
        """Whether the run had better settle for them: then what is held back is sent first, with one whole gradient.

        That is rounded as averages will be, which may leave a part in thousands of it behind: over slow links a whole
        gradient takes as long as many steps.
        """
        outlook = self._outlook
        if not self._may_settle or outlook is None or self._decision.try_ratio is not None:
            return
        promise = promised(outlook)
        if promise is None:
            return
        if used.gain is not None and used.gain >= (promise.rounding.gain or 1.0):
            self.promise = promise
            self._decision = RatioDecision(ratio=used.ratio, option=used.key)
            return
        self._promised = promise
        self._decision = RatioDecision(
            ratio=promise.rounding.ratio,
            option=promise.rounding.key,
            reason=f"{promise.rounding.key} once, for all that is held back: from then on parameters are averaged",
            look_after_steps=1,
        )

    def _candidate_of(self, decision: RatioDecision, *, compute_s: float) -> Candidate:
        """The candidate that a decision means; where it leaves a choice, the planner's."""
        self._reason: str | None = None
        if decision.option is not None:
            named = self.candidates.find(decision.option)
            assert named is not None, f"{decision.option} is not on the candidates"
            return named
        found = self.candidates.at(decision.ratio)
        if decision.least_gain is not None:
            levels = {"floor_ratio": decision.floor_ratio, "least_gain": decision.least_gain}
            plain = next(each for each in found if each.option.collective in (GATHER, DENSE))
            return replace(plain, compression=plain.compression.model_copy(update=levels))
        if len(found) == 1 or self._planner is None or self.network is None:
            return found[0]
        self._plan, plan = self._planner.decide(
            self._plan, [each.option for each in found], self.network, compute_s=compute_s
        )
        self._reason = plan.reason
        return next(each for each in found if each.option.key == plan.option.key)

    def state(self) -> Mapping[str, object]:
        """What a checkpoint keeps, as plain JSON."""
        return ControllerState(
            policy=self._name,
            policy_state=self._state.model_dump(mode="json"),
            planner=self._plan,
            ratio=self.candidate.option.ratio,
            key=self.candidate.option.key,
        ).model_dump(mode="json")

    def resume(self, saved: Mapping[str, object]) -> None:
        """Continue with what a checkpoint holds, where it suits the policy and the cluster that the run has now.

        The network is not part of it: it was measured anew.

        Raises:
            BadInput: the state is damaged.
        """
        try:
            state = ControllerState.model_validate(saved)
            if state.policy != self._name:
                return
            kind = type(self._policy.initial())
            # What another version of the policy remembered besides means nothing to this one.
            known = {key: value for key, value in state.policy_state.items() if key in kind.model_fields}
            self._state = kind.model_validate(known)
        except ValidationError:
            raise BadInput(
                f"The checkpoint's state of the ratio policy '{self._name}' is damaged.", hint="use an older checkpoint"
            ) from None
        self._plan = state.planner
        found = [
            each for each in (*self.candidates.at(state.ratio), *self.candidates.all) if each.option.key == state.key
        ]
        if found:
            self.candidate = found[0]
            option = state.key if self._name in WEIGHS_WAYS else None
            self._decision = RatioDecision(ratio=state.ratio, option=option, measure_gain=True)
        if isinstance(self._state, GravacState):
            assert isinstance(self._policy, Gravac)
            self._decision = self._policy.payload(self._state)
            self.candidate = self._candidate_of(self._decision, compute_s=0.0)


def _tells(traffic: GroupTraffic) -> bool:
    """Whether anything was seen of the candidate in use."""
    return traffic.exchanges > 0 and traffic.is_finite
