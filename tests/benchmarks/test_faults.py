"""Schedules of faults are what they say: each fault is over before the next, and a seed gives the same again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks._rehearsed_faults import HOSTS, STEPS, schedule
from hetopt.backends.emulation.description import parse_changes
from hetopt.backends.emulation.schedule import HostNow
from hetopt.core.scaled_emulation import EmulatedHost


@given(st.integers(0, 10**6))
def test_one_host_at_a_time_is_away_and_all_are_there_at_the_end(seed: int) -> None:
    assert schedule(seed) == schedule(seed)
    hosts = {name: HostNow.as_described(EmulatedHost(name=name)) for name in HOSTS}
    whole = dict(hosts)
    changes = parse_changes("\n".join(schedule(seed)), HOSTS)
    assert changes
    moments = [change.at_step for change in changes]
    assert moments == sorted(moments, key=lambda step: step or 0)
    for change in changes:
        assert change.at_step is not None
        assert 0 < change.at_step < STEPS - 20, "what comes back has steps left to do"
        hosts[change.host] = hosts[change.host].after(change)
        assert sum(hosts[name] != whole[name] for name in HOSTS) <= 1
    assert hosts == whole


def test_every_kind_of_fault_is_drawn() -> None:
    words = {line.split()[3].partition("=")[0] for seed in range(24) for line in schedule(seed)}
    assert words == {"dies", "returns", "cut", "heals", "speed", "notice"}
