"""What a plan, or a description, becomes in a rehearsal: a faithful miniature that fits on this machine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.emulation.description import parse_changes, parse_hosts
from hetopt.backends.emulation.iproute import BOX_BITS_PER_S
from hetopt.backends.emulation.plan import HEADROOM, Rehearsal, rehearse
from hetopt.backends.prediction.hosting import ThisMachine
from hetopt.backends.prediction.processor_sharing import finish_times_s
from hetopt.core.batch_partition import WorkerTime, solve_shares
from hetopt.core.run_spec import RunSpec
from hetopt.core.scaled_emulation import ScaledEmulation
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Assumptions, Candidate, Goal, Group, Plan
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend

from .conftest import NOW
from .profiles import make_device, make_profile

HERE = ThisMachine(processors=2, operating_system="Linux")
FIXED_S, PER_SAMPLE_S = 1.1 * 0.004, 1.8 * 0.0004
"""One worker with one thread, as the synthetic profile has it."""


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    options = Options(trials=20, batch_size=128, only_types=("c7a.large", "c7a.xlarge"))
    return recommend(
        PlanRequest(make_profile(), catalog, Goal(ends="epochs", amount=2, budget_usd=5.0), options), seed=0, now=NOW
    )


def of(plan: Plan, machines: Sequence[tuple[int, Assumptions]], batch: int = 128) -> Plan:
    """The plan with these machines, a worker each, and the best shares for them."""
    template = plan.chosen.groups[0]
    times = [
        WorkerTime(fixed_s=assumed.fixed_s, per_sample_s=assumed.per_sample_s, floor_s=assumed.floor_s)
        for count, assumed in machines
        for _ in range(count)
    ]
    shares = list(solve_shares(times, batch).local_batch_sizes)
    groups: list[Group] = []
    for count, assumed in machines:
        own, shares = shares[:count], shares[count:]
        groups.append(
            template.model_copy(update={"machines": count, "assumed": assumed, "local_batch_sizes": tuple(own)})
        )
    chosen = Candidate(
        groups=tuple(groups),
        global_batch_size=batch,
        compression=plan.chosen.compression,
        collective=plan.chosen.collective,
        prediction=plan.chosen.prediction,
    )
    return plan.model_copy(update={"chosen": chosen})


def miniature(rehearsal: Rehearsal) -> ScaledEmulation:
    assert rehearsal.run.miniature is not None
    return rehearsal.run.miniature


def declared_s(run: RunSpec) -> list[float]:
    times = []
    for worker in run.workers:
        assert worker.declared is not None
        times.append(worker.declared.fixed_s + worker.declared.per_sample_s * worker.local_batch_size)
    return times


ASSUMED = st.builds(
    Assumptions,
    fixed_s=st.floats(0.0, 0.05),
    per_sample_s=st.floats(1e-5, 0.01),
    floor_s=st.sampled_from([0.0, 0.02]),
    link_latency_s=st.just(1.5e-4),
    link_bytes_per_s=st.floats(1e6, 2e9),
)
MACHINES = st.lists(st.tuples(st.integers(1, 3), ASSUMED), min_size=1, max_size=4)


@given(MACHINES)
def test_computation_to_communication_is_that_of_the_plan(plan: Plan, machines: list[tuple[int, Assumptions]]) -> None:
    planned = of(plan, machines)
    rehearsal = rehearse(planned, HERE)
    hosts, factor = miniature(rehearsal).hosts, rehearsal.scale.time
    assert rehearsal.scale.links == factor == miniature(rehearsal).time_factor
    known = [assumed for count, assumed in machines for _ in range(count)]
    shares = [worker.local_batch_size for worker in rehearsal.run.workers]
    assert shares == [samples for group in planned.chosen.groups for samples in group.local_batch_sizes]
    for assumed, samples, time_s in zip(known, shares, declared_s(rehearsal.run), strict=True):
        assert time_s == pytest.approx(factor * assumed.time_s(samples))
    capped = any("more than this machine carries" in note for note in rehearsal.notes)
    for assumed, host in zip(known, hosts, strict=True):
        if len(hosts) == 1:
            assert host.rate_bits_per_s is None, "there is nobody to send to"
        elif not capped:
            assert host.rate_bits_per_s == pytest.approx(8 * assumed.link_bytes_per_s / factor)
        assert host.rate_bits_per_s is None or host.rate_bits_per_s <= BOX_BITS_PER_S * (1 + 1e-9)


@given(MACHINES, st.integers(1, 16))
def test_the_real_computation_fits(plan: Plan, machines: list[tuple[int, Assumptions]], processors: int) -> None:
    rehearsal = rehearse(of(plan, machines), ThisMachine(processors=processors, operating_system="Linux"))
    work_s = [FIXED_S + PER_SAMPLE_S * worker.local_batch_size for worker in rehearsal.run.workers]
    for end_s, time_s in zip(finish_times_s(work_s, processors), declared_s(rehearsal.run), strict=True):
        assert HEADROOM * end_s <= time_s * (1 + 1e-6)
    assert sum(work_s) <= processors * max(declared_s(rehearsal.run)) / HEADROOM * (1 + 1e-6)


@given(MACHINES)
def test_speeds_are_relative_to_the_fastest_host(plan: Plan, machines: list[tuple[int, Assumptions]]) -> None:
    rehearsal = rehearse(of(plan, machines), HERE)
    speeds = [host.speed for host in miniature(rehearsal).hosts]
    assert max(speeds) == 1
    samples = max(1, plan.chosen.global_batch_size // len(rehearsal.run.workers))
    fastest_s = min(assumed.time_s(samples) for _, assumed in machines)
    each = [assumed for count, assumed in machines for _ in range(count)]
    for host, assumed in zip(miniature(rehearsal).hosts, each, strict=True):
        assert host.speed * assumed.time_s(samples) == pytest.approx(fastest_s, rel=1e-3)


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=8))
def test_a_faster_described_host_gets_no_fewer_samples(plan: Plan, speeds: list[float]) -> None:
    described = parse_hosts("; ".join(f"speed={speed:.6f}" for speed in speeds))
    run = rehearse(plan, HERE, described).run
    assert run.global_batch_size == plan.chosen.global_batch_size
    shares = [worker.local_batch_size for worker in run.workers]
    order = sorted(range(len(speeds)), key=lambda i: speeds[i])
    assert all(shares[slow] <= shares[fast] + 1 for slow, fast in itertools.pairwise(order))
    times = declared_s(run)
    per_sample_s = max(worker.declared.per_sample_s for worker in run.workers if worker.declared is not None)
    assert max(times) - min(times) <= per_sample_s * (1 + 1e-9), "all end within a sample of the slowest"


def test_a_described_speed_is_relative_to_a_worker_of_this_machine(plan: Plan) -> None:
    rehearsal = rehearse(plan, HERE, parse_hosts("speed=1,rate=100mbit x2; speed=0.25,rate=25mbit,noise=0.1,workers=2"))
    workers = rehearsal.run.workers
    assert [worker.host for worker in workers] == ["h0", "h1", "h2", "h2"]
    factor = rehearsal.scale.time
    assert workers[0].declared is not None
    assert workers[2].declared is not None
    assert workers[0].declared.per_sample_s == pytest.approx(factor * PER_SAMPLE_S)
    assert workers[2].declared.per_sample_s == pytest.approx(4 * factor * PER_SAMPLE_S)
    assert workers[2].declared.fixed_s == pytest.approx(4 * factor * FIXED_S)
    assert [worker.declared.noise for worker in workers if worker.declared] == [0, 0, 0.1, 0.1]
    hosts = miniature(rehearsal).hosts
    assert [host.rate_bits_per_s for host in hosts] == [1e8, 1e8, 2.5e7], "rates are as described"
    assert miniature(rehearsal).time_factor == 1
    assert all(worker.threads == 1 and worker.device == "cpu" for worker in workers)


def test_the_job_is_kept(plan: Plan) -> None:
    run = rehearse(plan, HERE).run
    kept = ("task", "seed", "stop", "compression", "learning_rate_scale", "batch_policy", "evaluate_every_epochs")
    assert {name: getattr(run, name) for name in kept} == {name: getattr(plan.run, name) for name in kept}
    assert RunSpec.model_validate_json(run.model_dump_json()) == run


def test_scheduled_rates_are_those_of_the_cluster_and_scaled_like_its_links(plan: Plan) -> None:
    assumed = Assumptions(fixed_s=0.001, per_sample_s=1e-4, link_latency_s=1e-4, link_bytes_per_s=1.25e8)
    planned = of(plan, [(3, assumed)])
    changes = parse_changes("step 5 h1 rate=500mbit\n9s * speed=0.5", ["h0", "h1", "h2"])
    rehearsal = rehearse(planned, HERE, None, changes)
    scaled = miniature(rehearsal).changes
    assert scaled[0].rate_bits_per_s == pytest.approx(5e8 / rehearsal.scale.time)
    assert scaled[1] == changes[1]
    described = rehearse(planned, HERE, parse_hosts("speed=1 x3"), changes)
    assert miniature(described).changes == changes


def test_a_host_that_becomes_faster_later_must_fit_then_too(plan: Plan) -> None:
    hosts = parse_hosts("speed=1 x2")
    calm = rehearse(plan, HERE, hosts)
    faster = rehearse(plan, HERE, hosts, parse_changes("step 5 * speed=4", ["h0", "h1"]))
    slower = rehearse(plan, HERE, hosts, parse_changes("step 5 h1 speed=0.1", ["h0", "h1"]))
    assert faster.scale.time == pytest.approx(4 * calm.scale.time, rel=0.1)
    assert slower.scale.time == calm.scale.time


def test_fast_links_raise_the_factor_only_so_far(plan: Plan) -> None:
    def rehearsed(bytes_per_s: float) -> Rehearsal:
        slow = Assumptions(fixed_s=0.5, per_sample_s=0.1, link_latency_s=1e-4, link_bytes_per_s=bytes_per_s)
        return rehearse(of(plan, [(2, slow)]), HERE)

    assert rehearsed(1e8).scale.time == 1, "slow machines need not be slowed down"
    assert rehearsed(2.5e8).scale.time == 2, "a link of 2 Gbit/s is more than the box carries"
    capped = rehearsed(2.5e9)
    assert capped.scale.time == 1
    assert [host.rate_bits_per_s for host in miniature(capped).hosts] == [BOX_BITS_PER_S] * 2
    assert any("more than this machine carries" in note for note in capped.notes)


def test_the_prediction_is_that_of_the_miniature(plan: Plan) -> None:
    hosts = parse_hosts("speed=1,rate=100mbit; speed=0.5,rate=20mbit")
    fast = rehearse(plan, HERE, parse_hosts("speed=1,rate=100mbit; speed=0.5,rate=100mbit")).prediction
    slow = rehearse(plan, HERE, hosts).prediction
    assert slow.step_time_s.value > fast.step_time_s.value, "the slowest link decides"
    assert slow.compute_s == fast.compute_s
    assert fast.compute_s == pytest.approx(max(declared_s(rehearse(plan, HERE, hosts).run)), rel=0.05)
    steps = math.ceil(2 * plan.profile.job.dataset_size / 128)
    assert slow.steps.value == steps
    assert slow.training_s.value > steps * slow.step_time_s.value, "evaluations come on top"


def test_equal_shares_are_predicted_to_wait(plan: Plan) -> None:
    hosts = parse_hosts("speed=1; speed=0.25")
    solved = rehearse(plan, HERE, hosts)
    equal = rehearse(plan.adjusted(policy="uniform"), HERE, hosts)
    assert [worker.local_batch_size for worker in equal.run.workers] == [64, 64]
    assert (
        equal.prediction.step_time_s.value / equal.scale.time > solved.prediction.step_time_s.value / solved.scale.time
    )
    assert equal.prediction.waiting_s > 10 * solved.prediction.waiting_s


def test_a_run_of_so_many_steps_ends_there(plan: Plan) -> None:
    rehearsal = rehearse(plan.adjusted(steps=40), HERE)
    assert rehearsal.run.stop.max_steps == 40
    assert rehearsal.prediction.steps.value == 40


def test_cpu_quotas_make_hosts_as_slow_as_they_are(plan: Plan) -> None:
    rehearsal = rehearse(plan, HERE, parse_hosts("cpu=0.5; cpu=1"))
    assert all(worker.declared is None for worker in rehearsal.run.workers)
    slow, fast = (worker.local_batch_size for worker in rehearsal.run.workers)
    assert slow < fast
    assert rehearsal.scale.time == 1


def test_memory_is_shared_by_the_workers(plan: Plan) -> None:
    two = rehearse(plan, HERE, parse_hosts("speed=1 x2")).run.workers[0].max_local_batch_size
    eight = rehearse(plan, HERE, parse_hosts("speed=1 x8")).run.workers[0].max_local_batch_size
    assert two is not None
    assert eight is not None
    assert eight < two / 4


def test_a_profile_of_a_whole_host_is_taken_for_the_work_of_one_thread(plan: Plan, catalog: Catalog) -> None:
    whole = make_profile(devices=[make_device(fixed_s=0.004, per_sample_s=0.0004, threads=2)])
    planned = plan.model_copy(update={"profile": whole})
    run = rehearse(planned, HERE, parse_hosts("speed=1")).run
    assert run.workers[0].declared is not None
    factor = rehearse(planned, HERE, parse_hosts("speed=1")).scale.time
    assert run.workers[0].declared.per_sample_s == pytest.approx(factor * 2 * 0.0004)
    assert run.workers[0].declared.fixed_s == pytest.approx(factor * 0.004)
