"""Averages of the parameters of workers that train for themselves."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from hetopt.core.run_spec import Compression, Synchronization
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.sync.synchroniser import (
    ModelVector,
    Periodic,
    Synchronizer,
    outer_step,
    progress_of,
    sketched,
)

from .thread_group import ThreadGroup

WORKERS, SHARES = 3, (5, 2, 1)
CPU = torch.device("cpu")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


class Worker:
    """One of them: its model, which a test changes as it likes, and what brings it together with the others'."""

    def __init__(self, sync, compression, group, rank, is_chosen):
        self.model = model()
        self.vector = ModelVector(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sync = Synchronizer(
            self.model,
            self.optimizer,
            is_chosen=is_chosen,
            channel=lambda: group.channel(rank),
            stopwatch=Stopwatch(CPU),
            sync=sync,
            policy=Periodic(every_steps=sync.every_steps, workers=WORKERS),
            compression=Compression(name=compression),
        )
        self.rank, self.is_chosen, self.random = rank, is_chosen, torch.Generator().manual_seed(rank)
        for parameter in self.model.parameters():
            self.optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, rank)}

    def draw(self, *, ahead=False):
        """What it learns next; ``ahead``: it will draw the same once more."""
        generator = torch.Generator().set_state(self.random.get_state()) if ahead else self.random
        return torch.randn(self.vector.parameters, generator=generator)

    def learn(self, much):
        flat = self.vector.read()
        flat[: self.vector.parameters] += much * self.draw()
        flat[self.vector.parameters :] += 0.1 * self.rank * self.is_chosen
        self.vector.write(flat)


def crew(sync, compression="identity", *, is_chosen=False):
    group = ThreadGroup(WORKERS)
    return [Worker(sync, compression, group, rank, is_chosen) for rank in range(WORKERS)]


def together(workers, act):
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(act, workers))


def step(workers, number, much):
    def one(worker):
        weight = SHARES[worker.rank] / sum(SHARES)
        drifted = worker.sync.look(lambda: worker.draw(ahead=True))
        if worker.is_chosen:
            worker.sync.begin(weight, 3)
        worker.learn(much)
        if drifted is not None:
            worker.sync.looked(drifted, drifted.clone(), weight)
        mark = Stopwatch(CPU).mark()
        trace = StepTrace(loss_sum=torch.zeros(()), start=mark, backward_end=mark, reduce_end=mark)
        return worker.sync.after(number, trace, SHARES)

    return together(workers, one)


def mean(workers):
    """Of all parameters, each worker's weighted by what it has seen."""
    parts = zip(workers, SHARES, strict=True)
    flats = [worker.vector.read()[: worker.vector.parameters].double() * share for worker, share in parts]
    return sum(flats) / sum(SHARES)


def test_all_are_judged_by_the_same_bits_and_train_on_as_they_were():
    workers = crew(Synchronization(name="local-sgd", every_steps=4), "int8")
    for number in range(1, 8):
        step(workers, number, 1.0)
    before = [worker.vector.read() for worker in workers]

    def look(worker):
        with worker.sync.averaged(), worker.sync.averaged():
            return worker.vector.read()

    judged = together(workers, look)
    assert torch.equal(judged[0], judged[1])
    assert torch.equal(judged[0], judged[2])
    torch.testing.assert_close(judged[0][: workers[0].vector.parameters].double(), mean(workers), rtol=0, atol=0.1)
    for worker, flat in zip(workers, before, strict=True):
        assert torch.equal(worker.vector.read(), flat)


# --- Averages that begin and end while a run goes on


def taken_over(workers):
    """Others that go on from what these have saved."""
    fresh = crew(Synchronization(name="local-sgd", every_steps=3), "int8", is_chosen=True)
    for old, new in zip(workers, fresh, strict=True):
        new.sync.resume(copy.deepcopy(old.sync.state()))
        new.random.set_state(old.random.get_state())
    return fresh


def trained(steps, *, stops_after=None):
    """Workers after so many local steps; after ``stops_after`` of them others went on."""
    workers = crew(Synchronization(name="local-sgd", every_steps=3), "int8", is_chosen=True)
    for number in range(1, steps + 1):
        step(workers, number, 1.0)
        workers = taken_over(workers) if number == stops_after else workers
    return workers


def bits(worker):
    """Everything of a worker that a step on summed gradients goes by."""
    momenta = [state["momentum_buffer"].reshape(-1) for state in worker.optimizer.state.values()]
    return torch.cat([worker.vector.read(), *momenta])


@settings(deadline=None, max_examples=20)
@given(steps=st.integers(1, 10), stops_after=st.integers(1, 10))
def test_what_ends_leaves_all_with_the_same_bits_also_where_it_was_resumed(steps, stops_after):
    workers = trained(steps)
    expected = mean(workers) + sum(worker.sync._rounded.residual.kept()["residual"] for worker in workers).double()
    together(workers, lambda worker: worker.sync.end())
    resumed = trained(steps, stops_after=stops_after)
    together(resumed, lambda worker: worker.sync.end())
    for worker in (*workers, *resumed):
        assert torch.equal(bits(worker), bits(workers[0]))
        assert worker.sync.state() == {}
    torch.testing.assert_close(mean(workers), expected, rtol=0, atol=1e-5)
    together(workers, lambda worker: worker.sync.begin(1 / WORKERS, 3))
    together(workers, lambda worker: worker.sync.end())
    torch.testing.assert_close(bits(workers[0]), bits(resumed[0]), rtol=0, atol=1e-6)  # sent, and owed no longer


@pytest.mark.parametrize("turned", [0.0, 0.1, 0.5])
def test_progress_is_that_part_of_the_signal_that_is_left_whatever_the_noise(turned):
    """Nine tenths of the energy of a worker's gradient are noise, which changes where it has come, too."""
    generator = torch.Generator().manual_seed(1)
    signal, *noises = torch.randn(9, 50_000, generator=generator)
    pairs = [
        torch.stack([signal + 3 * noise, (1 - turned) * signal + 3 * noise + other]) / 4
        for noise, other in zip(noises[:4], noises[4:], strict=True)
    ]
    summed, own = sum(map(sketched, pairs)), sum(pair @ pair[0] for pair in pairs)
    assert progress_of([*(summed @ summed[0]).tolist(), *own.tolist()]) == pytest.approx(1 - turned, abs=0.06)


# --- Averaged updates as steps of an optimizer of their own: DiLoCo's, of which plain averages are one case


ELEMENTS = 12

rates = st.floats(0.05, 2.0)
momenta = st.floats(0.0, 0.95)
seeds = st.integers(0, 2**20)


def updates(seed: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ELEMENTS, generator=generator) for _ in range(count)]


def run(steps: list[Tensor], rate: float, momentum: float) -> Tensor:
    """The sum of all outer steps."""
    velocity, found = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for update in steps:
        own = update.clone()
        outer_step(own, velocity, rate=rate, momentum=momentum)
        found += own
    return found


@given(seeds, rates, momenta)
def test_it_steps_as_nesterovs_momentum_of_torch(seed: int, rate: float, momentum: float) -> None:
    steps = updates(seed, 5)
    parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
    optimizer = torch.optim.SGD([parameter], lr=rate, momentum=momentum, nesterov=momentum > 0)
    for update in steps:
        parameter.grad = -update
        optimizer.step()
    torch.testing.assert_close(run(steps, rate, momentum), parameter.detach(), rtol=1e-4, atol=1e-5)


def test_running_statistics_are_averaged_as_they_are() -> None:
    workers = crew(Synchronization(name="local-sgd", every_steps=1, outer_rate=0.5, outer_momentum=0.9))
    for rank, worker in enumerate(workers):
        worker.model[1].running_mean.fill_(rank)
    step(workers, 1, 1.0)
    means = torch.stack([worker.model[1].running_mean for worker in workers])
    torch.testing.assert_close(means, torch.full((WORKERS, 5), 4 / sum(SHARES)))
