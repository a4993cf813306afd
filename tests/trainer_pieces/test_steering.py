"""What is sent follows what was measured: policies and step times behind one door.

The automatic ratio on paper: near the best fixed choice on any network, through changes of it, and never far behind
dense training, also where what it was told is wrong.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from dataclasses import replace

import pytest

from benchmarks._published_collectives import time_s
from hetopt.core.comm.cost import LinkSpeed, pipelined_s, trainer_algorithm
from hetopt.core.comm.options import Candidates, CompressTime, make_option
from hetopt.core.run_spec import Compression, RunSpec, StopRule
from hetopt.core.training_laws import CAUTIOUS_COEFFICIENT, MOST_LOST, distance
from hetopt.trainer.policies.ratio.auto import BACKWARD, TRIAL_STEPS, AutoRatio
from hetopt.trainer.policies.ratio.policy import Verdict
from hetopt.trainer.steps.adaptive_controller import LOOKED_STEPS, AdaptiveController
from hetopt.trainer.steps.period import ControlRow, Period
from tests.thinned import few

from .runs import run_of
from .virtual_exchange import VirtualRun, alone, fixed_s, options, run

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


def period(steering: AdaptiveController, link: LinkSpeed, *, gain=lambda ratio: ratio**0.1, steps: int = 10) -> Period:
    """A period in the present way over such links."""
    option = steering.candidate
    exchange_s = option.buckets * time_s(option.operations, link, algorithms=trainer_algorithm)
    sync_s = exchange_s
    if option.buckets > 1:
        backward_s = BACKWARD * COMPUTE_S
        sync_s = pipelined_s(backward_s, exchange_s, option.buckets) - backward_s
    kept = 1.0 if option.gain == 1 else gain(option.ratio)
    looks = tuple(gain(ratio) for ratio in steering.looks) if steering.look_at else (0.0,) * len(steering.looks)
    compress_s = 0.004 if option.gain is None else 0.0
    return of_all(
        exchanges=steps,
        way_step_s=COMPUTE_S + compress_s + sync_s,
        way_compute_s=COMPUTE_S,
        compress_s=compress_s,
        sync_s=sync_s,
        sent_bytes=sum(part.payload_bytes for part in option.operations) * option.buckets,
        energy=1.0,
        kept_energy=kept,
        gradient_energy=1.0,
        look_energy=1.0 if steering.look_at else 0.0,
        look_energies=looks,
    )


def of_all(**fields) -> Period:
    """A period whose rows are alike."""
    plain = dict.fromkeys((field.name for field in dataclasses.fields(ControlRow)), 0.0)
    row = ControlRow(**{**plain, "steps": 1, **fields})
    return Period(rows=(row,) * WORKERS, local_batch_sizes=(8,) * WORKERS)


def drive(steering: AdaptiveController, link: LinkSpeed, periods: int, step: int = 0) -> tuple[int, list]:
    changes = []
    for _ in range(periods):
        seen = period(steering, link, steps=steering.period_steps(10))
        step += seen.exchanges
        change = steering.judge(seen, step=step, epoch=step / 50, learning_rate=0.1)
        if steering.try_ratio is not None:
            steering.verdict = Verdict(ratio=steering.try_ratio, says="harmless")
            assert steering.try_ratio is None, "it is asked once"
        if change is not None:
            changes.append(change)
    return step, changes


def test_auto_compresses_where_links_are_slow_and_sends_everything_where_they_are_not() -> None:
    run = spec(ratio_policy="auto", collective_policy="cheapest")
    slow = AdaptiveController(run, candidates(run, buckets=4), network(SLOW), tries_twins=True)
    drive(slow, SLOW, 30)
    assert slow.candidate.ratio < 0.1
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
    nothing = of_all(look_energies=(0.0,) * len(steering.looks))
    assert steering.judge(nothing, step=5, epoch=0.1, learning_rate=0.1) is None
    broken = of_all(exchanges=3, energy=float("nan"), look_energies=())
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
    untold = of_all(look_energies=(0.0,) * len(steering.looks))
    assert steering.judge(untold, step=1, epoch=0.1, learning_rate=0.1) is None
    assert not steering.look_at
    assert steering.period_steps(10) == 1


STEPS = 400  # of dense progress
GBIT = 1.25e8


def any_run(seed, **known):
    """A run on a random network: from compute-bound to 25 times communication-bound, noisy, with biased timings."""
    rng = random.Random(seed)
    workers, numel = rng.choice([2, 4, 8]), int(10 ** rng.uniform(5, 7.5))
    link = LinkSpeed(latency_s=10 ** rng.uniform(-4, -2), bytes_per_s=10 ** rng.uniform(6.5, 9.5))
    found = options(numel, workers)
    dense_s = sum(link.time_s(operation.terms(trainer_algorithm)) for operation in found[0].operations)
    settings = {
        "compute_s": dense_s / 10 ** rng.uniform(-0.7, 1.4),
        "kept": rng.uniform(0.02, 0.25),
        "settling": rng.uniform(0, 0.12),
        "turning": 10 ** rng.uniform(-2, 0),
        "noise": 0.05,
        "primitives": {"all_gather": rng.uniform(0.7, 1.4), "broadcast": rng.uniform(0.5, 2)},
        "compress": {"topk": rng.uniform(0.5, 2)},
    }
    virtual = VirtualRun(workers=workers, links=[link], seed=seed, **{**settings, **known})
    return virtual, AutoRatio(options=found, coefficient=virtual.turning)


def allowed_s(policy, virtual, first):
    """What finding out may cost: so many steps' worth, a part of the time, and a trial that was begun."""
    return TRIAL_STEPS * first + virtual.elapsed_s / 100


def raced(virtual, policy):
    """Run `STEPS` of dense progress; the price of finding out, and what fixed choices take, dense first."""
    used, _ = run(policy, virtual, progress=STEPS)
    (first,) = (option for option in policy.options if option.key == used[0][1])
    price_s = allowed_s(policy, virtual, virtual.per_progress_s(first))
    fixed = [fixed_s(virtual, one, progress=STEPS) for one in policy.options if virtual.settled(one) > 0.05]
    return price_s, fixed


@pytest.mark.parametrize("seed", few(8, range(24)))
def test_it_is_near_the_best_fixed_choice_on_any_network(seed):
    virtual, policy = any_run(seed)
    price_s, fixed = raced(virtual, policy)
    assert virtual.elapsed_s <= min(1.05 * min(fixed), 1.04 * fixed[0]) + price_s


def test_wrong_timings_cost_little_more():
    """Collectives up to eight times as slow as they were timed, compressing up to ten times, twice the noise."""
    over = []
    for seed in (*range(32), 78):
        rng = random.Random(100 + seed)
        slower = {
            name: 10 ** rng.uniform(0, 0.9)
            for name in rng.sample(["all_gather", "broadcast", "all_reduce"], rng.choice([1, 2]))
        }
        virtual, policy = any_run(1000 + seed, slower=slower, compress={"topk": 10 ** rng.uniform(-0.3, 1)}, noise=0.1)
        price_s, fixed = raced(virtual, policy)
        assert virtual.elapsed_s <= 1.1 * fixed[0] + price_s
        over.append((virtual.elapsed_s - price_s) / min(fixed))
    assert statistics.mean(over) <= 1.02
    assert max(over) <= 1.1


@pytest.mark.parametrize(
    ("links", "numel", "workers", "compute_s"),
    [
        ([(2e-3, rate) for rate in (1, 0.025, 0.1, 1, 0.025)], 272_474, 4, 0.05),
        ([(1e-3, 25), (1e-3, 1), (5e-2, 1), (5e-2, 25)], 11_689_512, 8, 0.1),
    ],
    ids=["rates", "published"],
)
def test_it_follows_the_network(links, numel, workers, compute_s):
    """25 Mbit/s to 1 Gbit/s under a small model, and the schedule C1 of arXiv 2312.02493.

    Phases are about as quick as the best fixed choice, but for the price of finding out. Where little is sent, a
    network that has become quicker shows in no step.
    """
    over = [one for seed in range(4) for one in over_best_of_phases(links, numel, workers, compute_s, seed)]
    assert statistics.mean(over) <= 1.1
    assert max(over) <= 1.4


def over_best_of_phases(links, numel, workers, compute_s, seed, phase=300):
    """Time of each phase, less the price of finding out, over what its progress takes by the best fixed choice."""
    virtual = VirtualRun(
        workers=workers,
        links=[LinkSpeed(latency_s=latency_s, bytes_per_s=gbit * GBIT) for latency_s, gbit in links],
        starts=[phase * k for k in range(len(links))],
        compute_s=compute_s,
        noise=0.05,
        seed=seed,
        kept=0.12,
        turning=0.3,
    )
    policy = AutoRatio(options=options(numel, workers), coefficient=virtual.turning)
    marks, take = [(0.0, 0.0)], virtual.take

    def marked(option):
        row = take(option)
        marks.append((virtual.elapsed_s, virtual.progress))
        return row

    virtual.take = marked
    run(policy, virtual, until_step=phase * len(links))
    over = []
    for k, link in enumerate(virtual.links):
        (begun_s, before), (ended_s, after) = marks[phase * k], marks[phase * (k + 1)]
        alone = VirtualRun(workers=workers, links=[link], compute_s=compute_s, kept=0.12, turning=0.3)
        best_s = min(alone.per_progress_s(option) for option in policy.options)
        price_s = TRIAL_STEPS * best_s + (ended_s - begun_s) / 100
        over.append((ended_s - begun_s - price_s) / (best_s * (after - before)))
    return over


CELLS = (0.1, 1.0, 5.0, 20.0)
"""Time of a dense exchange over that of a step's computation."""


def cell(rate, local, seed):
    """A run in which averages every 8 steps may be chosen, besides everything in fewer bits."""
    virtual = VirtualRun(
        workers=4, links=[LinkSpeed(latency_s=1e-4, bytes_per_s=1e8)], compute_s=1.0, local=local, noise=0.1, seed=seed
    )
    found = options(1_000_000, 4, compress_ns=1.0)
    bits = [
        make_option(Compression(name=name), numel=1_000_000, workers=4, compress_s=0.004) for name in ("int8", "bf16")
    ]
    averages = replace(bits[0], gain=None, every_steps=8)
    virtual.compute_s = virtual.exchange_s(found[0]) / rate
    return virtual, AutoRatio(options=(*found, *bits, averages), most_lost=MOST_LOST), averages


@pytest.mark.parametrize("local", [0.02, 0.5, 0.9])
@pytest.mark.parametrize("rate", CELLS)
def test_averages_are_used_where_they_save_time_and_left_where_local_steps_are_worth_little(rate, local):
    """At most 1.03 times dense training's time, and 1.25 times that of the best of all choices, in every cell."""
    for seed in range(3):
        virtual, policy, averages = cell(rate, local, seed)
        used, _ = run(policy, virtual, progress=STEPS)
        fitting = [o for o in policy.options if o.averages or virtual.slowdown(virtual.settled(o)) <= 1 + MOST_LOST]
        fixed = {option.key: fixed_s(virtual, option, progress=STEPS) for option in fitting}
        assert virtual.elapsed_s <= 1.03 * fixed[policy.options[0].key]
        assert virtual.elapsed_s <= 1.25 * min(fixed.values())
        late = [key for step, key in used if step > virtual.step / 2]
        if fixed[averages.key] > 1.25 * min(fixed.values()):
            assert late.count(averages.key) <= 1, "but for a trial"
        elif rate == max(CELLS):
            assert set(late) == {averages.key}


def periods(virtual, policy, count, steps=20):
    """The decisions of so many periods, the options they were about, and the states."""
    by_key = {option.key: option for option in policy.options}
    network = virtual.fresh()
    state, decision, found = policy.initial(), policy.first(network), []
    for _ in range(count):
        option = by_key[decision.option]
        observation = virtual.period(option, decision, network, steps)
        before = state
        state, decision = policy.decide(state, observation)
        found.append((before, observation, state, decision))
    return found


@pytest.mark.parametrize("seed", few(5, range(16)))
def test_a_run_of_fixed_length_learns_nearly_as_much_as_dense_training(seed):
    """For each step's worth of progress it takes no longer than the quickest choice that does."""
    steps = 600
    virtual, policy = any_run(seed, kept=random.Random(seed).uniform(0.05, 0.4))
    virtual.last_step = steps
    bits = [
        make_option(
            Compression(name=name),
            numel=policy.options[0].operations[0].payload_bytes // 4,
            workers=virtual.workers,
            compress_s=0.1 * virtual.compute_s,
        )
        for name in ("int8", "int4")
    ]
    policy = replace(policy, options=(*policy.options, *bits), most_lost=MOST_LOST)
    run(policy, virtual, until_step=steps)
    assert virtual.progress >= steps / (1 + MOST_LOST) - 2 * TRIAL_STEPS
    fitting = [o for o in policy.options if virtual.slowdown(virtual.settled(o)) <= 1 + MOST_LOST / 2]
    best_s = min(virtual.per_progress_s(option) for option in fitting)
    price_s = allowed_s(policy, virtual, virtual.per_progress_s(policy.options[0]))
    assert virtual.elapsed_s <= 1.05 * best_s * virtual.progress + price_s


@pytest.mark.parametrize(("turning", "says"), [(0.01, "harmless"), (2.0, "harmful")])
@pytest.mark.parametrize("seed", few(2, range(6)))
def test_twins_say_whether_thin_exchanges_may_be_used(seed, turning, says):
    """On slow links, where they would save most of the time, they are asked once, and obeyed."""
    steps = 400
    virtual, policy = any_run(seed, turning=turning, kept=0.1, noise=0.02)
    virtual.compute_s = 0.05 * fixed_s(alone(virtual), policy.options[0], progress=1)
    policy = replace(policy, coefficient=CAUTIOUS_COEFFICIENT, most_lost=MOST_LOST, tries_twins=True)
    virtual.last_step = steps
    used, state = run(policy, virtual, until_step=steps)
    assert state.verdict is not None
    assert state.verdict.says == says
    by_key = {option.key: option for option in policy.options}
    # Near the end, what was held back is worth sending.
    late = {by_key[key].ratio for step, key in used if steps / 4 < step < 0.95 * steps}
    if says == "harmless":
        assert state.trials == 1
        assert max(late) < 1
        assert min(late) >= state.verdict.ratio
    else:
        thinnest = min(virtual.settled(by_key[key]) for step, key in used if step > steps / 4)
        assert state.trials <= 3, "each time after four times as many steps"
        assert 1 + CAUTIOUS_COEFFICIENT * distance(thinnest) <= 1 + 2 * MOST_LOST


def thinned(**changes):
    """A run that has come to send little of its gradients."""
    virtual, policy = any_run(1, kept=0.1, settling=0.0, noise=0.0)
    policy = replace(policy, **changes)
    *_, (_, _, state, decision) = periods(virtual, policy, 30)
    by_key = {option.key: option for option in policy.options}
    assert by_key[decision.option].ratio < 1
    return virtual, policy, by_key, state, decision


def test_what_falls_below_the_floor_is_left_at_once():
    virtual, policy, by_key, state, decision = thinned(least_gain=0.6)
    virtual.kept, network, used = 1.0, virtual.fresh(), [decision.option]
    for _ in range(8):
        observation = virtual.period(by_key[decision.option], decision, network, 20)
        state, decision = policy.decide(state, observation)
        if len(used) == 1:
            assert "must be kept" in decision.reason
            assert decision.option != used[0]
        used.append(decision.option)
    assert used[-1] == policy.options[0].key


def test_a_loss_that_rises_and_stays_high_ends_thin_exchanges():
    """Error feedback bears smaller learning rates than dense training: whatever it saves, it is not worth the run."""
    virtual, policy, by_key, state, decision = thinned()
    network, used = virtual.fresh(), []
    for loss in (2.0, 1.0, 2.4, 1.2, 1.0, 1.9, 2.4, 1.1, 1.1):
        observation = virtual.period(by_key[decision.option], decision, network, 20)
        state, decision = policy.decide(state, replace(observation, loss=loss))
        used.append((by_key[decision.option].ratio, decision.reason))
    assert all(ratio < 1 for ratio, _ in used[:6]), "noise is borne"
    assert used[6][0] == 1
    assert "the loss has risen" in used[6][1]
    assert all(ratio == 1 for ratio, _ in used[6:])
