"""The whole life of a run on EC2, hands off, on rehearsed hosts: profiled, planned, rented, interrupted, paid for.

The API is a moto server; each instance that it says is running is a network namespace, which boots by its own user data
and trains. A plan of four machines of two types loses one machine with notice, then the one at which all others meet
without a word, while its own type is not to be had any more. The run must reach its end, all machines must be gone, and
the run's ledger must come to what moto's record of instance-seconds comes to at the pools' prices. At last rented
machines are probed, within a budget of their own.

The other part are stories (``--part stories``): 400 lives of runs by a seed, on an account in which lists and tags lag,
calls are throttled, refused, answered with faults or not at all, credentials end, pools run dry and prices move by zone
and hour, machines hang, fail, start again or are taken back, and IAM decides each call by the printed policy;
whoever launches or follows is killed by a real signal. Time is the account's own, and what machines do is acted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._outcome import Results, options, publish, run_benchmark
from benchmarks._rehearsal import need_namespaces
from benchmarks._search_spaces import RECORDED
from benchmarks.box.box import Box
from benchmarks.box.stories import KINDS, plan_on
from benchmarks.box.story import HETOPT, Act, Played, Stage, meeting_host, timeline, trained
from hetopt.backends.ec2.renter.cluster_state import ClusterState
from hetopt.core.errors import RunFailed
from hetopt.core.profile import Profile
from hetopt.optimizer.market.catalog import Catalog, load_catalog
from hetopt.optimizer.plan import Plan

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
MACHINES = 32
"""That may ever be rented: of the run, and of probes."""
PARTS = ("box", "stories")
WORKERS = 4
"""Processes that tell stories, each on an account of its own."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """How much of everything.

    Attributes:
        profile_s: spent on measuring.
        steps: of the training.
        between: steps from one loss to the next.
        stories: how many are told.
        explores: whether machines are rented for probes, too.
    """

    profile_s: int
    steps: int
    between: int
    stories: int
    explores: bool = True


FULL = Length(profile_s=40, steps=1500, between=100, stories=400)
QUICK = Length(profile_s=12, steps=800, between=40, stories=40)
SMOKE = Length(profile_s=6, steps=500, between=20, stories=4, explores=False)


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
    made = plan_on(plan, catalog, tuple((name, machines, "spot") for name, machines, _ in MIX))
    sizes = [size for _, machines, size in MIX for _ in range(machines)]
    groups = tuple(
        group.model_copy(update={"local_batch_sizes": (size,) * group.machines})
        for group, (_, _, size) in zip(made.chosen.groups, MIX, strict=True)
    )
    workers = tuple(
        worker.model_copy(update={"local_batch_size": size})
        for worker, size in zip(made.run.workers, sizes, strict=True)
    )
    chosen = made.chosen.model_copy(update={"groups": groups, "global_batch_size": sum(sizes)})
    run = made.run.model_copy(update={"workers": workers})
    return made.model_copy(update={"chosen": chosen, "pareto": (chosen,), "run": run})


def probed(stage: Stage) -> Profile:
    """A profile with the steps of rented machines.

    Nothing is planned from it: machines of the box are equally fast, whatever their types are called.
    """
    print("probing", file=sys.stderr)
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
    """Play the story once, as it is one run, whose length the forms differ in; and tell the others."""
    asked = options(__doc__, parts=list(PARTS))
    length = SMOKE if asked.smoke else QUICK if asked.quick else FULL
    results = Results()
    with tempfile.TemporaryDirectory(prefix="hetopt-benchmark-") as name:
        if asked.part != "stories":
            need_namespaces(or_skip=asked.smoke)
            play_in_the_box(results, Path(name), length)
        if asked.part != "box":
            tell_stories(results, Path(name), length)
    publish(results.outcome("ec2_in_a_box", quick=asked.quick), asked.json_file, part=asked.part)


def play_in_the_box(results: Results, folder: Path, length: Length) -> None:
    """The run on rehearsed hosts, from its plan to its bill."""
    (folder / "home").mkdir()
    with Box(folder=folder / "box", catalog=load_catalog(REGION), places=MACHINES) as box:
        stage = Stage(box=box, home=folder / "home")
        stage.hetopt("setup", "--create-bucket", "--yes")
        plan = planned(stage, length)
        print("training", file=sys.stderr)
        arguments = (plan, "--steps", length.steps, "--yes", "--unprobed", *STAND_INS)
        played = stage.play(arguments, interruptions(length.between), within_s=WITHIN_S)
        left = stage.hetopt("gc", "--on", "ec2", "--json").stdout
        tell(box, played)
        _results(results, box, played, Plan.load(plan), left)
        if length.explores:
            explored = probed(stage)
            print(f"probes: {len(explored.samples)} layouts for ${explored.profiling_usd:.4f}")
            results.goal("probed_layouts", len(explored.samples), at_least=1)
            results.goal("probes_usd", explored.profiling_usd, at_most=PROBE_BUDGET_USD)
            results.goal("instances_left", sum(one.runs for one in box.instances()), at_most=0)


def tell_stories(results: Results, folder: Path, length: Length) -> None:
    """Lives of runs by a seed, several at the same time, and what must be in none of them."""
    print("telling stories", file=sys.stderr)
    plan = folder / "told-plan.json"
    # A recorded profile: what this machine is busy with now must not be a part of any story.
    subprocess.run(
        [*HETOPT, "recommend", RECORDED / "digits.json", *GOAL, "--steps", "10000", *CHOICE, "-o", plan],
        check=True,
        stdout=sys.stderr,
        env={**os.environ, "HETOPT_HOME": str(folder)},
    )
    program = [sys.executable, "-m", "benchmarks.box.stories", str(plan)]
    files = [folder / f"told-{first}.jsonl" for first in range(WORKERS)]
    with ExitStack() as opened:
        tellers = [
            subprocess.Popen(
                [*program, str(first), str(WORKERS), str(length.stories)], stdout=opened.enter_context(path.open("w"))
            )
            for first, path in enumerate(files)
        ]
        for teller in tellers:
            teller.wait()
    told = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    if len(told) != length.stories:
        raise RunFailed(f"{len(told)} of {length.stories} stories were told to their end.", hint="read what they say")
    for story in sorted(told, key=lambda one: int(one["seed"])):
        if story["faults"] or story["seed"] == 0:
            print(story["timeline"], "\n")
    _of_stories(results, told)


def _of_stories(results: Results, told: Sequence[dict[str, Any]]) -> None:
    ledgers = [abs(one["ledger_error"]) for one in told if one["ledger_error"] is not None]
    at_once = [len(set(one["moods"]) - ALWAYS) + len(one["moods"]["lives"]["fates"]) for one in told]
    results.figures["stories"] = len(told)
    results.figures["stories_kills"] = sum(one["kills"] for one in told)
    results.figures["stories_machines"] = sum(one["machines"] for one in told)
    results.figures["stories_moods_at_once_median"] = statistics.median(at_once)
    results.figures["stories_followed_to_their_bill"] = len(ledgers)
    estimates = [abs(one["estimate_error"]) for one in told if one["estimate_error"] is not None]
    results.figures["stories_that_say_estimated"] = len(estimates)
    results.figures["stories_estimate_error_worst"] = max(estimates, default=0.0)
    for kind in KINDS:
        faults = sum(any(fault.startswith(f"{kind}:") for fault in one["faults"]) for one in told)
        results.goal(f"stories_faults_{kind.replace('-', '_')}", faults, at_most=0)
    results.goal("stories_ledger_error_worst", max(ledgers, default=0.0), at_most=LEDGER_GOAL)
    results.figures["stories_questions_to_the_policy"] = sum(one["questions"] for one in told)


ALWAYS = frozenset({"seed", "policy", "pools", "lives", "ending_s", "end_role"})
"""What every story says of its account: no moods, or the same in all."""


def _results(results: Results, box: Box, played: Played, plan: Plan, left: str) -> None:
    mine = {machine.id for machine in played.seen.machines}
    billed, ledger = box.bill_usd(played.order.extras_usd_per_hour, mine), played.ledger_usd()
    print(f"\nledger ${ledger:.6f}, moto's record of instance-seconds at the pools' prices ${billed:.6f}")
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


if __name__ == "__main__":
    run_benchmark(main)
