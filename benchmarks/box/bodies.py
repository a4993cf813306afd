"""Machines of the simulated account, in its own time: they boot, report, train, and fail.

Each does what its agent would write into the bucket (`hetopt.backends.ec2.node.agent`) and what EC2 would say of it.
Which machine hangs, fails in boot, restarts or is taken back, and at what notice, is drawn by the story's seed in the
order in which machines begin.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import Instance, StateReason
from moto.s3.models import s3_backends

from hetopt.backends.host.agent import PLACE_WITHIN_S, REPLACED_WITHIN_S
from hetopt.backends.host.protocol import Lease
from hetopt.core.budget_law import HEARTBEAT_S

TAKEN = ("Server.SpotInstanceTermination", "Server.SpotInstanceTermination: Spot instance termination")
BY_ITSELF = ("Client.InstanceInitiatedShutdown", "Client.InstanceInitiatedShutdown: Instance initiated shutdown")
LOSS_SHOWS_S = 30.0
SAVES_S = 20.0
AGAIN_S = 40.0
"""From a machine's second boot to its end: `hetopt-again.service` has it shut down."""

_CONFIG = re.compile(r'\{\s*"spec_sha256".*?\n\}', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Lives:
    """The random fates and durations of machines.

    Attributes:
        boot_s: least and most seconds of a boot.
        train_s: seconds from the first step to the last, if nothing is lost.
        fates: what can come over a machine, with how probable it is: 'hangs', 'fails', 'reboots', 'killed' (its agent,
            by a signal), 'taken'.
        leads_s: seconds between the notice to a machine and its end, to draw from.
        within_s: seconds from a machine's start within which its fate comes.
    """

    seed: int
    boot_s: tuple[float, float] = (60.0, 150.0)
    train_s: float = 1800.0
    fates: dict[str, float] = field(default_factory=dict)
    leads_s: tuple[float, ...] = (120.0,)
    within_s: float = 3000.0


@dataclass(kw_only=True)
class Body:
    """A machine with its agent: its fate, and the moments of its life.

    Attributes:
        fate: what comes over it, at `fated_s`; 'fails' and 'hangs' do so in its boot.
        boots_s: when it first says that it lives.
        allowance: until when it may live, as its agent reckons.
        end_s: when its timer has it shut down, by what it was told last.
        shuts_s: how long it takes to shut down.
        shut_s: when that is done; None: nobody has begun it.
        placed_s: when it last had a place, or began to wait for one.
        doomed: it was told that it will be taken.
        dead: its agent is gone.
    """

    instance: Instance
    config: dict[str, Any]
    fate: str
    fated_s: float
    lead_s: float
    boots_s: float
    latest_end_s: float
    end_s: float
    placed_s: float
    shuts_s: float
    shut_s: float | None = None
    leaves_s: float | None = None
    stop_training_s: float = math.inf
    generation: int = -1
    doomed: bool = False
    dead: bool = False
    again_s: float | None = None

    @property
    def id(self) -> str:
        """The identifier of the instance."""
        return str(self.instance.id)

    @property
    def runs(self) -> bool:
        """Return whether the machine is up."""
        return self.instance.state == "running"

    def trains(self, now_s: float) -> bool:
        """Return whether the machine's agent can take part in a run."""
        return (
            self.runs
            and not self.dead
            and self.shut_s is None
            and self.fate not in ("hangs", "fails")
            and now_s >= self.boots_s
        )


@dataclass(kw_only=True)
class Training:
    """A training run as its machines know it."""

    generation: int = -1
    runs: bool = False
    trained_s: float = 0.0
    step: int = 0
    lost_s: float | None = None
    over: bool = False
    written: int = 0


@dataclass(kw_only=True)
class Bodies:
    """All machines of an account.

    Attributes:
        capacity: how many machines of a type can run in a zone now; None: any number.
        is_outbid: whether a machine's pool costs more now than the highest price that it was asked for with.
        begun_s: when each machine was first launched.
    """

    TURN_S = HEARTBEAT_S

    lives: Lives
    capacity: Callable[[str, str], int | None]
    is_outbid: Callable[[Instance], bool]
    region: str
    happened: list[tuple[float, str]] = field(default_factory=list)
    begun_s: dict[str, float] = field(default_factory=dict)
    _bodies: dict[str, Body] = field(default_factory=dict)
    _runs: dict[str, Training] = field(default_factory=dict)
    _now_s: float = 0.0

    def turn(self, now_s: float) -> bool:
        """Let machines live up to the moment ``now_s``; return whether any machine is there."""
        self._now_s = now_s
        for instance in ec2_backends[DEFAULT_ACCOUNT_ID][self.region].all_instances():
            if instance.id not in self._bodies and instance.state != "terminated":
                self._bodies[instance.id] = self._born(instance)
        there = [body for body in self._bodies.values() if body.instance.state != "terminated"]
        for body in there:
            self._fate(body)
        self._shrink()
        for prefix in dict.fromkeys(f"runs/{body.config['run_id']}" for body in there):
            self._train(prefix, [body for body in there if f"runs/{body.config['run_id']}" == prefix])
        return bool(there)

    def due_s(self) -> float:
        """Return the next moment at which something happens by itself, in seconds since the epoch."""
        moments = (
            moment
            for body in self._bodies.values()
            if body.instance.state != "terminated"
            for moment in (body.end_s, body.leaves_s, body.shut_s, body.again_s, body.fated_s)
        )
        return min(
            (moment_s for moment_s in moments if moment_s is not None and moment_s > self._now_s), default=float("inf")
        )

    def _born(self, instance: Instance) -> Body:
        """Return a new machine's body.

        Its fate and times are drawn by the seed and the number of machines before it.
        """
        drawn = random.Random(f"{self.lives.seed} {len(self._bodies)}")
        fate, at = "", drawn.random()
        for name, probability in self.lives.fates.items():
            if at < probability and not (name == "taken" and instance.lifecycle != "spot"):
                fate = name
                break
            at -= probability
        self.begun_s[instance.id] = instance.launch_time.replace(tzinfo=datetime.UTC).timestamp()
        config = _config(instance.user_data)
        boots_s = self._now_s + drawn.uniform(*self.lives.boot_s)
        end_s = float(config.get("end_s", float("inf")))
        latest_end_s = float(config.get("latest_end_s", float("inf")))
        return Body(
            instance=instance,
            config=config,
            fate=fate,
            fated_s=self._now_s + drawn.uniform(20.0, self.lives.within_s),
            lead_s=drawn.choice(self.lives.leads_s),
            boots_s=boots_s,
            latest_end_s=latest_end_s,
            end_s=end_s,
            placed_s=boots_s,
            shuts_s=drawn.uniform(2.0, 40.0),
        )

    def _fate(self, body: Body) -> None:
        """Let happen to a machine what is due.

        It ends after a restart or shutdown, shuts down at its end, fails to boot, starts again, loses its agent, or is
        taken back. Nothing happens to a machine that has ended.
        """
        now_s, due = self._now_s, self._now_s >= body.fated_s
        if body.again_s is not None:
            if now_s >= body.again_s:
                self._end(body, BY_ITSELF, "started again, and shut itself down")
            return
        if not body.runs:
            return
        if body.shut_s is not None:
            if now_s >= body.shut_s:
                self._end(body, BY_ITSELF, "has shut down")
            return
        ends_s = body.end_s if body.leaves_s is None else min(body.end_s, body.leaves_s)
        if now_s >= ends_s:
            self.happened.append(
                (now_s, f"{body.id} shuts down by its {'timer' if body.leaves_s is None else 'agent'}")
            )
            body.dead, body.shut_s = True, now_s + body.shuts_s
            return
        match body.fate:
            case "fails" if now_s >= body.boots_s:
                text = f"hetopt: {body.id}: pip could not install torch: no route to host\n"
                self._put(f"runs/{body.config['run_id']}/boot/{body.id}.log", text.encode(), body)
                self._end(body, BY_ITSELF, "failed to boot")
            case "reboots" if due:
                self.happened.append((now_s, f"{body.id} starts again"))
                body.dead, body.again_s = True, now_s + AGAIN_S
            case "killed" if due and not body.dead:
                self.happened.append((now_s, f"the agent of {body.id} is killed"))
                body.dead = True
            case "taken":
                self._take(body)

    def _take(self, body: Body) -> None:
        """Take a machine back that is due.

        Before, in the lead time, let one that trains report the interruption once.
        """
        if self._now_s >= body.fated_s:
            self._end(body, TAKEN, "taken back")
        elif self._now_s >= body.fated_s - body.lead_s and not body.doomed and body.trains(self._now_s):
            body.doomed = True
            self.happened.append((self._now_s, f"{body.id} is told that it will be taken"))
            self._say(body, "interruption")

    def _shrink(self) -> None:
        """Have the newest machines of pools with too little capacity, and outbid ones, taken back after their lead."""
        pools: dict[tuple[str, str], list[Body]] = {}
        for body in self._bodies.values():
            if body.runs and body.instance.lifecycle == "spot" and body.fate != "taken":
                pools.setdefault((str(body.instance.placement.zone), body.instance.instance_type), []).append(body)
        for (zone, name), bodies in pools.items():
            most = self.capacity(zone, name)
            kept = [body for body in bodies[:most] if not self.is_outbid(body.instance)]
            for body in [body for body in bodies if body not in kept]:
                body.fate, body.fated_s = "taken", self._now_s + body.lead_s

    def _train(self, prefix: str, bodies: list[Body]) -> None:
        """Let the machines of a run do what their agents do in a turn: report, follow placements, train, shut down."""
        run, now_s = self._runs.setdefault(prefix, Training()), self._now_s
        lease = Lease.of_json(json.dumps(self._read(prefix, "lease.json", bodies[0]) or {}).encode())
        placement = self._read(prefix, "placement.json", bodies[0]) or {}
        alive = [body for body in bodies if body.trains(now_s)]
        hosts = placement.get("hosts", {})
        generation = int(placement.get("generation", -1))
        for body in alive:
            if lease is not None:
                body.end_s, body.stop_training_s = min(lease.end_s, body.latest_end_s), lease.stop_training_s
            if not body.doomed:
                self._say(body, "training" if body.id in hosts else "waiting")
            if body.id in hosts and generation > body.generation:
                body.generation, body.placed_s = generation, now_s
            elif run.runs and body.id in hosts:
                body.placed_s = now_s
        mine = [body for body in alive if body.id in hosts]
        must_end = any(now_s >= body.stop_training_s for body in alive)
        self._follow_placement(prefix, run, generation, placement, mine)
        if run.runs:
            self._go_on(prefix, run, len(mine) == len(hosts), must_end or any(body.doomed for body in mine), mine)
        for body in alive:
            patience_s = PLACE_WITHIN_S if body.generation < 0 else REPLACED_WITHIN_S
            if now_s >= body.stop_training_s or (run.over and body.generation >= 0):
                body.leaves_s = now_s + SAVES_S if body.leaves_s is None else body.leaves_s
            elif now_s > body.placed_s + patience_s:
                body.leaves_s = now_s if body.leaves_s is None else body.leaves_s

    def _follow_placement(
        self, prefix: str, run: Training, generation: int, placement: dict[str, Any], mine: list[Body]
    ) -> None:
        """Stop the training where the placement pauses; begin the next generation once all of its hosts are there."""
        if placement.get("pauses") and run.runs:
            self._event(prefix, run, mine, "training_finished", reason="stopped", step=run.step)
            run.runs = False
        elif generation > run.generation and not placement.get("pauses") and mine:
            if len(mine) < len(placement["hosts"]) or run.over:
                return  # they meet when all are there
            run.generation, run.runs, run.lost_s = generation, True, None
            if not run.written:
                self._event(prefix, run, mine, "run_started")
            self._event(prefix, run, mine, "training_started", step=run.step)

    def _go_on(self, prefix: str, run: Training, whole: bool, stops: bool, mine: list[Body]) -> None:
        """Train for a turn; end the generation where it must stop, is done, or has missed a host for too long.

        A checkpoint is saved before a stop, and every eight turns. Without any of its machines here the run just ends.
        """
        if not mine:
            run.runs = False
            return
        if not whole:
            run.lost_s = self._now_s if run.lost_s is None else run.lost_s
            if self._now_s >= run.lost_s + LOSS_SHOWS_S:
                self._event(prefix, run, mine, "run_failed", reason="a worker is gone")
                run.runs = False
            return
        run.trained_s += self.TURN_S
        run.step += 10
        if stops:
            self._checkpoint(prefix, run, mine)
            self._event(prefix, run, mine, "training_finished", reason="stopped", step=run.step)
            run.runs = False
        elif run.trained_s >= self.lives.train_s:
            self._event(prefix, run, mine, "training_finished", reason="steps", step=run.step)
            run.runs, run.over = False, True
        elif run.step % 80 == 0:
            self._checkpoint(prefix, run, mine)

    def _checkpoint(self, prefix: str, run: Training, mine: list[Body]) -> None:
        pointer = json.dumps({"checkpoint": f"step-{run.step}", "generation": run.generation})
        self._put(f"{prefix}/ckpt/LATEST", pointer.encode(), mine[0])

    def _event(self, prefix: str, run: Training, mine: list[Body], name: str, **fields: object) -> None:
        """Append an event to the run's log in the bucket, in the name of its first machine, and to what happened."""
        line = json.dumps({"event": name, "time_s": self._now_s, **fields}) + "\n"
        self._put(f"{prefix}/events/{run.written:015d}.jsonl", line.encode(), mine[0])
        run.written += len(line.encode())
        self.happened.append((self._now_s, f"run: {name} {fields or ''}".rstrip()))

    def _say(self, body: Body, what: str) -> None:
        heartbeat = json.dumps({"time_s": self._now_s, "does": what}).encode()
        self._put(f"runs/{body.config['run_id']}/state/{body.id}.json", heartbeat, body)

    def _end(self, body: Body, reason: tuple[str, str], what: str) -> None:
        """Terminate a machine in moto, with a state reason of EC2, and note what happened."""
        body.instance.terminate()
        body.instance.state_reason = StateReason(reason[1], reason[0])
        self.happened.append((self._now_s, f"{body.id} {what}"))

    def _put(self, key: str, value: bytes, body: Body) -> None:
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(body.config["bucket"], key, value)

    def _read(self, prefix: str, name: str, body: Body) -> dict[str, Any] | None:
        """Return the content of a JSON object of a run; None where the bucket has no such object."""
        keys = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].get_bucket(body.config["bucket"]).keys
        stored = keys.get(f"{prefix}/{name}")
        content: dict[str, Any] | None = None if stored is None else json.loads(stored.value)
        return content


def _config(user_data: Any) -> dict[str, Any]:
    """Return the configuration in a machine's boot data; empty: there is none."""
    text = user_data if isinstance(user_data, str) else user_data.decode() if user_data is not None else ""
    if _CONFIG.search(text) is None:
        text = base64.b64decode(text).decode()
    match = _CONFIG.search(text)
    config: dict[str, Any] = json.loads(match[0]) if match else {}
    return config
