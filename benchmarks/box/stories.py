"""Stories on the unkind account: a run's life by a seed, from its order to the last `hetopt gc`, in the account's time.

Several moods hold at once. Whoever launches or follows may be killed (``kill -9`` of a forked process), may come back,
or not; in the end somebody looks after what is left. What must hold in every story: nothing stays rented, nothing is
spent beyond the budget, nobody is told that all is well while something is left, every message names a cause and what
to type next, and a run that was followed to its end knows what it has cost.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from benchmarks._ports import own_port
from benchmarks.box.iam import actions_of
from hetopt.api import account
from hetopt.backends.backend import RunHandle
from hetopt.backends.ec2.renter.doctor import Policy, policy as printed
from hetopt.backends.ec2.renter.launcher import PLAN_OBJECT, Ec2Launcher
from hetopt.backends.ec2.renter.order import ORDER_FILE, SEEN_FILE, ClusterState, Order
from hetopt.backends.ec2.renter.ordering import Orders
from hetopt.backends.ec2.renter.request import TABLE, Answer, BotoEdge, Edge, Request, Retrying
from hetopt.backends.options import Ec2
from hetopt.core.errors import HetoptError, RunFailed
from hetopt.core.run_folder import BUNDLE_FILE
from hetopt.core.run_spec import WorkerSpec
from hetopt.optimizer.cost.bill import load_billing
from hetopt.optimizer.market.catalog import Catalog, load_catalog
from hetopt.optimizer.plan import Plan

REGION, ACCOUNT, ROLE = "us-east-1", "123456789012", "hetopt-node"
BUCKET = f"hetopt-{ACCOUNT}-{REGION}"
BEGIN_S = 1_800_000_000.0
WITHIN = 0.01
"""Of the bill, how far a run's own record may be off."""

LASTS_S = 40 * 3600.0
"""How long prices move."""

KINDS = ("left", "budget", "all-clear", "died", "ledger", "policy")

Groups = tuple[tuple[str, int, str], ...]
CLUSTERS: tuple[Groups, ...] = (
    (("c7i.large", 2, "spot"), ("c7g.xlarge", 1, "on-demand")),
    (("c7i.large", 3, "spot"),),
    (("c7i.xlarge", 1, "on-demand"), ("c7i.large", 1, "on-demand")),
    (("c7i.xlarge", 2, "spot"), ("c6in.large", 1, "spot")),
)
STAND_INS = {
    "c7i.large": ("c6in.large",),
    "c7i.xlarge": ("c6i.xlarge", "m7i.xlarge"),
    "c7g.xlarge": ("c6g.xlarge",),
    "c6in.large": ("c7i.large",),
}
PlanOf = Callable[[Groups, float], Plan]
"""A plan of these machines, with a budget in USD."""

_OF_EC2 = (
    *("CreateFleet", "CreateLaunchTemplate", "CreateSecurityGroup", "DescribeInstances", "TerminateInstances"),
    *("DescribeVolumes", "DeleteSecurityGroup", "DeleteLaunchTemplate"),
)
_OF_S3 = ("PUT", "GET")
_ZONES = tuple(f"{REGION}{letter}" for letter in "abcdef")


@dataclass(kw_only=True)
class Account:
    """A simulated AWS account with faults at a URL, and its clock."""

    url: str
    now_s: float = BEGIN_S
    sessions: int = 0

    def be(self, **how: object) -> None:
        """Change the account's moods from now on."""
        self.now_s = float(json.loads(self._ask("unkind", json.dumps(how).encode())))

    def clock(self) -> float:
        """Return seconds since the epoch by the account's clock."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Advance the account's clock."""
        self.be(advance_s=seconds)

    def truth(self) -> dict[str, Any]:
        """Return the true state of the account, which its API calls do not show."""
        state: dict[str, Any] = json.loads(self._ask("unkind"))
        self.now_s = state["now_s"]
        return state

    def start_over(self) -> None:
        """Reset the account to the machines' role and an empty bucket."""
        self._ask("moto-api/reset", b"")
        self.be(clock_s=BEGIN_S, profile=ROLE)
        request = Request(step="b", service="s3", operation="create_bucket", parameters={"Bucket": BUCKET}, purpose="")
        _door(REGION)(request)

    def log_in(self) -> None:
        """Start another session of the same role, as another process would."""
        self.sessions += 1
        name = f"botocore-session-{self.sessions}"
        self.be(user_id=f"AROA0123456789EXAMPLE:{name}", arn=f"arn:aws:sts::{ACCOUNT}:assumed-role/Trainer/{name}")

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        """Return the body of the server's answer to a GET, or to a POST where there is a body to send.

        Raises:
            OSError: the server does not answer, or refuses.
        """
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/{path}", data=body), timeout=60) as answer:
            content: bytes = answer.read()
        return content


@dataclass(kw_only=True)
class Teller:
    """An API client of one process, which may be killed before or after one of its calls."""

    inner: Edge
    kill_at: int | None = None
    after: bool = False
    calls: int = 0

    def __call__(self, request: Request) -> Answer:
        """Answer a call as the inner edge does; kill this process right before or after the call whose turn it is."""
        at, self.calls = self.calls, self.calls + 1
        if at == self.kill_at and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return self.inner(request)
        finally:
            if at == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


@dataclass(kw_only=True)
class Story:
    """The moods, messages, faults and bill of a simulated run.

    Attributes:
        moods: moods of the account that held.
        happened: (moment in s, text) of each thing that happened.
        faults: sentences on what must not happen and did, each with its kind of `KINDS` before a colon.
        ends: words for how it ended, to be counted.
        ledger_error: error of the run's record against the bill; None where nobody followed the run to its end, or
        where
            the record says that it is an estimate.
        questions: number of authorizations that were decided.
    """

    seed: int
    moods: dict[str, Any] = field(default_factory=dict)
    happened: list[tuple[float, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    ends: str = ""
    kills: int = 0
    usd: float = 0.0
    budget_usd: float = 0.0
    ledger_error: float | None = None
    questions: int = 0

    def timeline(self) -> str:
        """Return the story as text, a line for each thing that happened."""
        lines = [f"story {self.seed}: {json.dumps({**self.moods, 'policy': '...', 'pools': '...'})}"]
        lines += [f"{at - BEGIN_S:8.0f} s  {what}" for at, what in sorted(self.happened, key=lambda entry: entry[0])]
        return "\n".join([*lines, f"ends: {self.ends}, ${self.usd:.4f} of ${self.budget_usd:.2f}", *self.faults])


def moods_of(drawn: Random, groups: Groups, catalog: Catalog) -> dict[str, Any]:
    """Return the moods of a story, each drawn by its own probability, so that several hold at once."""

    def chance(probability: float) -> bool:
        return drawn.random() < probability

    moods: dict[str, Any] = {"seed": drawn.randrange(10**6), "policy": policy_without(None)}
    if chance(0.6):
        moods["lag_s"] = drawn.choice((2.0, 8.0, 25.0, 45.0))
    if chance(0.4):
        moods["tag_lag_s"] = drawn.choice((5.0, 20.0, 50.0))
    moods["ending_s"] = drawn.choice((0.0, 15.0, 60.0))
    if chance(0.4):
        moods["throttled"] = drawn.choice((0.02, 0.1, 0.25))
    if chance(0.35):
        moods["faulty"] = drawn.choice((0.02, 0.08))
    if chance(0.3):
        moods["cut"] = drawn.choice((0.02, 0.06))
    types = [name for planned, _, _ in groups for name in (planned, *STAND_INS[planned])]
    moods["pools"] = {
        f"{zone}/{name}": pool_of(drawn, catalog, name, scarce=chance(0.25)) for zone in _ZONES for name in types
    }
    if chance(0.2):
        moods["short"] = {drawn.choice(types): drawn.choice((1, 2))}
    if chance(0.15):
        moods["exhausted"] = [drawn.choice(types)]
    if chance(0.4):
        moods["refuses_at"] = [[*_refusal(drawn), *_span(drawn)] for _ in range(drawn.randint(1, 3))]
    if chance(0.2):
        moods["expired"] = [_span(drawn, BEGIN_S + 300)]
    if chance(0.1):
        moods["policy"] = policy_without(drawn.choice(_DROPPED))
    if chance(0.04):
        moods["forbidden"] = ["ec2:RunInstances"]
    if chance(0.06):
        moods["subnets"] = "none"
    moods["end_role"] = chance(0.7)
    fates = {name: drawn.choice((0.05, 0.15, 0.3)) for name in _FATES if chance(0.3)}
    moods["lives"] = {
        "seed": drawn.randrange(10**6),
        "boot_s": drawn.choice(((30.0, 60.0), (60.0, 150.0), (100.0, 500.0))),
        "train_s": drawn.choice((600.0, 1800.0, 5400.0)),
        "fates": fates,
        "leads_s": drawn.choice(((120.0,), (0.0, 5.0, 30.0, 120.0), (0.0,))),
    }
    return moods


_FATES = ("hangs", "fails", "reboots", "killed", "taken")
_DROPPED = (
    "ec2:TerminateInstances",
    "ec2:DescribeVolumes",
    "ec2:DeleteSecurityGroup",
    "s3:GetObject",
)


def policy_without(action: str | None) -> Policy:
    """Return the printed policy, without an action where an administrator has taken that out; None: whole."""
    policy = printed("operator_policy", account=ACCOUNT, region=REGION, bucket=BUCKET, role=ROLE)
    statements = [
        {**statement, "Action": [name for name in statement["Action"] if name != action]}
        for statement in policy["Statement"]
    ]
    return {**policy, "Statement": [statement for statement in statements if statement["Action"]]}


def _refusal(drawn: Random) -> tuple[str, str]:
    """Return an API call, and an error code that its service may refuse it with."""
    rows = [row for row in TABLE if "exceptions of botocore" not in row.source]  # which no service answers
    codes = {
        of_s3: [
            code
            for row in rows
            for code in row.codes
            if row.source.startswith("S3") == of_s3 and not set("*?").intersection(code) and not code.isdigit()
        ]
        for of_s3 in (True, False)
    }
    of_s3 = drawn.random() < 0.3
    return drawn.choice(_OF_S3 if of_s3 else _OF_EC2), drawn.choice(codes[of_s3])


def _span(drawn: Random, from_s: float = BEGIN_S) -> list[float]:
    since_s = from_s + drawn.choice((0.0, drawn.uniform(0, 300), drawn.uniform(0, 4000)))
    return [since_s, since_s + drawn.choice((20.0, 120.0, 900.0, 4000.0))]


def pool_of(drawn: Random, catalog: Catalog, name: str, *, scarce: bool) -> list[list[float]]:
    """Return the changes of a pool over time: moment, machines to be had, and price of at most that on demand."""
    price = catalog.price(name, "on-demand")
    assert price is not None
    at, share, steps = BEGIN_S - 7200.0, drawn.uniform(0.25, 0.6), []
    while at < BEGIN_S + LASTS_S:
        machines = drawn.choice((0, 0, 1, 9)) if scarce else drawn.choice((9, 9, 9, 9, 1))
        steps.append([round(at), machines, round(share * price.usd_per_hour, 6)])
        share = min(1.0, max(0.1, share * drawn.uniform(0.7, 1.5)))
        at += drawn.uniform(600, 2 * 3600)
    return steps


@dataclass(kw_only=True)
class Narrator:
    """Simulator of stories, one after another, on one account.

    Attributes:
        folder: folder of all files that stories write.
        plan_of: returns a plan on given machines within a budget.
        bundle_sha256: SHA-256 of the code that machines would get.
    """

    account: Account
    folder: Path
    catalog: Catalog
    plan_of: PlanOf
    bundle_sha256: str = "0" * 64

    def tell(self, seed: int) -> Story:
        """Simulate one story from its seed.

        Resets the account, and removes all files of the story afterwards.
        """
        drawn, account = Random(seed), self.account
        groups = drawn.choice(CLUSTERS)
        plan = self.plan_of(groups, drawn.choice((0.3, 0.8, 2.0)))
        moods = moods_of(drawn, groups, self.catalog)
        story = Story(seed=seed, moods=moods)
        home = self.folder / f"home-{seed}"
        run_dir = home / "runs" / f"20270115-080000-story-{seed:04d}"
        run_dir.mkdir(parents=True)
        account.start_over()
        with _in_its_time(account, home):
            account.be(**story.moods)
            account.log_in()
            _Telling(narrator=self, story=story, drawn=drawn, plan=plan, home=home, run_dir=run_dir).tell()
        story.happened += [(at, what) for at, what in account.truth()["happened"]]
        shutil.rmtree(home)
        if any(call in _OF_S3 for call, *_ in moods.get("refuses_at", ())):
            # Where a refusal names another region, botocore goes there with all that it asks of the bucket after it.
            _door.cache_clear()
        return story


_door = lru_cache(maxsize=1)(BotoEdge)
"""One for all, as botocore reads megabytes of what services know before the first call."""


def _hang_up() -> None:
    """Close the connections that a forked process has inherited."""
    for client in _door(REGION)._clients.values():
        client.close()


@contextmanager
def _in_its_time(account: Account, home: Path) -> Iterator[None]:
    """Make everything of this process that waits or asks for the time do so by the account's clock, inside."""
    clock = SimpleNamespace(time=account.clock, sleep=account.sleep)
    with (
        patch.dict(os.environ, {"HETOPT_HOME": str(home), "AWS_ENDPOINT_URL": account.url}),
        # What botocore waits for between its own tries is the account's time too.
        patch("time.sleep", account.sleep),
        patch("botocore.retries.adaptive.register_retry_handler", lambda client: None),
        patch("hetopt.api.account.time", clock),
        patch("hetopt.backends.ec2.renter.request.time", clock),
        patch("hetopt.backends.ec2.renter.request.BotoEdge", _door),
    ):
        yield


@dataclass(kw_only=True)
class _Telling:
    """A story that is being simulated."""

    narrator: Narrator
    story: Story
    drawn: Random
    plan: Plan
    home: Path
    run_dir: Path
    followed: bool = True

    @property
    def account(self) -> Account:
        return self.narrator.account

    @property
    def handle(self) -> RunHandle:
        return RunHandle(run_dir=self.run_dir)

    def tell(self) -> None:
        """Let a user order, launch, follow, stop and clean up, killed half-way at times; record every fault."""
        if self._order() and self._launched():
            for _ in range(self.drawn.randint(2, 5)):
                if self._cleared():
                    break
                self._process("follow", self._follow, kill=self.drawn.random() < 0.4)
                if self.drawn.random() < 0.3:
                    self.followed = False
                    self.account.sleep(self.drawn.choice((60.0, 1800.0, 20_000.0)))
            if not self._cleared() and self.drawn.random() < 0.6:
                self._process("stop", self._stop, kill=self.drawn.random() < 0.3)
        if (self.run_dir / ORDER_FILE).exists():
            self._look_after()
        self._settle_accounts()

    def _order(self) -> bool:
        """Plan a purchase and write its order, plan and bundle into the run directory.

        Return whether that succeeded.
        """
        plan = self.plan

        def make() -> None:
            """Write the order, the plan and the bundle."""
            orders = Orders(
                edge=self._edge(None, after=False),
                catalog=self.narrator.catalog,
                billing=load_billing(),
                options=Ec2(),
                version="0.1.0",
            )
            sha256, now_s = self.narrator.bundle_sha256, self.account.now_s
            order = orders.of_plan(plan, run_id=self.run_dir.name, bundle_sha256=sha256, now_s=now_s)
            order.save(self.run_dir / ORDER_FILE)
            plan.save(self.run_dir / PLAN_OBJECT)
            (self.run_dir / BUNDLE_FILE).write_bytes(b"code")

        return self._process("order", lambda _: make(), kill=False)

    def _launched(self) -> bool:
        """Launch the run; return whether there is one to follow."""
        done = self._process(
            "launch", lambda launcher: launcher.start(self.plan.run, self.run_dir, {}), kill=self.drawn.random() < 0.35
        )
        return done and (self.run_dir / SEEN_FILE).exists()

    def _follow(self, launcher: Ec2Launcher) -> None:
        """Poll the run 10 to 40 times over its time, until it is over and the bucket and machines are cleared."""
        for _ in range(self.drawn.randint(10, 40)):
            status = launcher.poll(self.handle)
            if status.state.is_over and self._cleared():
                break
            self.account.sleep(self.drawn.choice((15.0, 60.0, 240.0, 600.0)))

    def _stop(self, launcher: Ec2Launcher) -> None:
        launcher.stop(self.handle)

    def _cleared(self) -> bool:
        path = self.run_dir / SEEN_FILE
        return path.exists() and ClusterState.load(path).cleared

    def _edge(self, kill_at: int | None, *, after: bool) -> Edge:
        edge = Retrying(inner=_door(REGION), sleep=self.account.sleep, random=Random(self.story.seed))
        return Teller(inner=edge, kill_at=kill_at, after=after)

    def _launcher(self, edge: Edge) -> Ec2Launcher:
        account = self.account
        return Ec2Launcher(
            home=self.home,
            inner=edge,
            tell=lambda text: self.story.happened.append((account.now_s, f"hetopt: {text}")),
            clock=account.clock,
            sleep=account.sleep,
        )

    def _process(self, name: str, work: Callable[[Ec2Launcher], object], *, kill: bool) -> bool:
        """Run a command; return whether it came to its end. With ``kill`` it forks, and SIGKILL may end the child."""
        self.account.log_in()
        kill_at = self.drawn.choice((self.drawn.randrange(6, 22), self.drawn.randrange(0, 90))) if kill else None
        after = self.drawn.random() < 0.5
        if not kill:
            return self._done(name, work, self._edge(None, after=after))
        report = self.home / "report.json"
        report.unlink(missing_ok=True)
        begun = len(self.story.happened)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _hang_up()
                done = self._done(name, work, self._edge(kill_at, after=after))
                outcome = {
                    "done": done,
                    "happened": self.story.happened[begun:],
                    "faults": self.story.faults,
                    "ends": self.story.ends,
                }
                report.write_text(json.dumps(outcome))
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        self.account.truth()
        if report.exists():
            outcome = json.loads(report.read_text())
            self.story.happened += [(at, what) for at, what in outcome["happened"]]
            self.story.faults[:], self.story.ends = outcome["faults"], outcome["ends"]
            return bool(outcome["done"])
        if not os.WIFSIGNALED(status):
            self.story.faults.append(f"died: {name}: the process died by itself")
        self.story.kills += 1
        self.story.happened.append(
            (self.account.now_s, f"kill -9 of `{name}` {'after' if after else 'before'} its call {kill_at}")
        )
        return False

    def _done(self, name: str, work: Callable[[Ec2Launcher], object], edge: Edge) -> bool:
        """Do a command's work through an edge; return whether it came to its end, and record what hetopt's errors say.

        Errors of hetopt are no faults; a claim that nothing is left, while something is, is one.
        """
        try:
            work(self._launcher(edge))
        except HetoptError as error:
            self._words(name, error)
            if name in ("order", "launch"):
                self.story.ends = f"refused: {error.message}"[:120]
                claim = f"{name} was refused without a word of `hetopt gc`"
                self._is_clear(claim, unless="hetopt gc" in f"{error.hint}")
            return False
        if name == "stop":
            self._is_clear("`hetopt stop` ended well")
        return True

    def _words(self, name: str, error: HetoptError) -> None:
        self.story.happened.append((self.account.now_s, f"{name}: {error.message} -> {error.hint}"))

    def _is_clear(self, claim: str, *, unless: bool = False) -> None:
        """Record a fault if a claim that nothing is left is not true."""
        truth = self.account.truth()
        left = [machine["id"] for machine in truth["machines"] if machine["state"] != "terminated"] + truth["others"]
        if left and not unless:
            at_s = self.account.now_s - BEGIN_S
            self.story.faults.append(f"all-clear: at {at_s:.0f} s {claim}, and {left} are left")

    def _look_after(self) -> None:
        """Run `hetopt gc --on ec2 --remove`, at once or later, until it says that nothing is left.

        Record a fault if it never says so, even after every mood has passed.
        """
        self.account.sleep(self.drawn.choice((0.0, 5.0, 90.0, 4000.0)))
        clear = self._collect()
        for _ in range(12):
            if clear:
                break
            self.account.sleep(self.drawn.choice((120.0, 3600.0, 20_000.0)))
            clear = self._collect()
        # By now the administrator has given back what was taken, and whoever is throttled has waited.
        self.account.be(
            throttled=0, faulty=0, cut=0, expired=[], refuses_at=[], policy=policy_without(None), forbidden=[]
        )
        self.account.sleep(100_000.0)
        for _ in range(3):
            if self._collect():
                return
            self.account.sleep(100.0)
        self.story.faults.append("left: `hetopt gc` never says that nothing is left")

    def _collect(self) -> bool:
        """Run `hetopt gc --remove`; return whether it says that nothing is left, and record a fault if that is wrong.

        An error of hetopt's is no fault: it counts as something left.
        """
        self.account.log_in()
        try:
            searched = account.Search(remove=True)
            searched.look_everywhere()
        except HetoptError as error:
            self._words("gc", error)
            return False
        for refused in searched.refused:
            self._words("gc", refused)
        kept = [leftover for leftover in searched.leftovers if not leftover.removed]
        reasons = (
            ", ".join(dict.fromkeys(f"{leftover.left_alone or 'stays'}" for leftover in kept))
            or f"removed {len(searched.leftovers)}"
        )
        self.story.happened.append((self.account.now_s, f"gc: {reasons}, {len(searched.refused)} refused"))
        if not kept and not searched.refused:
            self._is_clear("`hetopt gc` said that nothing is left")
            return True
        return False

    def _settle_accounts(self) -> None:
        """Record as faults what is left, refusals by hetopt's own policy, too much spent, and a ledger off the bill."""
        story, truth = self.story, self.account.truth()
        left = [machine["id"] for machine in truth["machines"] if machine["state"] != "terminated"] + truth["others"]
        if left:
            story.faults.append(f"left: {left} are there in the end")
        story.questions = truth["questions"]
        # What an administrator or the organisation has taken away is refused, and nothing else.
        taken = {*set(actions_of(policy_without(None))) - set(actions_of(story.moods["policy"]))}
        taken |= {name.lower() for name in story.moods.get("forbidden", ())}
        for refusal in truth["refused"]:
            if refusal["action"].lower() not in taken:
                story.faults.append(
                    f"policy: {refusal['action']} on {refusal['resource']} with {refusal['context']} is refused"
                )
        if not (self.run_dir / ORDER_FILE).exists():
            return
        order = Order.load(self.run_dir / ORDER_FILE)
        story.budget_usd = order.budget_usd
        story.usd = sum(self._bill(machine, order) for machine in truth["machines"]) + order.fixed_usd
        if story.usd > order.budget_usd * (1 + 1e-9):
            story.faults.append(f"budget: ${story.usd:.4f} was spent, and the budget is ${order.budget_usd:.2f}")
        if (self.run_dir / SEEN_FILE).exists():
            seen = ClusterState.load(self.run_dir / SEEN_FILE)
            story.ends = story.ends or f"{'cleared' if seen.cleared else 'left to gc'}: {seen.stop_reason}"[:120]
            mine = {machine.id for machine in seen.machines}
            billed = sum(self._bill(machine, order) for machine in truth["machines"] if machine["id"] in mine)
            if seen.cleared and self.followed and billed > 0 and not seen.is_estimate:
                error = story.ledger_error = seen.spent_usd(seen.time_s) / billed - 1
                if abs(error) > WITHIN:
                    story.faults.append(f"ledger: its record is {100 * error:+.2f} % off the bill of ${billed:.4f}")

    def _bill(self, machine: dict[str, Any], order: Order) -> float:
        """Return the USD that EC2 bills for a machine: the seconds it ran, a minute at least, each at its price.

        What is taken back within its first hour is free, but for disk and address; nothing costs more than the highest
        price that it was asked for with."""
        begun_s, ended_s = machine["begun_s"], machine["ended_s"] or self.account.now_s
        until_s = max(ended_s, begun_s + 60)
        free = machine["reason"].startswith("Server.Spot") and ended_s - begun_s < 3600
        price = self.narrator.catalog.price(machine["type"], "on-demand")
        assert price is not None
        steps: Sequence[Sequence[float]] = [[0.0, 0, price.usd_per_hour]]
        if machine["spot"]:
            steps = self.story.moods["pools"][f"{machine['zone']}/{machine['type']}"]
        total: float = order.extras_usd_per_hour * (until_s - begun_s)
        for (at, _, usd), (then, *_) in itertools.pairwise([*steps, [float("inf"), 0, 0.0]]):
            total += 0.0 if free else min(usd, machine["highest_usd"]) * max(0.0, min(then, until_s) - max(at, begun_s))
        return total / 3600


def plan_on(plan: Plan, catalog: Catalog, groups: Groups, budget_usd: float | None = None) -> Plan:
    """Return the plan on other machines, with equal local batches; its prediction stays what it was.

    Args:
        plan: of which the first group shows what the others are like.
        catalog: of prices; it knows every group's.
        groups: machines to rent, by type and market.
        budget_usd: of the goal; None: as in the plan.
    """
    like, groups_of_plan = plan.chosen.groups[0], []
    workers: list[WorkerSpec] = []
    for name, machines, market in groups:
        price = catalog.price(name, market)  # type: ignore[arg-type]
        assert price is not None
        changes = {
            "instance_type": name,
            "machines": machines,
            "market": market,
            "price_usd_per_hour": price.usd_per_hour,
            "price_date": str(price.date),
            "price_source": price.source,
            "price_is_estimate": price.is_estimate,
            "interruption_band": None,
            "local_batch_sizes": (64,) * machines,
        }
        groups_of_plan.append(like.model_copy(update=changes))
        first = len(workers)
        workers += [WorkerSpec(host=f"h{first + place}", type=name, local_batch_size=64) for place in range(machines)]
    chosen = plan.chosen.model_copy(update={"groups": tuple(groups_of_plan), "global_batch_size": 64 * len(workers)})
    run = plan.run.model_copy(update={"workers": tuple(workers)})
    goal = plan.goal if budget_usd is None else plan.goal.model_copy(update={"budget_usd": budget_usd})
    return plan.model_copy(
        update={
            "chosen": chosen,
            "stand_ins": tuple(STAND_INS[name] for name, _, _ in groups),
            "pareto": (chosen,),
            "run": run,
            "goal": goal,
        }
    )


CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "operator",
    "AWS_SECRET_ACCESS_KEY": "operator",
    "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


@contextmanager
def unkind_account() -> Iterator[Account]:
    """Run a simulated account in a process of its own inside, from its first answer on; the process is killed after.

    Raises:
        RunFailed: the process ends before it answers.
    """
    address, port = own_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.box.unkind", address, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={
            **os.environ,
            "MOTO_EC2_ENABLE_INSTANCE_TYPE_VALIDATION": "true",
            "MOTO_EC2_LOAD_DEFAULT_AMIS": "false",
        },
    )
    account = Account(url=f"http://{address}:{port}")
    try:
        while True:
            try:
                account.truth()
                break
            except OSError:
                if server.poll() is not None:
                    raise RunFailed("the unkind account does not answer.", hint="start it by hand") from None
                time.sleep(0.2)
        yield account
    finally:
        server.kill()
        server.wait()


def main(plan: str, first: str, step: str, end: str) -> None:
    """Simulate every ``step``-th story of a plan, and print a line of JSON for each.

    Raises:
        RunFailed: as of `unkind_account`.
    """
    catalog, recorded = load_catalog(REGION), Plan.load(Path(plan))
    os.environ |= CREDENTIALS
    with unkind_account() as account, tempfile.TemporaryDirectory(prefix="hetopt-stories-") as folder:
        os.environ["AWS_ENDPOINT_URL"] = account.url
        narrator = Narrator(
            account=account,
            folder=Path(folder),
            catalog=catalog,
            plan_of=lambda groups, budget_usd: plan_on(recorded, catalog, groups, budget_usd),
        )
        for seed in range(int(first), int(end), int(step)):
            story = narrator.tell(seed)
            print(json.dumps({**asdict(story), "timeline": story.timeline()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
