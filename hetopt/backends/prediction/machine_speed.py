"""What a profile of this machine would say were it taken now, when the machine may be faster or slower than it was.

One reading of the yardstick tells how fast the machine is for a second. Where a profile's own readings lay far apart,
as on processors that are shared with others and change their speed every few seconds, the next minutes will be more
like the mean of those readings than like the last one. A difference is followed as far as it is not scatter. What runs
in earnest found beyond that follows by `host_level`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hetopt.core.calibration_benchmark import MachineReading
from hetopt.core.profile import CompressorCost, Device, Link, Profile, StepTime
from hetopt.optimizer.plan import Earlier, Plan
from hetopt.optimizer.step_time.earlier_runs import EarlierRuns
from hetopt.optimizer.step_time.host_level import contention_reach, followed, told_of_host

OWN_LOG_SD = 0.05
"""The yardstick's own scatter, on a machine that keeps its speed: nothing below it is followed."""

WORTH_SAYING = 0.15


class Present(NamedTuple):
    """A plan with its profile as it would be now.

    Attributes:
        plan: what is about to run.
        reading: of the machine; None: nothing was to be measured.
        slower: times as long as when it was profiled that everything takes.
        notes: what a person should know of that.
    """

    plan: Plan
    reading: MachineReading | None = None
    slower: float = 1.0
    notes: tuple[str, ...] = ()


def at_present(plan: Plan, read: Callable[[], MachineReading]) -> Present:
    """Return the plan with its profile as it would be now: as fast, and as busy as the machine has been seen.

    What the plan assumes of machines that are rented stays as it is. A profile without a yardstick, or one of a GPU,
    of which the yardstick knows nothing, stays too, and nothing is measured for it.

    Args:
        plan: what is about to run on this machine.
        read: `hetopt.core.calibration_benchmark.read_machine`.
    """
    then_s = plan.profile.yardstick_s
    if then_s is None or any(device.kind != "cpu" for device in plan.profile.devices):
        return Present(plan)
    now = read()
    slower = now.yardstick_s / then_s
    scatter = max(OWN_LOG_SD, plan.profile.yardstick_log_sd or 0.0)
    factor = math.exp(followed(math.log(slower), scatter))
    profile = plan.profile if factor == 1 else slowed(plan.profile, factor)
    busy = profile.model_copy(update={"contention": now.contention, "contention_log_sd": now.contention_log_sd})
    busiest = max(profile, busy, key=contention_reach)
    changed = plan.model_copy(update={"profile": busiest})
    return Present(changed, now, factor, tuple(_notes(slower, factor, scatter, contention_reach(busiest))))


def _notes(slower: float, factor: float, scatter: float, reach: float) -> Iterator[str]:
    if max(slower, 1 / slower) >= 1 + WORTH_SAYING:
        compared = f"{slower:.2f} times as much" if slower > 1 else f"{100 * slower:.0f} % of the"
        then = "as when the job was profiled" if slower > 1 else "that it took when the job was profiled"
        follows = "the prediction follows."
        if scatter > WORTH_SAYING / 2:
            follows = (
                f"the prediction is for {factor:.2f} times as much, as that also scattered by {100 * scatter:.0f} %."
            )
        yield f"The same arithmetic takes this machine {compared} processor time {then}: {follows}"
    if reach >= 1 + WORTH_SAYING:
        yield (
            f"Other programs share the processors: computing was seen to take up to {reach:.1f} times its processor "
            "time, and the interval reaches as far."
        )


def as_runs_found(plan: Plan, runs: EarlierRuns | None) -> tuple[Plan, Earlier | None]:
    """The plan with its profile as runs on this machine found it in earnest, and what they said; None: nothing."""
    told = told_of_host(runs, plan.profile)
    if told is None or not told.log_factor:
        return plan, told
    return plan.model_copy(update={"profile": slowed(plan.profile, math.exp(told.log_factor))}), told


def slowed(profile: Profile, slower: float) -> Profile:
    """The profile with everything that this machine's processors did taking ``slower`` times as long."""
    return profile.model_copy(
        update={
            "devices": tuple(_device(device, slower) for device in profile.devices),
            "links": tuple(_link(link, slower) if link.scope == "host" else link for link in profile.links),
            "evaluation_s": None if profile.evaluation_s is None else slower * profile.evaluation_s,
            "startup_s": None if profile.startup_s is None else slower * profile.startup_s,
            "yardstick_s": None if profile.yardstick_s is None else slower * profile.yardstick_s,
        }
    )


def _device(device: Device, slower: float) -> Device:
    flops, copied = device.matmul_flops_per_s, device.copy_bytes_per_s
    return device.model_copy(
        update={
            "step_times": tuple(_step_time(point, slower) for point in device.step_times),
            "compressors": tuple(_compressor(cost, slower) for cost in device.compressors),
            "matmul_flops_per_s": None if flops is None else flops / slower,
            "copy_bytes_per_s": None if copied is None else copied / slower,
        }
    )


def _step_time(point: StepTime, slower: float) -> StepTime:
    return point.model_copy(
        update={
            "step_time_s": slower * point.step_time_s,
            "samples_s": tuple(slower * sample for sample in point.samples_s),
            "load_s": slower * point.load_s,
            "forward_s": slower * point.forward_s,
            "backward_s": slower * point.backward_s,
            "optimizer_s": slower * point.optimizer_s,
        }
    )


def _compressor(cost: CompressorCost, slower: float) -> CompressorCost:
    return cost.model_copy(update={"compress_s": slower * cost.compress_s, "decompress_s": slower * cost.decompress_s})


def _link(link: Link, slower: float) -> Link:
    """Between workers of one machine bytes are carried by its processors."""
    return link.model_copy(
        update={
            "time_s": tuple(slower * time_s for time_s in link.time_s),
            "latency_s": slower * link.latency_s,
            "bytes_per_s": link.bytes_per_s / slower,
        }
    )
