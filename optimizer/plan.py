"""The `Plan`: the cluster to rent, how the work is split over it, what it costs and takes, and why it won."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hetopt.core.artifact import Artifact, Record, RecordLeavingOut
from hetopt.core.batch_partition import WorkerTime
from hetopt.core.errors import BadInput
from hetopt.core.formatting import cluster, count, counted, duration, round_up_s, round_up_usd, usd
from hetopt.core.memory import Precision, Sharding
from hetopt.core.profile import LearningRateRule, Profile
from hetopt.core.run_spec import Compression, RunSpec, Settings, StopRule, Synchronization

Market = Literal["spot", "on-demand"]

AWS = "aws"
OWN = "own"
"""Word that stands in place of a region, and of a cloud, where machines are not rented."""


def cloud_of(region: str) -> str:
    """Return the cloud of a region's name: 'lambda' of ``lambda:us-east-1``, 'aws' of any name without a colon."""
    return region.partition(":")[0] if ":" in region else AWS


Evidence = Literal["measured", "interpolated", "extrapolated", "counted"]

EVIDENCE_IN_WORDS: Mapping[Evidence, str] = MappingProxyType(
    {
        "measured": "measured on that type",
        "interpolated": "taken from a measured machine of the same family or accelerator",
        "extrapolated": "extrapolated from another kind of machine",
        "counted": "counted by its operations, not measured",
    }
)
"""What the step time of a machine type rests on, in words, from the best known to the least."""

Objective = Literal["balanced", "fastest", "cheapest"]
"""What is wanted within the limits. ``balanced`` stops paying where a tenth less time would cost over a fifth more."""

ScalingRule = LearningRateRule
"""How the learning rate follows the global batch size: not at all, in proportion, or by the square root."""


class Assumptions(RecordLeavingOut):
    """Step-time line (s by samples) and link of each worker of a group of machines, as a plan predicted them.

    A step of ``b`` samples takes ``max(floor_s, fixed_s + per_sample_s * b)``. Where a local batch is cut into
    micro-batches, each takes that for its own samples, but for ``once_s``, which a step takes once.

    Attributes:
        fixed_s: seconds of a step whatever its samples.
        per_sample_s: seconds a sample.
        floor_s: seconds that a step takes at least.
    """

    LEFT_OUT = ("shard", "recomputes")

    fixed_s: NonNegativeFloat
    per_sample_s: PositiveFloat
    floor_s: NonNegativeFloat = 0.0
    shard: Sharding = Field(default="none", description="what the workers of a machine share of the model")
    recomputes: bool = Field(default=False, description="activations are computed again in the backward pass")
    max_samples: PositiveInt | None = Field(default=None, description="what a worker's memory holds")
    micro_batch: PositiveInt | None = Field(
        default=None, description="samples that are computed together at most; absent: all of a local batch"
    )
    once_s: NonNegativeFloat = Field(default=0.0, description="of the fixed part, the optimizer's update")
    link_latency_s: NonNegativeFloat = Field(description="of one message of the plan's collective")
    link_bytes_per_s: PositiveFloat = Field(description="that its collective reaches")

    @property
    def together(self) -> int | None:
        """Most samples that a worker computes at once: the micro-batch, else what its memory holds.

        None: any number.
        """
        return self.micro_batch or self.max_samples

    @property
    def time(self) -> WorkerTime:
        """The step-time line of one worker's computation, micro-batches included."""
        return WorkerTime(
            fixed_s=self.fixed_s,
            per_sample_s=self.per_sample_s,
            floor_s=self.floor_s,
            micro_batch=self.micro_batch,
            once_s=min(self.once_s, max(self.floor_s, self.fixed_s)),
        )

    def time_s(self, samples: int) -> float:
        """Return the seconds that one worker computes for a step of ``samples`` samples of its own, as predicted."""
        return self.time.time_s(samples)


class ObservedLosses(Record):
    """Machine-hours, losses and outages of a spot pool that were observed before a plan was made.

    ``instance_hours`` are those of all machines together, ``losses`` the machines that were taken back.
    """

    instance_hours: PositiveFloat
    losses: NonNegativeInt
    lost_together: float = Field(default=1.0, ge=1, description="machines lost at a time")
    outages: NonNegativeInt = Field(default=0, description="lost machines in whose place another came")
    outage_hours: NonNegativeFloat = Field(
        default=0, description="from losses to the next machine, or to the end of a run that got none, together"
    )
    until: str = Field(description="when the last of it was seen, ISO 8601")

    @property
    def in_words(self) -> str:
        """The observed losses in words: '3 losses in 41 instance-hours'."""
        losses, hours = f"{self.losses} loss{'es' * (self.losses != 1)}", count(self.instance_hours)
        return f"{losses} in {hours} instance-hour{'s' * (self.instance_hours != 1)}"


NetworkSource = Literal["samples", "profile", "catalogue"]
"""Where the links between machines of a type are known from: whole steps of such machines ("samples"), timed
collectives ("profile"), or the published network rate ("catalogue")."""


UNLIKE = " + "
"""Separator in the name of a machine's GPUs where they are unlike, each with its memory."""


class Hardware(Record):
    """CPUs, memory and GPUs of one machine.

    ``gpu`` is the GPU's name; of unlike GPUs all names, and ``gpu_memory_gib`` the least memory of them.
    """

    vcpus: PositiveInt
    memory_gib: PositiveFloat
    gpu: str | None = Field(default=None, description="absent without one")
    gpus: NonNegativeFloat = Field(default=0, description="of the machine; below 1 where it has a part of one")
    gpu_memory_gib: PositiveFloat | None = Field(default=None, description="of each")

    @property
    def in_words(self) -> str:
        """The hardware in words: '8 × A100 40 GiB', '1/8 L4 3 GiB' of a part, '16 vCPUs 32 GiB' without a GPU."""
        if self.gpu is None or UNLIKE in self.gpu:
            return self.gpu or f"{counted(self.vcpus, 'vCPU')} {self.memory_gib:g} GiB"
        many = "" if self.gpus == 1 else f"{self.gpus:g} × " if self.gpus > 1 else f"1/{1 / self.gpus:g} "
        memory = "" if self.gpu_memory_gib is None else f" {self.gpu_memory_gib:.0f} GiB"
        return f"{many}{self.gpu}{memory}"


class MachineMemory(Record):
    """Bytes that one worker of a machine type holds in training, by what they are for.

    Counted are tensors; on a CPU ``peak_bytes`` is at least the measured peak of a process.
    """

    instance_type: str
    device: str = Field(description="its GPU, or 'main memory'")
    device_bytes: PositiveInt
    usable_bytes: PositiveInt = Field(description="for training, less the reserve of allocators and system")
    local_batch_size: PositiveInt = Field(description="samples of a worker in a step")
    micro_batch: PositiveInt = Field(description="of them, what is computed together")
    largest_micro_batch: PositiveInt | None = Field(description="that fits; absent: any")
    parameter_bytes: NonNegativeInt = Field(description="of parameters and buffers")
    gradient_bytes: NonNegativeInt
    optimizer_bytes: NonNegativeInt
    residual_bytes: NonNegativeInt = Field(description="that the gradient exchange keeps from step to step")
    activation_bytes: NonNegativeInt = Field(description="all that a step takes beside, at this micro-batch")
    peak_bytes: PositiveInt


class Group(Record):
    """Machines of one type and market in a plan's cluster: number, price, and each worker's local batch size.

    Raises:
        ValueError: ``local_batch_sizes`` has not one entry for each worker of the group.
    """

    instance_type: str
    machines: PositiveInt
    workers_per_machine: PositiveInt = 1
    market: Market
    region: str
    price_usd_per_hour: PositiveFloat = Field(description="for one machine")
    price_date: str
    price_source: str
    price_is_estimate: bool
    interruption_band: str | None = Field(description="share of machines interrupted in a month, such as '<5%'")
    watched: ObservedLosses | None = Field(
        default=None, description="what the belief of losses rests on beside the prior"
    )
    network: NetworkSource | None = Field(
        default=None, description="where those links are known from; absent with one machine, and in older plans"
    )
    local_batch_sizes: tuple[PositiveInt, ...] = Field(description="one for each worker of the group")
    evidence: Evidence = Field(description="where the group's step time comes from")
    hardware: Hardware | None = Field(default=None, description="absent in plans of versions that did not write it")
    assumed: Assumptions | None = Field(
        default=None, description="absent in plans of versions that did not write it down"
    )

    @model_validator(mode="after")
    def _one_share_a_worker(self) -> Self:
        """Return the group if each worker has a local batch size; raise `ValueError` otherwise."""
        if len(self.local_batch_sizes) != self.machines * self.workers_per_machine:
            raise ValueError("local_batch_sizes must have one entry for each worker of the group")
        return self

    @property
    def is_own(self) -> bool:
        """True where the machines are one's own, so that nothing is rented."""
        return self.region == OWN

    @property
    def terms(self) -> str:
        """The terms of the machines: 'spot', 'on-demand' or 'your own'."""
        return "your own" if self.is_own else self.market

    @property
    def memory_in_words(self) -> str | None:
        """A phrase on what memory forces: 'takes micro-batches of 32 samples, to fit 16 GiB'; None: nothing.

        'shares the model over 8 devices' comes first where one device does not hold it. None also where the plan did
        not write down what it assumed.
        """
        if self.assumed is None:
            return None
        part, has, words = self.assumed.micro_batch, self.hardware, []
        if self.assumed.shard != "none":
            words.append(f"shares the model over {self.workers_per_machine} devices")
        if part is not None and max(self.local_batch_sizes) > part:
            words.append(f"takes micro-batches of {part} sample{'s' * (part != 1)}")
        size = None if has is None else has.memory_gib if has.gpu is None else has.gpu_memory_gib
        fits = "its memory" if size is None else f"{size:.3g} GiB"
        return f"{' and '.join(words)}, to fit {fits}" if words else None


class Range(Record):
    """Predicted figure with its 90 % interval, all in one unit, which the field's name says.

    Raises:
        ValueError: the value lies outside of its interval.
    """

    value: NonNegativeFloat
    low: NonNegativeFloat
    high: NonNegativeFloat

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        """Return the interval if it holds its value; raise `ValueError` otherwise."""
        if not self.low <= self.value <= self.high:
            raise ValueError("an interval must hold its value: low <= value <= high")
        return self


class CostTerm(Record):
    """Line of a bill: its name, USD of the whole run, and how it was computed."""

    name: str
    usd: NonNegativeFloat
    basis: str = Field(description="how the line was computed, with the date and source of its price")


class Prediction(Record):
    """Predicted time (s) and cost (USD) of a run on one cluster, with their parts."""

    step_time_s: Range
    compute_s: NonNegativeFloat = Field(description="slowest worker's computation in a step")
    communication_s: NonNegativeFloat = Field(description="what a step shows of the exchange, compression included")
    waiting_s: NonNegativeFloat = Field(description="mean over workers of waiting for the slowest")
    steps: Range
    steps_source: str
    training_s: Range = Field(description="steps times step time, evaluations included")
    startup_s: NonNegativeFloat = Field(description="from the request to the first step")
    closed_s: NonNegativeFloat = Field(
        default=0, description="of the total, outside the hours in which machines may be used"
    )
    unavailable_s: NonNegativeFloat = Field(
        default=0,
        description="of the total, expected waiting for spot machines that are not to be had; nothing is paid",
    )
    data_transfer_usd: NonNegativeFloat = Field(
        default=0, description="of the data set from another region, before the launch; in the cost"
    )
    total_s: Range = Field(description="its value is the median")
    cost_usd: Range = Field(description="its value is the median")
    cost_terms: tuple[CostTerm, ...] = Field(description="of a run of median cost, which they sum to")

    @property
    def medians(self) -> tuple[float, float]:
        """The median time and cost that people are shown, s and USD."""
        return self.total_s.value, self.cost_usd.value

    @property
    def bill(self) -> tuple[CostTerm, ...]:
        """The cost terms as people are shown them: several below a hundredth of the bill each are one, 'the rest'."""
        whole = sum(term.usd for term in self.cost_terms)
        small = [term for term in self.cost_terms if term.usd < SMALL * whole]
        if len(small) < 2:
            return self.cost_terms
        large = tuple(term for term in self.cost_terms if term not in small)
        names = ", ".join(term.name for term in small)
        return (
            *large,
            CostTerm(name="the rest", usd=sum(term.usd for term in small), basis=f"{names}: below 1 % each"),
        )


def _took(total_s: Range, cost_usd: Range) -> str:
    """Return time and cost with their intervals, as a phrase."""
    return (
        f"{duration(total_s.value)} ({duration(total_s.low)} to {duration(total_s.high)}), "
        f"{usd(cost_usd.value)} ({usd(cost_usd.low)} to {usd(cost_usd.high)})"
    )


SMALL = 0.01
"""Part of a bill below which a line is not worth showing by itself."""


class Candidate(RecordLeavingOut):
    """Cluster with local batch sizes and gradient exchange, and the predicted time and cost of a run on it.

    Raises:
        ValueError: the local batch sizes of all workers do not sum to ``global_batch_size``.
    """

    LEFT_OUT = ("precision",)

    groups: tuple[Group, ...] = Field(min_length=1)
    global_batch_size: PositiveInt
    compression: Compression
    collective: str
    sync: Synchronization = Field(
        default=Synchronization(), description="when workers sum gradients or average parameters"
    )
    precision: Precision = Field(default="fp32", description="what matrices are multiplied in")
    disk_gb: PositiveInt = Field(default=100, description="of each machine; 100 in plans that did not say")
    prediction: Prediction

    @model_validator(mode="after")
    def _shares_sum_to_batch(self) -> Self:
        """Return the candidate if its local batch sizes sum to the global one; raise `ValueError` otherwise."""
        if sum(sum(group.local_batch_sizes) for group in self.groups) != self.global_batch_size:
            raise ValueError("the shares of all workers must sum to global_batch_size")
        return self

    def __str__(self) -> str:
        """Return the cluster, time and cost of a candidate."""
        return f"{self.in_words}: {_took(self.prediction.total_s, self.prediction.cost_usd)}"

    def __repr__(self) -> str:
        return f"<Candidate {self}>"

    @property
    def usd_per_hour(self) -> float:
        """The hourly price of all machines together, USD, without disks, addresses and traffic."""
        return math.fsum(group.machines * group.price_usd_per_hour for group in self.groups)

    @property
    def in_words(self) -> str:
        """The machines in words: '2 × g5.xlarge + 1 × g4dn.xlarge (spot)'."""
        terms = sorted({group.terms for group in self.groups})
        is_uniform = len(terms) == 1
        names = ((g.machines, g.instance_type if is_uniform else f"{g.instance_type} {g.terms}") for g in self.groups)
        return cluster(names) + (f" ({terms[0]})" if is_uniform else "")

    @property
    def hardware_in_words(self) -> str:
        """The hardware of one machine of each kind: 'A10G 22 GiB + T4 16 GiB'; empty in plans that did not write it."""
        return " + ".join(dict.fromkeys(group.hardware.in_words for group in self.groups if group.hardware is not None))


ChoiceName = Literal[
    "here", "balanced", "cheapest", "cheap", "fastest", "fast", "weighed", "safest", "own", "rented", "other GPU"
]
"""Names of the choices that a plan shows. ``here``: the machine that was profiled. ``safest``: on demand, so that no
machine is taken back. ``weighed``: by weights of time and cost that were given. ``other GPU``: the best with one of
the GPUs that were named, where no other choice has it. ``cheap``, ``fast``: the best for whoever wants the cheapest
or fastest, which counts doubt, where another choice's median is less. ``own``, ``rented``: the best of one's own
machines, or of rented ones, where the plan is of the others."""


class QuotaNeed(Record):
    """vCPUs that a cluster takes of one AWS quota, beside the vCPUs that the account is granted.

    ``code`` and ``name`` are those by which AWS knows the quota, ``vcpus`` what the cluster takes.
    """

    bucket: str = Field(description="as `quotas` has it: 'spot:g'")
    code: str
    name: str
    vcpus: PositiveInt
    new_account: NonNegativeInt = Field(description="what AWS grants a new account")
    granted: NonNegativeInt | None = Field(default=None, description="what it was planned with; absent: not known")


class Choice(Record):
    """Cluster that a plan shows beside others, under the names of the objectives that it is best for.

    ``total_s`` and ``cost_usd`` are medians with 90 % intervals, ``quotas`` the AWS quotas that the machines count
    against.
    """

    names: tuple[ChoiceName, ...] = Field(min_length=1)
    candidate: Candidate | None = Field(default=None, description="absent for the machine that was profiled")
    total_s: Range
    cost_usd: Range
    chance: NonNegativeFloat | None = Field(default=None, description="of keeping the limits; absent without any")
    times_s: tuple[NonNegativeFloat, ...] = Field(
        default=(), description="of equally likely runs, ascending; empty in plans of versions that did not draw them"
    )
    costs_usd: tuple[NonNegativeFloat, ...] = Field(
        default=(), description="of equally likely runs, ascending; empty where times_s is"
    )
    quotas: tuple[QuotaNeed, ...] = ()

    def __str__(self) -> str:
        """Return the names, machines, time and cost of a choice."""
        machines = "this machine" if self.candidate is None else self.candidate.in_words
        return f"{'/'.join(self.names)}: {machines}, {_took(self.total_s, self.cost_usd)}"

    def __repr__(self) -> str:
        return f"<Choice {self}>"

    @property
    def usd_per_hour(self) -> float:
        """The hourly price of all machines together, USD; 0 for the machine that was profiled."""
        return 0.0 if self.candidate is None else self.candidate.usd_per_hour


class Goal(Record):
    """End of training, and hard limits on total USD and seconds, as the user asked for them; None: no such limit.

    ``ends`` says by what training ends. ``target_metric`` and ``target_value`` are set where that is a target.
    """

    budget_usd: PositiveFloat | None = None
    deadline_s: PositiveFloat | None = None
    ends: Literal["target", "epochs", "steps"]
    amount: PositiveFloat | None = Field(default=None, description="epochs or steps; absent for a target")
    target_metric: str | None = None
    target_value: float | None = None
    zone: str | None = Field(default=None, description="availability zone that all machines must be in; absent: any")


def limits_in_words(article: str, budget_usd: float | None, deadline_s: float | None, joint: str = "and") -> str:
    """Return budget and deadline as a phrase, such as 'its budget of $5.00 and its deadline of 6 h'; '': both are None.

    Args:
        article: begins each limit, such as 'its'.
        budget_usd: budget; None: it is left out.
        deadline_s: deadline, seconds; None: it is left out.
        joint: word between the two.
    """
    asked = (
        ("budget", None if budget_usd is None else usd(budget_usd)),
        ("deadline", None if deadline_s is None else duration(deadline_s)),
    )
    return f" {joint} ".join(f"{article} {name} of {amount}" for name, amount in asked if amount is not None)


class RegionOffer(Record):
    """Best cluster of one machine type in a region, where a plan compared regions.

    ``data_transfer_usd`` is the part of the cost that moving the data set there takes.

    ``machines`` are in words; ``total_s`` and ``cost_usd`` are medians.
    """

    region: str
    machines: str
    total_s: NonNegativeFloat
    cost_usd: NonNegativeFloat = Field(description="with the data set's transfer")
    data_transfer_usd: NonNegativeFloat = 0


SURE = 0.9
"""Probability with which a plan has to keep its limits where nobody asks for another; less is a risk."""


class Sensitivity(Record):
    """Probability that the chosen cluster keeps budget and deadline, and what would make it higher.

    A plan that keeps its limits with probability ``chance`` does so in that share of simulated runs: over prices,
    losses of machines, step times and steps.
    """

    gap: NonNegativeFloat | None = Field(
        description="no mix that was looked at is better than the choice by a larger part; absent where not shown"
    )
    chance: NonNegativeFloat | None = Field(description="of keeping budget and deadline; absent without either")
    confidence: NonNegativeFloat | None = Field(
        default=None, description="the chance in simulated runs by which it was chosen; absent: by its interval"
    )
    asked: NonNegativeFloat = Field(default=SURE, description="the chance that it must have to be no risk")
    risk_accepted: bool = Field(default=False, description="whether a lower chance was accepted when it was planned")
    remedies: tuple[str, ...] = Field(
        default=(), description="what would make the chance as high as asked, if it is not"
    )
    cost_90_usd: NonNegativeFloat = Field(description="nine of ten simulated runs cost less")
    total_90_s: NonNegativeFloat = Field(description="nine of ten simulated runs take less")

    @property
    def is_risk(self) -> bool:
        """True where the plan keeps its limits with less than the asked probability; False without limits."""
        return self.chance is not None and self.chance < self.asked


class Plan(Artifact):
    """Plan of a run: the chosen cluster, alternatives on the Pareto front, and the run that would be launched."""

    KIND: ClassVar[str] = "plan"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt recommend PROFILE --budget USD -o FILE"
    SHOWN_BY: ClassVar[str] = "hetopt.reports.plan_document:page"

    created: str
    hetopt_version: str
    goal: Goal
    chosen: Candidate
    stand_ins: tuple[tuple[str, ...], ...] = Field(
        default=(),
        description="by group of the chosen cluster: other types with which the run keeps its limits and intervals",
    )
    pareto: tuple[Candidate, ...] = Field(
        description="no other that was found is better both for who wants the fastest and for who wants the cheapest"
    )
    choices: tuple[Choice, ...] = Field(
        default=(), description="the ways to go side by side; empty in plans of versions that did not compare them"
    )
    regions: tuple[RegionOffer, ...] = Field(
        default=(), description="the plan's region and the next best, by clusters of one type; empty: one was asked for"
    )
    not_compared: str | None = Field(
        default=None, description="how many types have no price, where they are most of those that were asked for"
    )
    advice: str | None = Field(default=None, description="where nothing should be rented, why")
    reasons: tuple[str, ...] = Field(default=(), description="what decided this job's plan, two or three sentences")
    memory: tuple[MachineMemory, ...] = Field(
        default=(), description="what a worker of each machine type holds; empty where the profile did not count it"
    )
    explanation: tuple[str, ...] = Field(description="why it won and what would change it, a sentence each")
    searched: str = Field(description="how much of the catalogue was looked at, and how")
    insight: Sensitivity | None = Field(default=None, description="absent in plans of versions that did not look")
    run: RunSpec
    profile: Profile = Field(description="the profile it was planned from, whole, so that a plan stands alone")

    @property
    def with_stand_ins(self) -> list[tuple[Group, tuple[str, ...]]]:
        """The groups of the chosen cluster, each with the types that may be rented in place of its own."""
        return list(zip(self.chosen.groups, (*self.stand_ins, *((),) * len(self.chosen.groups)), strict=False))

    @property
    def risk(self) -> str | None:
        """A warning, a clause without full stop, where the plan keeps its limits with less than the asked probability.

        None: it keeps them with at least that, has no limits, or is of a version that did not look.
        """
        seen = self.insight
        if seen is None or seen.chance is None or not seen.is_risk:
            return None
        budget, deadline = self.goal.budget_usd, self.goal.deadline_s
        most = [
            *([usd(round_up_usd(seen.cost_90_usd))] if budget is not None and seen.cost_90_usd > budget else []),
            *([duration(round_up_s(seen.total_90_s))] if deadline is not None and seen.total_90_s > deadline else []),
        ]
        return (
            f"a run exceeds {limits_in_words('the', budget, deadline, 'or')} in "
            f"{100 - math.floor(100 * seen.chance + 1e-9)} of 100 cases and is stopped unfinished"
            + "; nine in ten runs of this plan need no more than " * bool(most)
            + " and ".join(most)
        )

    def risk_with(self, budget_usd: float) -> str | None:
        """Return the warning `risk` under ``budget_usd``; None: no risk, accepted, or covered by that budget.

        A budget covers the risk if it is above the plan's own, nine of ten simulated runs cost no more, no deadline is
        set, and no more than 0.9 was asked for.
        """
        seen = self.insight
        if seen is None or seen.risk_accepted:
            return None
        raised = self.goal.budget_usd is not None and budget_usd > self.goal.budget_usd
        covered = raised and self.goal.deadline_s is None and seen.asked <= SURE and budget_usd >= seen.cost_90_usd
        return None if covered else self.risk

    def refuse_if_estimated(self) -> None:
        """Raise an error if the plan's job was described, not measured, so that nothing can be run; else do nothing.

        Raises:
            BadInput: the job was described; the hint says how to measure it.
        """
        if self.profile is not None and self.profile.is_counted:
            raise BadInput(
                "This plan is an estimate: its job was described, and nothing of it can be run.",
                hint="measure the job with `hetopt profile -- train.py`, then `hetopt recommend profile.json`; "
                "`hetopt launch PLAN --on rehearsal` runs the plan with something that stands in for the job",
            )

    def adjusted(
        self,
        *,
        steps: int | None = None,
        policy: str | None = None,
        batch_settings: Settings | None = None,
    ) -> Self:
        """Return a copy with other run settings, None as planned; ``steps`` also replace the goal's own end.

        The predictions of the copy stay those of the plan.

        Args:
            steps: end after so many optimizer steps, instead of at the plan's end; None: as planned.
            policy: name of the policy by which the batch is shared among workers; None: as planned.
            batch_settings: settings of that policy that are not its defaults; None: as planned.
        """
        changes = {
            "batch_policy": policy,
            "batch_settings": batch_settings,
            "stop": None if steps is None else StopRule(max_steps=steps),
        }
        run = self.run.model_copy(update={name: value for name, value in changes.items() if value is not None})
        goal = self.goal
        if steps is not None:
            goal = Goal(budget_usd=goal.budget_usd, deadline_s=goal.deadline_s, ends="steps", amount=steps)
        return self.model_copy(update={"run": run, "goal": goal})

    @property
    def plans(self) -> tuple[Candidate, ...]:
        """All plans that people are shown, each once, quickest first: the front, the chosen one and the choices."""
        ways = (way.candidate for way in self.choices if way.candidate is not None)
        plans = dict.fromkeys((self.chosen, *ways, *self.pareto))
        return tuple(sorted(plans, key=lambda plan: plan.prediction.total_s.value))

    def machines(self, candidate: Candidate) -> str:
        """Return a candidate's machines as a phrase, with their region where the plan compared several."""
        region = f" in {candidate.groups[0].region}" if self.regions else ""
        return f"{candidate.in_words}{region}"

    def __str__(self) -> str:
        """Return cluster, time and cost in one line, and below it why nothing should be rented, if so."""
        return self._in_a_line if self.advice is None else f"{self._in_a_line}\n{self.advice}"

    @property
    def _in_a_line(self) -> str:
        prediction = self.chosen.prediction
        return f"{self.chosen.in_words}: {_took(prediction.total_s, prediction.cost_usd)}"

    def __repr__(self) -> str:
        return f"<Plan {self._in_a_line}>"
