"""What a plan, or a description, becomes in a rehearsal: a faithful miniature that fits on this machine.

Links of a miniature: a message takes no less than its bytes or its waking, and no more than both.
What stands in for a job in a rehearsal exchanges and computes for as long as the job, and trains nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, strategies as st

import hetopt
from hetopt.backends.emulation.namespaces import BOX_BITS_PER_S, SENDING_LOG_SD, WAKING_LOG_SD, box_link
from hetopt.backends.emulation.plan import HEADROOM, Rehearsal, parse_changes, parse_hosts, rehearse, with_stand_in
from hetopt.backends.prediction import finish_times_s
from hetopt.core.batch_partition import WorkerTime, solve_shares
from hetopt.core.profile import Profile
from hetopt.core.run_spec import GRADIENT_BYTES, PARAMETERS, RunSpec, ScaledEmulation
from hetopt.optimizer.fit import LinkModel
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Assumptions, Candidate, Group, Plan
from hetopt.trainer.tasks.stand_in import stand_in

from .profiles import make_device, make_profile

HERE = 2
FIXED_S, PER_SAMPLE_S = 1.1 * 0.004, 1.8 * 0.0004
"""One worker with one thread, as the synthetic profile has it."""


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
    rehearsal = rehearse(of(plan, machines), processors)
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
    rehearsal = rehearse(plan, HERE, parse_hosts("speed=1,rate=100mbit x2; speed=0.25,rate=25mbit,workers=2"))
    workers = rehearsal.run.workers
    assert [worker.host for worker in workers] == ["h0", "h1", "h2", "h2"]
    factor = rehearsal.scale.time
    assert workers[0].declared is not None
    assert workers[2].declared is not None
    assert workers[0].declared.per_sample_s == pytest.approx(factor * PER_SAMPLE_S)
    assert workers[2].declared.per_sample_s == pytest.approx(4 * factor * PER_SAMPLE_S)
    hosts = miniature(rehearsal).hosts
    assert [host.rate_bits_per_s for host in hosts] == [1e8, 1e8, 2.5e7], "rates are as described"
    assert miniature(rehearsal).time_factor == 1


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


def test_a_profile_of_a_whole_host_is_taken_for_the_work_of_one_thread(plan: Plan, catalog: Catalog) -> None:
    whole = make_profile(devices=[make_device(fixed_s=0.004, per_sample_s=0.0004, threads=2)])
    planned = plan.model_copy(update={"profile": whole})
    run = rehearse(planned, HERE, parse_hosts("speed=1")).run
    assert run.workers[0].declared is not None
    factor = rehearse(planned, HERE, parse_hosts("speed=1")).scale.time
    assert run.workers[0].declared.per_sample_s == pytest.approx(factor * 2 * 0.0004)
    assert run.workers[0].declared.fixed_s == pytest.approx(factor * 0.004)


RATES = st.floats(1e6, 1e10)
CROWDS = st.floats(0.1, 16)
PRIMITIVES = st.sampled_from(["all_reduce", "all_gather", "broadcast"])


@given(primitive=PRIMITIVES, rate=RATES, crowd=CROWDS, messages=st.integers(1, 64), traffic_bytes=st.floats(0, 1e9))
def test_messages_take_the_longer_of_both_or_more_but_not_their_sum(primitive, rate, crowd, messages, traffic_bytes):
    link = box_link(primitive, rate, crowd)
    time_s = link.time_s(messages, traffic_bytes)
    sending_s = traffic_bytes / link.bytes_per_s
    assert time_s >= max(messages * link.latency_s, sending_s - messages * link.saved_s) * (1 - 1e-9)
    one_after_the_other = LinkModel(latency_s=link.latency_s, bytes_per_s=link.bytes_per_s)
    assert time_s <= one_after_the_other.time_s(messages, traffic_bytes) * (1 + 1e-9)


@given(primitive=PRIMITIVES, rate=RATES, crowd=CROWDS, messages=st.integers(1, 64), traffic_bytes=st.floats(0, 1e9))
def test_the_spread_lies_between_that_of_bytes_and_that_of_waking(primitive, rate, crowd, messages, traffic_bytes):
    link = box_link(primitive, rate, crowd)
    relative = link.sd_s(messages, traffic_bytes) / link.time_s(messages, traffic_bytes)
    assert SENDING_LOG_SD / math.sqrt(2) <= relative * (1 + 1e-9)
    assert relative <= WAKING_LOG_SD * (1 + 1e-9)


def test_nothing_sent_takes_no_time_and_no_link_is_faster_than_the_box():
    assert box_link("all_gather", 1e8, 2).time_s(0, 0) == box_link("all_gather", 1e8, 2).sd_s(0, 0) == 0
    assert box_link("all_gather", 1e12, 1).bytes_per_s == box_link("all_gather", BOX_BITS_PER_S, 1).bytes_per_s
    assert box_link("all_gather", 1e8, 2).latency_s < box_link("all_gather", 1e8, 4).latency_s


@pytest.mark.parametrize(
    ("workers", "rate", "message_ms"),
    [(4, 25e6, 34.0), (4, 100e6, 8.9), (4, 400e6, 2.7), (8, 25e6, 17.4), (8, 100e6, 5.2), (8, 400e6, 2.6)],
)
def test_messages_of_a_ring_beside_training_take_what_was_measured(workers, rate, message_ms):
    messages = 2 * (workers - 1)
    time_s = box_link("all_reduce", rate, workers / 2).time_s(messages, messages / workers * 393_000)
    assert 1e3 * time_s / messages == pytest.approx(message_ms, rel=0.08)


@pytest.mark.parametrize(
    ("workers", "rate", "gathered_ms"),
    [(3, 400e6, 4.1), (4, 25e6, 8.8), (4, 400e6, 6.8), (8, 25e6, 25.6), (8, 400e6, 24.0)],
)
def test_what_is_gathered_of_a_selection_takes_what_was_measured(workers, rate, gathered_ms):
    time_s = box_link("all_gather", rate, workers / 2).time_s(workers - 1, (workers - 1) * 7856)
    assert 1e3 * time_s == pytest.approx(gathered_ms, rel=0.15)


@pytest.fixture(scope="module")
def estimated() -> Plan:
    """Of a transformer with 110 million parameters, on several machines."""
    asked = {"samples": 3e6, "tokens": 512, "budget_usd": 50, "market": "spot", "objective": "fastest"}
    return hetopt.estimate(params=1.1e8, gpus="A10G", quotas=("spot:g=40",), **asked).plan  # type: ignore[arg-type]


@given(st.integers(250_000, 2 * 10**9))
def test_an_exchange_takes_as_long_as_the_jobs(estimated: Plan, parameters: int) -> None:
    job = estimated.profile.job.model_copy(update={"parameters": parameters, "gradient_bytes": 4 * parameters})
    plan = estimated.model_copy(update={"profile": estimated.profile.model_copy(update={"job": job})})
    rehearsal = rehearse(plan, HERE, stands_in=True)
    assert rehearsal.run.miniature is not None
    assumed = [group.assumed for group in plan.chosen.groups for _ in range(group.machines)]
    for host, known in zip(rehearsal.run.miniature.hosts, assumed, strict=True):
        assert known is not None
        assert host.rate_bits_per_s is not None
        job_s = job.gradient_bytes / known.link_bytes_per_s
        if host.rate_bits_per_s < BOX_BITS_PER_S:
            assert 8 * GRADIENT_BYTES / host.rate_bits_per_s == pytest.approx(rehearsal.scale.time * job_s)


def test_its_gradient_is_whole_and_of_its_size() -> None:
    task = stand_in()
    model = task.model()
    data = task.data(None).train
    batch = (torch.stack([data[index][0] for index in range(8)]), torch.zeros(8))  # type: ignore[index]
    loss = task.loss(model, batch)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert sum(gradient.numel() for gradient in gradients if gradient is not None) == PARAMETERS
    assert all((gradient != 0).all() for gradient in gradients if gradient is not None)


def test_its_profile_holds_together(estimated: Plan) -> None:
    """Shapes, numbers and bytes of the parameters are those of one model: the job's are all gone."""
    profile = with_stand_in(estimated, HERE).profile
    assert Profile.model_validate_json(profile.model_dump_json()) == profile
