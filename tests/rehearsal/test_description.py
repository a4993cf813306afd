"""What people may write about a rehearsed cluster, what it means, and how it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetopt.api.run import log_files
from hetopt.backends.emulation.conductor import FitWatch, HostNow, split, still_to_come
from hetopt.backends.emulation.namespaces import MOST_HOSTS, host_address
from hetopt.backends.emulation.plan import (
    parse_change,
    parse_changes,
    parse_hosts,
)
from hetopt.core.errors import BadInput
from hetopt.core.events.records import LogEvent
from hetopt.core.run_folder import write_spec
from hetopt.core.run_spec import Change, EmulatedHost, Node, RunSpec, StopRule, WorkerSpec, first_rank
from hetopt.core.run_status import RunState, exit_code, judge
from hetopt.trainer.host.agent import torchrun_arguments
from tests.logs import an_event

HOSTS = ("h0", "h1", "h2", "h3")


def test_a_description_names_its_hosts_in_order() -> None:
    described = parse_hosts("speed=1,rate=100mbit x2; speed=0.25, rate=25mbit, workers=2 x1;")
    assert list(described) == [
        EmulatedHost(name="h0", speed=1, rate_bits_per_s=100e6),
        EmulatedHost(name="h1", speed=1, rate_bits_per_s=100e6),
        EmulatedHost(name="h2", speed=0.25, rate_bits_per_s=25e6, workers=2),
    ]


def test_twelve_hosts_keep_their_order_by_name_and_by_address() -> None:
    hosts = parse_hosts("; ".join(f"speed={n + 1}" for n in range(12)))
    assert [host.name for host in hosts] == [f"h{n}" for n in range(12)]
    addresses = [host_address(place) for place in range(MOST_HOSTS)]
    assert sorted(addresses) == addresses  # torchrun ranks nodes by their addresses as text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the description names no host."),
        (" ; ", "the description names no host."),
        ("x2", "host 'x2' has a value too many: 'x2'."),
        ("speed=0", "host 'speed=0': speed must be greater than 0, got '0'."),
        ("speed=-1 x2", "host 'speed=-1': speed must be greater than 0, got '-1'."),
        ("speed=fast", "host 'speed=fast': speed must be a number, got 'fast'."),
        ("speed=nan", "host 'speed=nan': speed must be a number, got 'nan'."),
        ("speed=1e999", "host 'speed=1e999': speed must be a number, got '1e999'."),
        ("speed=1,speed=2", "host 'speed=1,speed=2' says twice what speed is."),
        ("sped=1", "There is no option of host 'sped=1' called 'sped'."),
        ("rate=0mbit", "host 'rate=0mbit': rate must be greater than 0, got '0mbit'."),
        ("rate=-5mbit", "host 'rate=-5mbit': rate must be greater than 0, got '-5mbit'."),
        ("rate=5mbps", "host 'rate=5mbps': rate must be a link rate, got '5mbps'."),
        ("rate=mbit", "host 'rate=mbit': rate must be a link rate, got 'mbit'."),
        ("rate=1..5mbit", "host 'rate=1..5mbit': rate must be a link rate, got '1..5mbit'."),
        ("rate=1e300gbit", "host 'rate=1e300gbit': rate must be at most 1000gbit, got '1e300gbit'."),
        ("workers=0", "host 'workers=0': workers must be greater than 0, got '0'."),
        ("workers=1.5", "host 'workers=1.5': workers must be a valid integer, got '1.5'."),
        ("speed=1 x0", "'speed=1 x0' asks for no host at all."),
        ("speed=1 x99999999", "a rehearsal must have at most 154 hosts, got 99999999."),
        ("speed=1 x100; speed=2 x55", "a rehearsal must have at most 154 hosts, got 155."),
    ],
)
def test_a_bad_description_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_hosts(text)
    assert refused.value.message == sentence
    assert refused.value.hint


def test_a_schedule_says_when_who_and_what() -> None:
    changes = parse_changes(
        """
        # drift, congestion, failure
        30s h2 speed=0.25 rate=10mbit
        step 500 * rate=10mbit     # everybody
        1.5m h1 speed=2,rate=1gbit
        step 40 h3 dies
        """,
        HOSTS,
    )
    assert changes == (
        Change(host="h2", at_s=30, speed=0.25, rate_bits_per_s=1e7),
        Change(host="*", at_step=500, rate_bits_per_s=1e7),
        Change(host="h1", at_s=90, speed=2, rate_bits_per_s=1e9),
        Change(host="h3", at_step=40, dies=True),
    )
    assert parse_change("h2 speed=0.25", HOSTS) == Change(host="h2", speed=0.25)
    assert parse_change(" * dies ", HOSTS) == Change(host="*", dies=True)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("h2 speed=1", "line 2 ('h2 speed=1') does not say when."),
        ("30s", "line 2 ('30s') names no host."),
        ("30s h2", "line 2 ('30s h2') does not say what happens to h2."),
        ("30s h9 dies", "line 2 ('30s h9 dies') names the host 'h9'; there is h0, h1, h2, h3."),
        ("30s h2 dead", "There is no change in line 2 ('30s h2 dead') called 'dead'."),
        ("30s h2 speed=0", "line 2 ('30s h2 speed=0'): speed must be greater than 0, got '0'."),
        ("30s h2 rate=much", "line 2 ('30s h2 rate=much'): rate must be a link rate, got 'much'."),
        ("30s h2 workers=2", "There is no option of line 2 ('30s h2 workers=2') called 'workers'."),
        ("30s h2 speed=1 speed=2", "line 2 ('30s h2 speed=1 speed=2') says twice what speed is."),
        ("-3s h2 dies", "line 2 ('-3s h2 dies'): at must be greater than or equal to 0, got '-3s'."),
        ("30 h2 dies", "line 2 ('30 h2 dies'): at must be a length of time, got '30'."),
        ("step h2 dies", "line 2 ('step h2 dies'): step must be a whole number, got 'h2'."),
        ("step 1.5 h2 dies", "line 2 ('step 1.5 h2 dies'): step must be a whole number, got '1.5'."),
    ],
)
def test_a_bad_line_of_a_schedule_is_named(line: str, sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_changes(f"1s h1 dies\n{line}\n", HOSTS)
    assert refused.value.message == sentence
    assert refused.value.hint


# What happens to the hosts of a rehearsal and when, and how far a miniature is slowed down.

HOST = HostNow(name="h1", speed=2, rate_bits_per_s=1e8)

changes = st.builds(
    lambda host, when, speed: Change(host=host, speed=speed, **when),
    st.sampled_from(["h0", "h1", "*"]),
    st.one_of(
        st.just({}),
        st.floats(0, 100).map(lambda at_s: {"at_s": at_s}),
        st.integers(0, 100).map(lambda at_step: {"at_step": at_step}),
    ),
    st.floats(0.1, 10),
)


def test_nothing_that_has_a_moment_is_due_before_training_begins() -> None:
    at_once, at_start, at_step = (
        Change(host="*", speed=1),
        Change(host="*", at_s=0, speed=1),
        Change(host="*", at_step=0, speed=1),
    )
    assert split([at_once, at_start, at_step], None, 0) == ([at_once], [at_start, at_step])
    assert split([at_once, at_start, at_step], 0.0, 0)[1] == []


@given(st.lists(changes), st.lists(st.tuples(st.floats(0, 50), st.integers(0, 50)), min_size=1))
def test_every_change_is_due_once_and_in_time(scheduled: list[Change], walk: list[tuple[float, int]]) -> None:
    pending, done, now_s, step = scheduled, [], 0.0, 0
    for more_s, more_steps in [*walk, (100, 100)]:
        now_s, step = now_s + more_s, step + more_steps
        due, pending = split(pending, now_s, step)
        assert all((change.at_s or 0) <= now_s and (change.at_step or 0) <= step for change in due)
        done += due
    assert pending == []
    assert sorted(map(repr, done)) == sorted(map(repr, scheduled))


DEAD = HOST.after(Change(host="h1", dies=True))
CUT = HOST.after(Change(host="h1", cut=True))


@pytest.mark.parametrize(
    ("host", "change", "after"),
    [
        (HOST, Change(host="h2", speed=9), HOST),
        (HOST, Change(host="*", speed=9), HOST.model_copy(update={"speed": 9})),
        (HOST, Change(host="h1", rate_bits_per_s=5), HOST.model_copy(update={"rate_bits_per_s": 5})),
        (HOST, Change(host="h1", dies=True), HOST.model_copy(update={"alive": False})),
        (DEAD, Change(host="h1", speed=9), DEAD),
        (CUT, Change(host="h1", speed=9), CUT.model_copy(update={"speed": 9})),
        (CUT, Change(host="h1", heals=True), HOST),
        (CUT, Change(host="h1", dies=True), DEAD),
        (HOST, Change(host="h1", heals=True), HOST),
    ],
)
def test_a_change_touches_what_it_names_and_leaves_the_rest(host: HostNow, change: Change, after: HostNow) -> None:
    assert host.after(change) == after


def test_a_resumed_run_does_not_lose_the_same_host_again() -> None:
    death, drift = Change(host="h1", at_step=40, dies=True), Change(host="h1", at_step=20, speed=1)
    everybody = Change(host="*", at_step=90, dies=True)
    assert still_to_come([drift, death, everybody], []) == [drift, death, everybody]
    assert still_to_come([drift, death], [an_event("condition_changed", host="h1", dies=True)]) == [drift]
    assert still_to_come([drift, death], [an_event("condition_changed", host="h1", dies=False)]) == [drift, death]


def step(end_s: float, *use: float) -> LogEvent:
    return an_event("step", time_s=end_s, steps=10, step_time_s=0.1, pace_use=list(use))


def test_what_does_not_fit_slows_the_miniature_once() -> None:
    watch = FitWatch()
    assert [watch.look(step(10.0 + n, 0.9, 0.5), 10.0 + n) for n in range(5)] == [None] * 5
    # One slow period is no reason.
    assert watch.look(step(15, 0.9, 7.0), 15) is None
    assert watch.look(step(16, 0.9, 0.5), 16) is None
    assert watch.look(step(17, 0.9, 1.5), 17) == 1
    assert watch.slowdown == 1.8  # 1.5 x 1.15, rounded up
    # A period that began before it was slowed says nothing any more.
    assert [watch.look(step(17.5 + n / 10, 0.9, 1.5), 17.5 + n / 10) for n in range(4)] == [None] * 4
    assert [watch.look(step(19.0 + n, 0.9, 1.1), 19.0 + n) for n in range(3)] == [None, None, 1]
    assert watch.slowdown == 2.3


def test_runs_without_declared_times_are_never_slowed() -> None:
    watch = FitWatch()
    assert [watch.look(an_event("step", time_s=1e9, pace_use=use), 0) for use in (None, [], None)] == [None] * 3
    assert watch.look(an_event("evaluated", time_s=5.0), 0) is None
    assert watch.slowdown == 1


@pytest.mark.parametrize("last", ["condition_changed", "miniature_slowed"])
@pytest.mark.parametrize(
    ("names", "alive", "expected"),
    [
        (["run_started"], True, RunState.STARTING),
        (["run_started", "training_started"], True, RunState.RUNNING),
        (["run_started", "training_started", "training_finished"], False, RunState.FINISHED),
        (["run_started", "run_failed"], False, RunState.FAILED),
    ],
)
def test_what_happens_to_the_hosts_says_nothing_about_how_the_run_is(
    names: list[str], alive: bool, expected: RunState, last: str
) -> None:
    events = [an_event(name, reason="steps") for name in names] + [an_event(last)]
    assert judge(events, alive=alive, stop_wished=False, last_line=None).state == expected


@pytest.mark.parametrize(
    ("codes", "host_died", "expected"),
    [
        ([0, 0], False, 0),
        ([6, 2, 0], False, 2),
        ([143, 6], False, 6),
        ([-9, 0], False, 6),
        ([1, 0], False, 6),
        ([0, 2, -9], True, 6),
    ],
)
def test_the_most_specific_exit_code_is_the_runs(codes: list[int], host_died: bool, expected: int) -> None:
    assert exit_code(codes, host_died=host_died) == expected


# How hosts find each other, and which worker a file of output belongs to.

TWELVE = [f"h{n}" for n in range(12)]
SPEC = RunSpec(
    task="toy",
    workers=tuple(
        WorkerSpec(host=host, type="toy", local_batch_size=1, device="cpu")
        for n, host in enumerate(TWELVE)
        for _ in range(1 + n % 2)
    ),
    stop=StopRule(max_steps=1),
)


def node(place: int) -> Node:
    return Node(host=TWELVE[place], address=host_address(place), meeting=f"{host_address(0)}:29400")


def test_twelve_hosts_meet_at_the_first_and_start_their_own_workers(tmp_path: Path) -> None:
    """Under one torchrun, or each under its own where workers agree among themselves who takes part."""
    script = SPEC.model_copy(update={"script": ("train.py",)})
    for spec, hosts in ((script, 12), (SPEC, 1)):
        lines = [torchrun_arguments(spec, tmp_path, node(place)) for place in range(12)]
        assert all(f"--nnodes={hosts}" in line for line in lines)
        assert [f"--nproc-per-node={1 + n % 2}" in line for n, line in enumerate(lines)] == [True] * 12
    assert [first_rank(SPEC, host) for host in TWELVE] == [0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16]


def test_output_is_labelled_by_rank_in_the_run(tmp_path: Path) -> None:
    write_spec(tmp_path, SPEC)
    for relative in (
        "conductor.log",
        "h0/host.log",
        "h0/run_a/attempt_0/0/stderr.log",
        "h3/run_b/attempt_0/0/stderr.log",
        "h3/run_b/attempt_0/1/stderr.log",
        "h3/run_b/attempt_1/1/stdout.log",
        "h3/run_c/attempt_0/1/stderr.log",
        "h3/run_d/attempt_0/1/stderr.log",
        "h3/run_e/attempt_0/1/stderr.log",
    ):
        path = tmp_path / "log" / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a line\n")
    labels = {label: path.relative_to(tmp_path / "log").as_posix() for label, path in log_files(tmp_path).items()}
    assert labels == {
        "conductor": "conductor.log",
        "host h0": "h0/host.log",
        "worker 0": "h0/run_a/attempt_0/0/stderr.log",
        "worker 4": "h3/run_b/attempt_0/0/stderr.log",
        "worker 5": "h3/run_b/attempt_0/1/stderr.log",
        "worker 5 restart 1": "h3/run_b/attempt_1/1/stdout.log",
        "worker 5 stderr": "h3/run_c/attempt_0/1/stderr.log",
        "worker 5 stderr 2": "h3/run_d/attempt_0/1/stderr.log",
        "worker 5 stderr 3": "h3/run_e/attempt_0/1/stderr.log",
    }
    assert set(log_files(tmp_path, 5)) == set(labels) - {"conductor", "host h0", "worker 0", "worker 4"}
