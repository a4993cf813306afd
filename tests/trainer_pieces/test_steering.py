"""What is sent follows what was measured: policies and step times behind one door."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks._published_collectives import time_s
from hetopt.core.comm.cost import LinkSpeed, pipelined_s, trainer
from hetopt.core.comm.options import Candidates, CompressTime
from hetopt.core.run_spec import Compression, RunSpec, StopRule
from hetopt.trainer.policies.ratio.auto import BACKWARD
from hetopt.trainer.policies.ratio.policy import Verdict
from hetopt.trainer.steps.adaptive_controller import LOOKED_STEPS, AdaptiveController, GroupTraffic, Traffic

from .runs import run_of
from .virtual_exchange import VirtualRun

WORKERS = 4
NUMEL = 1_000_000
COMPUTE_S = 0.1


def spec(**changes) -> RunSpec:
    return run_of(*[8] * WORKERS, stop=StopRule(max_steps=100, target=True), **changes)


def candidates(run: RunSpec, buckets: int = 1) -> Candidates:
    bare = Candidates(
        asked=run.compression,
        chooses_collective=run.collective_policy == "cheapest",
        numel=NUMEL,
        workers=WORKERS,
        buckets=buckets,
    )
    return replace(bare, compress=dict.fromkeys(bare.families, CompressTime(fixed_s=0.004, per_element_s=0.0)))


def network(link: LinkSpeed):
    return VirtualRun(workers=WORKERS, links=[link], compute_s=COMPUTE_S).fresh()


FAST, SLOW = LinkSpeed(latency_s=1e-4, bytes_per_s=1e9), LinkSpeed(latency_s=1e-3, bytes_per_s=2e6)


def traffic(
    steering: AdaptiveController, link: LinkSpeed, *, gain=lambda ratio: ratio**0.1, steps: int = 10
) -> GroupTraffic:
    """A period in the present way over such links."""
    option = steering.candidate
    exchange_s = option.buckets * time_s(option.operations, link, algorithms=trainer)
    sync_s = exchange_s
    if option.buckets > 1:
        backward_s = BACKWARD * COMPUTE_S
        sync_s = pipelined_s(backward_s, exchange_s, option.buckets) - backward_s
    kept = 1.0 if option.gain == 1 else gain(option.ratio)
    looks = tuple(gain(ratio) for ratio in steering.looks) if steering.look_at else (0.0,) * len(steering.looks)
    one = Traffic(
        exchanges=steps,
        compute_s=COMPUTE_S,
        compress_s=0.004 if option.gain is None else 0.0,
        sync_s=sync_s,
        sent_bytes=sum(part.payload_bytes for part in option.operations) * option.buckets,
        energy=1.0,
        kept_energy=kept,
        gradient_energy=1.0,
        look_energy=1.0 if steering.look_at else 0.0,
        look_energies=looks,
    )
    return GroupTraffic(rows=(one,) * WORKERS)


def drive(
    steering: AdaptiveController, link: LinkSpeed, periods: int, step: int = 0, *, says: str = "harmless"
) -> tuple[int, list]:
    changes = []
    for _ in range(periods):
        seen = traffic(steering, link, steps=steering.period_steps(10))
        step += seen.exchanges
        change = steering.judge(seen, step=step, epoch=step / 50, learning_rate=0.1)
        if steering.try_ratio is not None:
            steering.heard(Verdict(ratio=steering.try_ratio, says=says))
            assert steering.try_ratio is None, "it is asked once"
        if change is not None:
            changes.append(change)
    return step, changes


def test_auto_compresses_where_links_are_slow_and_sends_everything_where_they_are_not() -> None:
    run = spec(ratio_policy="auto", collective_policy="cheapest")
    slow = AdaptiveController(run, candidates(run, buckets=4), network(SLOW), tries_twins=True)
    drive(slow, SLOW, 30)
    assert slow.candidate.ratio < 0.1
    careful = AdaptiveController(run, candidates(run, buckets=4), network(SLOW), tries_twins=True)
    drive(careful, SLOW, 30, says="harmful")
    assert careful.candidate.ratio == 1
    unasked = AdaptiveController(run, candidates(run, buckets=4), network(SLOW))
    drive(unasked, SLOW, 30)
    assert unasked.candidate.ratio == 1
    fast = AdaptiveController(run, candidates(run, buckets=4), network(FAST))
    drive(fast, FAST, 30)
    assert fast.candidate == fast.candidates.dense


def test_a_fixed_ratio_by_the_cheapest_collective() -> None:
    """Gathering many elements from many workers costs more than sharing the choice; few elements are all latency."""
    many = spec(collective_policy="cheapest", compression=Compression(name="topk", ratio=0.3))
    steering = AdaptiveController(many, candidates(many), network(SLOW))
    assert steering.candidate.collective == "ar_topk"
    few = spec(collective_policy="cheapest", compression=Compression(name="topk", ratio=1e-5))
    steering = AdaptiveController(few, candidates(few), network(LinkSpeed(latency_s=0.01, bytes_per_s=1e9)))
    assert steering.candidate.collective == "all_gather"
    assert drive(steering, FAST, 5)[1] == []


@pytest.mark.parametrize("policy", ["warm_up", "accordion", "gravac", "threshold", "scan"])
def test_published_policies_steer_what_they_were_given(policy: str) -> None:
    run = spec(ratio_policy=policy, compression=Compression(name="topk", ratio=0.01))
    steering = AdaptiveController(run, candidates(run), network(SLOW) if policy == "scan" else None)
    drive(steering, SLOW, 60)
    assert steering.candidate.compression.name in ("topk", "identity")
    again = AdaptiveController(run, candidates(run), network(SLOW) if policy == "scan" else None)
    again.resume(steering.state())
    assert again.candidate == steering.candidate
    assert again.state() == steering.state()


def test_a_state_of_another_policy_is_left() -> None:
    run = spec(ratio_policy="accordion", compression=Compression(name="topk", ratio=0.01))
    steering = AdaptiveController(run, candidates(run), None)
    before = steering.state()
    steering.resume(dict(before, policy="gravac"))
    assert steering.state() == before


def test_periods_of_another_way_or_without_sense_change_nothing() -> None:
    run = spec(ratio_policy="auto", collective_policy="cheapest")
    steering = AdaptiveController(run, candidates(run), network(SLOW))
    before = steering.state()
    nothing = GroupTraffic(rows=(Traffic(look_energies=(0.0,) * len(steering.looks)),) * WORKERS)
    assert steering.judge(nothing, step=5, epoch=0.1, learning_rate=0.1) is None
    broken = GroupTraffic(rows=(Traffic(exchanges=3, energy=float("nan")),) * WORKERS)
    assert steering.judge(broken, step=5, epoch=0.1, learning_rate=0.1) is None
    assert steering.state() == before


def test_a_way_in_buckets_is_timed_although_gains_are_looked_at() -> None:
    """The step that looks exchanges after backward: a period of nothing else would tell nothing, again and again."""
    run = spec(ratio_policy="auto", collective_policy="cheapest")
    steering = AdaptiveController(run, candidates(run, buckets=4), network(FAST))
    steering._decision = replace(steering._decision, measure_gain=True, look_after_steps=1)
    steering.candidate = steering.candidates.dense
    assert steering.candidate.in_buckets
    assert steering.period_steps(10) == LOOKED_STEPS
    assert steering.period_steps(1) == 1, "a run ends where it ends"
    assert steering.look_at
    untold = GroupTraffic(rows=(Traffic(look_energies=(0.0,) * len(steering.looks)),) * WORKERS)
    assert steering.judge(untold, step=1, epoch=0.1, learning_rate=0.1) is None
    assert not steering.look_at
    assert steering.period_steps(10) == 1
