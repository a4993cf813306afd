"""The whole life of a run on EC2, hands off, on rehearsed hosts: profiled, planned, rented, interrupted, paid for.

The API is a moto server; each instance that it says is running is a network namespace, which boots by its own user data
and trains. A plan of four machines of two types loses one machine with notice, then the one at which all others meet
without a word, while its own type is not to be had any more. The run must reach its end, all machines must be gone, and
the run's ledger must come to what moto's record of instance-seconds comes to at the pools' prices. At last rented
machines are probed, within a budget of their own.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._outcome import Results, options, publish, run_benchmark
from benchmarks._rehearsal import need_namespaces
from benchmarks.box.box import Box
from benchmarks.box.story import Act, Played, Stage, meeting_host, timeline, trained
from hetopt.backends.ec2.renter.cluster_state import ClusterState
from hetopt.core.profile import Profile
from hetopt.core.run_spec import WorkerSpec
from hetopt.optimizer.market.catalog import Catalog, load_catalog
from hetopt.optimizer.plan import Group, Plan

REGION = "us-east-1"
GOAL = ("--budget", "5", "--batch-size", "1024")
CHOICE = ("--types", "c7i.xlarge,c6in.large", "--max-machines", "4", "--mixed-types", "2")
MIX = (("c7i.xlarge", 3, 288), ("c6in.large", 1, 160))
"""What the story is about: machines of two types, with each one's part of the batch. What `recommend` would choose
depends on the machine that was profiled, and another cluster would be another story."""
PROBE_BUDGET_USD = 0.1
EXPLORED = ("--explore", "--on", "ec2", "--types", "c7i.xlarge,c6in.large", "--yes", "--probe-budget", PROBE_BUDGET_USD)
STAND_INS = ("--substitute", "c7i.xlarge=c6i.xlarge,m7i.xlarge", "--substitute", "c6in.large=c7i.large,m7i.large")
NOTICE_S = 40.0
"""Shorter than EC2's two minutes, as machines boot faster here."""
WITHIN_S = 1500.0
LEDGER_GOAL = 0.01


@dataclass(frozen=True, kw_only=True)
class Length:
    """How much of everything.

    Attributes:
        profile_s: spent on measuring.
        steps: of the training.
        between: steps from one loss to the next.
        explores: whether machines are rented for probes, too.
    """

    profile_s: int
    steps: int
    between: int
    explores: bool = True


FULL = Length(profile_s=40, steps=1500, between=100)
QUICK = Length(profile_s=12, steps=800, between=40)
SMOKE = Length(profile_s=6, steps=500, between=20, explores=False)


def interruptions(between: int) -> Sequence[Act]:
    """What is done to the run."""

    def with_notice(stage: Stage) -> None:
        stage.box.interrupt(stage.box.living()[-1], notice_s=NOTICE_S)

    def without(stage: Stage) -> None:
        victim = meeting_host(stage.box)
        stage.box.exhaust([victim.instance.type])
        stage.box.lose(victim)

    # The first loss is generation 1, without the machine, and 2, with another in its place.
    return (Act(when=trained(between), do=with_notice), Act(when=trained(between, generation=2), do=without))


def planned(stage: Stage, length: Length) -> Path:
    """A profile of this machine, and a plan that is made of it, on the story's machines."""
    profile, plan = stage.home / "profile.json", stage.home / "plan.json"
    print("profiling", file=sys.stderr)
    stage.hetopt("profile", "digits", "--time-budget", length.profile_s, "-o", profile)
    print("planning", file=sys.stderr)
    stage.hetopt("recommend", profile, *GOAL, "--steps", length.steps, *CHOICE, "-o", plan)
    recommended = Plan.load(plan)
    plan.unlink()
    on_the_mix(recommended, load_catalog(REGION)).save(plan)
    return plan


def on_the_mix(plan: Plan, catalog: Catalog) -> Plan:
    """A plan on the story's machines, whichever were recommended."""
    like = plan.chosen.groups[0]
    groups: list[Group] = []
    workers: list[WorkerSpec] = []
    for name, machines, size in MIX:
        price = catalog.price(name, "spot")
        assert price is not None
        told = {
            "instance_type": name,
            "machines": machines,
            "market": "spot",
            "price_usd_per_hour": price.usd_per_hour,
            "price_date": str(price.date),
            "price_source": price.source,
            "price_is_estimate": price.is_estimate,
            "interruption_band": None,
            "local_batch_sizes": (size,) * machines,
        }
        groups.append(like.model_copy(update=told))
        workers += [
            WorkerSpec(host=f"h{len(workers) + place}", type=name, local_batch_size=size) for place in range(machines)
        ]
    batch = sum(worker.local_batch_size for worker in workers)
    chosen = plan.chosen.model_copy(update={"groups": tuple(groups), "global_batch_size": batch})
    run = plan.run.model_copy(update={"workers": tuple(workers)})
    return plan.model_copy(update={"chosen": chosen, "pareto": (chosen,), "run": run})


def probed(stage: Stage) -> Profile:
    """A profile with the steps of rented machines.

    Nothing is planned from it: machines of the box are equally fast, whatever their types are called.
    """
    print("probing", file=sys.stderr)
    stage.box.exhaust([])  # what the story ran out of is to be had again
    profile = stage.home / "probed.json"
    stage.hetopt("profile", "digits", "--time-budget", 5, "-o", profile, *EXPLORED)
    return Profile.load(profile)


def losses(seen: ClusterState) -> list[str]:
    """Hosts whose machines another machine came to stand for, or that the run went on without."""
    hosts = [machine.host for machine in seen.machines]
    again = [host for host in dict.fromkeys(hosts) if hosts.count(host) > 1]
    return again + [worker.host for worker in seen.absent if worker.host not in again]


def tell(box: Box, played: Played) -> None:
    """The story as a timeline, and the bill."""
    told = timeline(box, played)
    for one in told:
        print(f"{one.time_s - told[0].time_s:7.1f} s  {one.what}")
    print(f"\n{'machine':22}{'type':14}{'up':>8}  {'why it ended'}")
    for machine in box.instances():
        up_s = (machine.ended_s or machine.begun_s) - machine.begun_s
        print(f"{machine.id:22}{machine.type:14}{up_s:>6.0f} s  {machine.reason}")


def main() -> None:
    """Play the story once: it is one run, whose length the forms differ in."""
    asked = options(__doc__)
    need_namespaces(or_skip=asked.smoke)
    length = SMOKE if asked.smoke else QUICK if asked.quick else FULL
    with tempfile.TemporaryDirectory(prefix="hetopt-benchmark-") as name:
        folder = Path(name)
        (folder / "home").mkdir()
        with Box(folder=folder / "box", catalog=load_catalog(REGION)) as box:
            stage = Stage(box=box, home=folder / "home")
            stage.hetopt("setup", "--create-bucket", "--yes")
            plan = planned(stage, length)
            print("training", file=sys.stderr)
            arguments = (plan, "--steps", length.steps, "--yes", "--unprobed", *STAND_INS)
            played = stage.play(arguments, interruptions(length.between), within_s=WITHIN_S)
            left = stage.hetopt("gc", "--on", "ec2", "--json").stdout
            tell(box, played)
            results = _results(box, played, Plan.load(plan), left)
            if length.explores:
                explored = probed(stage)
                print(f"probes: {len(explored.samples)} layouts for ${explored.profiling_usd:.4f}")
                results.goal("probed_layouts", len(explored.samples), at_least=1)
                results.goal("probes_usd", explored.profiling_usd, at_most=PROBE_BUDGET_USD)
                results.goal("instances_left", sum(one.runs for one in box.instances()), at_most=0)
            publish(results.outcome("ec2_in_a_box", quick=asked.quick), asked.json_file)


def _results(box: Box, played: Played, plan: Plan, left: str) -> Results:
    mine = {machine.id for machine in played.seen.machines}
    billed, ledger = box.bill_usd(played.order.extras_usd_per_hour, mine), played.ledger_usd()
    print(f"\nledger ${ledger:.6f}, moto's record of instance-seconds at the pools' prices ${billed:.6f}")
    results = Results()
    groups = plan.chosen.groups
    results.goal("machines", sum(group.machines for group in groups), at_least=4)
    results.goal("types", len({group.instance_type for group in groups}), at_least=2)
    results.goal("finished", float(played.code == 0), at_least=1)
    accuracies = [event["metrics"]["accuracy"] for event in played.events if event["event"] == "evaluated"]
    results.goal("accuracy", accuracies[-1] if accuracies else 0.0, at_least=0.98)
    results.goal("losses_survived", len(losses(played.seen)), at_least=2)
    results.goal("things_left", float(len(left.strip()) > 2), at_most=0)
    results.goal("instances_left", sum(one.runs for one in box.instances()), at_most=0)
    results.goal("ledger_error", abs(ledger / billed - 1), at_most=LEDGER_GOAL)
    results.figures["wall_s"] = round(played.wall_s, 1)
    results.figures["ledger_usd"] = round(ledger, 6)
    results.figures["budget_usd"] = played.order.budget_usd
    return results


if __name__ == "__main__":
    run_benchmark(main)
