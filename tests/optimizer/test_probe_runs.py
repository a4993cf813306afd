"""Probes are runs of layouts that grow, and their steps are read after the warm-up."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.emulation.description import parse_hosts
from hetopt.backends.prediction.hosting import ThisMachine
from hetopt.backends.probe_runs import WARM_UP_STEPS, counts, local_probes, read_sample, rehearsed_probes
from hetopt.core.errors import BadInput, RunFailed
from hetopt.optimizer.fit import fit
from tests.logs import an_event

from .profiles import make_profile

PROFILE = make_profile()
HERE = ThisMachine(processors=2, operating_system="Linux")


@given(st.integers(1, 100))
def test_layouts_grow_from_one_to_all(most: int) -> None:
    found = counts(most)
    assert (found[0], found[-1]) == (1, most)
    assert list(found) == sorted(set(found))
    assert all(after <= 2 * before for before, after in itertools.pairwise(found))


def test_local_workers_share_the_threads() -> None:
    probes = local_probes(PROFILE, 4)
    assert {len(probe.spec.workers) for probe in probes} == {1, 2, 3, 4}
    assert all(probe.configuration.workers == len(probe.spec.workers) for probe in probes)
    assert all(
        worker.threads == 1 for probe in probes for worker in probe.spec.workers if probe.configuration.workers > 1
    )
    with pytest.raises(BadInput):
        local_probes(PROFILE, 0)


def test_rehearsed_hosts_are_slowed_down_alike() -> None:
    described = parse_hosts("speed=1,rate=100mbit x3; speed=0.5,rate=50mbit,workers=2")
    probes = rehearsed_probes(fit(PROFILE), HERE, described)
    assert {len(probe.configuration.nodes) for probe in probes} == {1, 2, 3, 4}
    per_sample = {
        (worker.host, round(worker.declared.per_sample_s, 9))
        for probe in probes
        for worker in probe.spec.workers
        if worker.declared is not None
    }
    assert len({host for host, _ in per_sample}) == len(per_sample), (
        "one time a sample for each host, whatever the layout"
    )
    types = {node.type for probe in probes for node in probe.configuration.nodes}
    assert len(types) == 2
    for probe in probes:
        assert probe.spec.miniature is not None
        sizes = tuple(worker.local_batch_size for worker in probe.spec.workers)
        assert probe.configuration.batch_sizes == sizes


def test_a_sample_is_the_median_after_the_warm_up() -> None:
    probe = local_probes(PROFILE, 2)[-1]
    events = [
        an_event("step", step=step, step_time_s=time_s, compute_s=[0.1, 0.2])
        for step, time_s in ((WARM_UP_STEPS, 9.0), (15, 0.3), (20, 0.31), (25, 0.9))
    ]
    sample = read_sample(probe, [an_event("training_started"), *events])
    assert sample.step_time_s == 0.31
    assert sample.sync_time_s == pytest.approx(0.11)
    with pytest.raises(RunFailed, match="before it had measured"):
        read_sample(probe, events[:1])
