"""Machines of one's own over real ssh: three unequal hosts train, one is lost and returns, and nothing is left on them.

Every host is an `sshd` in a network namespace of its own with a link at its rate (100, 100, 25 Mbit/s) and a quota of
processor time (1, 0.5, 0.25 of one). ``own_s`` is all from the inventory to a run's end but its training: checking,
measuring on this machine and on the hosts, planning, starting and ending; ``launch_s`` of it from the command to the
first step. ``time_error`` is how far that run's time was from its prediction. ``balance`` is the mean computation of a
step over the longest, once the batch has followed the hosts; ``redone_s_most`` the training that one loss has at most
undone, with a checkpoint every five seconds; ``lost_or_repeated`` counts steps that the log has twice, or out of order,
where links were cut; ``left`` counts files, processes and open ports on the hosts afterwards. It needs root. With
``--quick`` one host is lost once and one link cut, else 20 times and 10; 32 hosts are checked in both.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hetopt
from benchmarks._outcome import Results, options, publish, run_benchmark
from benchmarks._ssh_servers import Servers
from hetopt.api import hosts as owned
from hetopt.backends.emulation.cgroups import find_quotas
from hetopt.backends.emulation.namespaces import EmulatedNetwork
from hetopt.core.scaled_emulation import EmulatedHost

RECORDED = Path(__file__).resolve().parent.parent / "tests" / "recorded" / "resnet20-cifar10.json"
BATCH = 256
"""A step then computes for longer than the 0.1 s in which a quota is given out: less would not be slowed at all."""
SPEEDS, MBITS = (1.0, 0.5, 0.25), (100, 100, 25)
TASK = f"{Path(__file__).with_name('_toy.py')}:generated_images"
PATIENCE_S = 900.0
SETTLED_STEPS = 40
CHECKPOINT_EVERY_S = 5.0
CUT_S = 4.0


def inventory_of(servers: Servers, network: EmulatedNetwork) -> Path:
    """The three hosts as a file."""
    text = f'python = "{sys.executable}"\nusd_per_hour = 0.1\n'
    for place in range(len(SPEEDS)):
        name = network.namespace(place)
        (quota,) = find_quotas(name)
        servers.host(f"box{place}", network=name, group=quota.members)
        # Each has a disk of its own: of hosts that share one, the first to end cannot know that the folder is to go.
        folder = servers.folder / "remote" / str(place) / "hetopt"
        folder.parent.mkdir(parents=True)
        text += f'[box{place}]\nprivate = "{network.address(place)}"\nfolder = "{folder}"\n'
    path = servers.folder / "hosts.toml"
    path.write_text(text, encoding="utf-8")
    return path


def events_of(run: hetopt.Run) -> list[dict[str, Any]]:
    """What the run has told so far."""
    path = run.folder / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


@contextmanager
def ending(run: hetopt.Run) -> Iterator[hetopt.Run]:
    """A run that nothing is left of afterwards, whatever happens."""
    try:
        yield run
    finally:
        run.stop()


def until(run: hetopt.Run, what: Any) -> list[dict[str, Any]]:
    """Wait for something in the events.

    Raises:
        SystemExit: the run is over, or nothing happens.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while not what(events := events_of(run)):
        if run.status().state.is_over or time.monotonic() > deadline_s:
            raise SystemExit(f"the run did not get there: {run.status()}")
        time.sleep(0.2)
    return events


def steps_in(events: list[dict[str, Any]]) -> list[int]:
    """Steps as they were logged, in order of time."""
    return [event["step"] for event in events if event["event"] == "step"]


def starts_in(events: list[dict[str, Any]]) -> int:
    """How often workers were started."""
    return sum(event["event"] == "run_started" for event in events)


def checked_s(servers: Servers, count: int) -> float:
    """Seconds to check so many hosts."""
    tables = [f'python = "{sys.executable}"\n']
    for number in range(1, count + 1):
        servers.host(f"h{number}")
        tables.append(f'[h{number}]\nprivate = "127.0.1.{number}"\n')
    path = servers.folder / "many.toml"
    path.write_text("".join(tables), encoding="utf-8")
    begun_s = time.perf_counter()
    found = owned.check(path)
    assert sum(one.seen is not None for one in found) == count
    return time.perf_counter() - begun_s


def redone_s(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> float:
    """Seconds of training that a loss has undone: of the steps that were done again, without restarts between them."""
    took_s = {event["step"]: event["step_time_s"] * event["steps"] for event in before if event["event"] == "step"}
    again = steps_in(after[len(before) :])
    return float(sum(step_s for step, step_s in took_s.items() if again and step >= min(again)))


def cut_once(going: hetopt.Run, network: EmulatedNetwork, place: int) -> int:
    """Cut the link of a host for some seconds; how many steps the log lacks order of, or has twice, by that."""
    before = until(going, steps_in)
    network.take_down(place)
    time.sleep(CUT_S)
    network.bring_up(place)
    reached = max(steps_in(events_of(going)))
    after = until(going, lambda events: max(steps_in(events)) > reached + 2)
    steps = steps_in(after)[len(steps_in(before)) - 1 :]
    return sum(later <= earlier for earlier, later in itertools.pairwise(steps))


def from_inventory_to_end(inventory: Path, results: Results, *, epochs: int) -> None:
    """What `docs/own-machines.md` tells, once: check, measure, plan, train."""
    begun_s = time.perf_counter()
    text = inventory.read_text(encoding="utf-8")
    for found in owned.check(inventory):
        told = "\n".join(f"{one.setting} = {one.value:g}" for one in found.for_plans)
        text = text.replace(f"[{found.name}]\n", f"[{found.name}]\n{told}\n")
    planned = inventory.with_name("planned.toml")
    planned.write_text(text, encoding="utf-8")
    profile = hetopt.profile(TASK, time_budget_s=20.0, explore_on="ssh", inventory=planned, probe_budget_usd=0.10)
    results.figures["profile_s"] = round(time.perf_counter() - begun_s, 4)
    plan = hetopt.recommend(
        profile, budget_usd=5, epochs=epochs, batch_size=BATCH, inventory=planned, market="own", objective="fastest"
    )
    results.figures["hosts_planned"] = sum(group.machines for group in plan.chosen.groups)
    launched_s = time.perf_counter()
    with ending(hetopt.launch(plan, on="ssh", inventory=planned)) as run:
        until(run, steps_in)
        results.figures["launch_s"] = round(time.perf_counter() - launched_s, 4)
        assert run.wait().state.value == "finished"
    trained_s = run.record().progress.training_s
    assert trained_s is not None
    results.goal("own_s", time.perf_counter() - begun_s - trained_s, at_most=180)
    (took,) = (one for one in run.report().compared if one.name == "run time")
    results.figures |= {"predicted_s": round(took.predicted, 4), "measured_s": round(took.measured, 4)}
    assert took.error is not None
    results.goal("time_error", abs(took.error), at_most=0.10)


def trained(inventory: Path, network: EmulatedNetwork, losses: int, cuts: int, results: Results) -> None:
    """One run from its beginning to its end."""
    plan = hetopt.recommend(
        RECORDED, budget_usd=2, epochs=20, types="c7i.large", max_workers=2, trials=0, batch_size=BATCH
    )
    run = plan.run.model_copy(update={"checkpoint_every_s": CHECKPOINT_EVERY_S, "task": TASK})
    planned = plan.model_copy(update={"run": run})
    with ending(hetopt.launch(planned, on="ssh", inventory=inventory, steps=10**6)) as going:
        disturbed(going, network, losses, cuts, results)
    assert going.status().state.value == "stopped"


def disturbed(going: hetopt.Run, network: EmulatedNetwork, losses: int, cuts: int, results: Results) -> None:
    """Let it settle; then cut links of its hosts, and take hosts away."""
    settled = until(going, lambda events: max(steps_in(events), default=0) > SETTLED_STEPS)
    last = [event["compute_s"] for event in settled if event["event"] == "step"][-10:]
    balance = statistics.median(statistics.mean(one) / max(one) for one in last)
    results.goal("balance", balance, at_least=0.95)
    chance = random.Random(0)
    broken = sum(cut_once(going, network, chance.randrange(len(SPEEDS))) for _ in range(cuts))
    results.goal("lost_or_repeated", broken, at_most=0)
    print(f"{cuts} cuts: {broken} steps lost or repeated", file=sys.stderr)
    redone = [0.0]
    for loss in range(losses):
        time.sleep(chance.uniform(0, 2 * CHECKPOINT_EVERY_S))
        before = until(going, steps_in)
        network.kill(chance.randrange(1, len(SPEEDS)))
        start = starts_in(before)
        after = until(going, lambda events, start=start: starts_in(events) >= start + 2)
        redone.append(redone_s(before, until(going, lambda events, before=before: steps_in(events[len(before) :]))))
        print(f"loss {loss + 1} of {losses}: {redone[-1]:.1f} s are done again", file=sys.stderr)
        furthest = max(steps_in(after), default=0)
        until(going, lambda events, furthest=furthest: max(steps_in(events), default=0) > furthest)
    results.goal("redone_s_most", max(redone), at_most=CHECKPOINT_EVERY_S)


def main() -> None:
    """Check, train, lose, return, and look what is left."""
    asked = options(__doc__)
    results = Results()
    described = [
        EmulatedHost(name=f"h{place}", cpu_cores=speed, rate_bits_per_s=mbit * 1e6)
        for place, (speed, mbit) in enumerate(zip(SPEEDS, MBITS, strict=True))
    ]
    with (
        tempfile.TemporaryDirectory(prefix="hetopt-ssh-") as made,
        EmulatedNetwork.create(described, owner="benchmarks.ssh_hosts") as network,
    ):
        servers = Servers.made(Path(made))
        os.environ |= {"HETOPT_SSH": servers.command, "HETOPT_HOME": f"{made}/home"}
        results.goal("check_32_hosts_s", checked_s(servers, 4 if asked.smoke else 32), at_most=10)
        losses, cuts = (0, 1) if asked.smoke else (1, 1) if asked.quick else (20, 10)
        inventory = inventory_of(servers, network)
        trained(inventory, network, losses, cuts, results)
        from_inventory_to_end(inventory, results, epochs=1 if asked.quick else 3)
        deadline_s = time.monotonic() + 30
        while (left := left_on(servers, network)) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        results.goal("left", left, at_most=0)
    for name, value in results.figures.items():
        print(f"{name:24}{value:10.2f}")
    publish(results.outcome("ssh_hosts", quick=asked.quick), asked.json_file)


def left_on(servers: Servers, network: EmulatedNetwork) -> int:
    """Files, processes and open ports of runs on the hosts."""
    processes = sum(len(network.pids(place)) for place in range(len(SPEEDS)))
    for place in range(len(SPEEDS)):
        ports = ["ip", "netns", "exec", network.namespace(place), "ss", "-Hltu"]
        processes += len(subprocess.run(ports, capture_output=True, check=True).stdout.splitlines())
    there = sum(len(folders) + len(files) for _, folders, files in os.walk(servers.folder / "remote"))
    return processes + there - len(SPEEDS)


if __name__ == "__main__":
    run_benchmark(main)
