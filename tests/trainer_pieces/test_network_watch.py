"""What the watch of a network tells of waits that are not the network's."""

from __future__ import annotations

import pytest

from hetopt.core.comm.cost import TRAINER, LinkSpeed, Operation, dense, gathered
from hetopt.trainer.comm.network_tracker import LEAST_EXPOSED, NetworkWatch, Timed, measured

WORKERS = 4
LINK = LinkSpeed(latency_s=0.0005, bytes_per_s=5e6)
SUM, GATHER = dense(400_000, WORKERS), gathered(1_000, WORKERS)


def timed(primitive, size):
    operation = Operation(primitive=primitive, payload_bytes=size, members=WORKERS)
    return Timed(operation=operation, time_s=LINK.time_s(operation.terms(TRAINER)))


def fresh():
    network = measured([timed(p, size) for p in ("all_reduce", "all_gather") for size in (256, 65_536, 1 << 20)])
    return NetworkWatch(network=network, workers=WORKERS, gradient_bytes=1 << 20)


def after(watch, operations, time_s, *, period_s=10.0):
    return watch.after(
        operations, time_s, exchanges=5, probe_bytes=0, probe_s=None, period_s=period_s, exposed_s=period_s
    )


def measured_again(watch):
    return watch.measured([timed("all_reduce", size) for size in (256, 65_536)])


def alone_s(operations):
    return sum(LINK.time_s(operation.terms(TRAINER)) for operation in operations)


def crowded(watch, wait_s):
    """Sums take so much longer, until the network is measured and found to be as it was."""
    for _ in range(3):
        watch = after(watch, SUM, alone_s(SUM) + wait_s)
    return measured_again(watch)


def test_what_sums_wait_for_is_expected_of_all():
    watch = crowded(fresh(), 0.3)
    assert watch.beside_s == pytest.approx(0.3, rel=0.1)


def test_an_exchange_that_is_over_sooner_refutes_it():
    """Sums alone are slow beside training: no wait of all, which only they would have told of."""
    watch = after(crowded(fresh(), 0.3), GATHER, alone_s(GATHER))
    assert watch.beside_s == pytest.approx(0, abs=0.01)


def test_one_that_was_over_sooner_before_does_so_too():
    watch = crowded(after(fresh(), GATHER, alone_s(GATHER) + 0.01), 0.3)
    assert watch.beside_s <= alone_s(GATHER) + 0.01


def test_a_network_that_has_become_quicker_is_measured_as_soon_as_that_is_cheap():
    """The last measurement took long on slow links; of the next one sums take a fortieth of that, and pauses what they
    took."""
    watch = measured_again(fresh())
    sooner = 0
    while watch.network.jumps == watch.measured_jumps or not watch.wants_measurement:
        watch = after(watch, SUM, alone_s(SUM) / 40, period_s=watch.cost_s / 2)
        sooner += 1
        assert sooner <= 30, "thirty times what it took would be sixty periods"
    slower = measured_again(fresh())
    for _ in range(10):
        slower = after(slower, SUM, 40 * alone_s(SUM), period_s=slower.cost_s / 2)
    assert slower.network.jumps > slower.measured_jumps
    assert not slower.wants_measurement


@pytest.mark.parametrize(("factor", "jumps"), [(10, 0), (1, 0), (1 / 10, 1)])
def test_what_is_not_a_sum_tells_that_the_network_is_quicker_and_never_that_it_is_slower(factor, jumps):
    """What takes longer may be the collective's own affair."""
    watch = fresh()
    for _ in range(5):
        watch = after(watch, GATHER, alone_s(GATHER))
    for _ in range(2):
        watch = after(watch, GATHER, factor * alone_s(GATHER))
    assert watch.network.jumps == jumps


def test_hidden_exchanges_are_looked_after_for_a_part_of_what_steps_wait_for():
    """Neither probed nor measured by the clock: were the network slower, the steps would wait for it."""

    def looks(hidden):
        watch, probes, count = measured_again(fresh()), 0, 0
        while not watch.wants_measurement:
            size = watch.probe_bytes(SUM)
            probes, count = probes + (size > 0), count + 1
            probe_s = alone_s(dense(size, WORKERS)) if size else None
            watch = watch.after(
                SUM,
                None,
                exchanges=5,
                probe_bytes=size,
                probe_s=probe_s,
                period_s=watch.cost_s,
                exposed_s=0.0,
                hidden=hidden,
            )
        return count, probes / count

    (often, probed), (rarely, seldom_probed) = looks(False), looks(True)
    assert rarely == pytest.approx(often / LEAST_EXPOSED, rel=0.02)
    assert seldom_probed < probed / 2
