"""Averages of the parameters of workers that train for themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from hetopt.core.run_spec import Compression, Synchronization
from hetopt.trainer.steps.step import StepTrace
from hetopt.trainer.steps.stopwatch import Stopwatch
from hetopt.trainer.sync.synchroniser import ModelVector, Periodic, Synchronizer, outer_step

from .thread_group import ThreadGroup

WORKERS, SHARES = 3, (5, 2, 1)
CPU = torch.device("cpu")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


class Worker:
    """One of them: its model, which a test changes as it likes, and what brings it together with the others'."""

    def __init__(self, sync, compression, group, rank):
        self.model = model()
        self.vector = ModelVector(self.model)
        self.sync = Synchronizer(
            self.model,
            torch.optim.SGD(self.model.parameters(), lr=0.1),
            channel=lambda: group.channel(rank),
            stopwatch=Stopwatch(CPU),
            sync=sync,
            policy=Periodic(every_steps=sync.every_steps, workers=WORKERS),
            compression=Compression(name=compression),
        )
        self.random = torch.Generator().manual_seed(rank)

    def draw(self, *, ahead=False):
        """What it learns next; ``ahead``: it will draw the same once more."""
        generator = torch.Generator().set_state(self.random.get_state()) if ahead else self.random
        return torch.randn(self.vector.parameters, generator=generator)

    def learn(self, much):
        flat = self.vector.read()
        flat[: self.vector.parameters] += much * self.draw()
        self.vector.write(flat)


def crew(sync, compression="identity"):
    group = ThreadGroup(WORKERS)
    return [Worker(sync, compression, group, rank) for rank in range(WORKERS)]


def together(workers, act):
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(act, workers))


def step(workers, number, much):
    def one(worker):
        worker.learn(much)
        mark = Stopwatch(CPU).mark()
        trace = StepTrace(loss_sum=torch.zeros(()), start=mark, backward_end=mark, reduce_end=mark)
        return worker.sync.after(number, trace, SHARES)

    return together(workers, one)


def mean(workers):
    """Of all parameters, each worker's weighted by what it has seen."""
    parts = zip(workers, SHARES, strict=True)
    flats = [worker.vector.read()[: worker.vector.parameters].double() * share for worker, share in parts]
    return sum(flats) / sum(SHARES)


@settings(deadline=None)
@given(
    every=st.integers(1, 3),
    compression=st.sampled_from(["identity", "int8", "int4"]),
    learned=st.lists(st.sampled_from([0.0, 0.1, 1.0]), max_size=12),
)
def test_averages_change_no_mean_and_workers_that_stop_learning_become_one(every, compression, learned):
    """What an average gives to one worker it takes from the others; what rounding leaves is sent later."""
    workers = crew(Synchronization(name="local-sgd", every_steps=every), compression)
    number, expected = 0, mean(workers)
    for much in learned:
        expected += sum(
            share * much * worker.draw(ahead=True).double() for worker, share in zip(workers, SHARES, strict=True)
        ) / sum(SHARES)
        step(workers, number := number + 1, much)
        if compression == "identity":
            torch.testing.assert_close(mean(workers), expected, rtol=0, atol=1e-5)
    for _ in range(8 * every + 1):
        step(workers, number := number + 1, 0.0)
    flats = [worker.vector.read() for worker in workers]
    for flat in flats[1:]:
        torch.testing.assert_close(flat, flats[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(mean(workers), expected, rtol=0, atol=1e-4)


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


@given(seeds)
def test_a_rate_of_one_without_momentum_is_the_average(seed: int) -> None:
    steps = updates(seed, 4)
    assert torch.equal(run(steps, 1.0, 0.0), sum(steps, torch.zeros_like(steps[0])))


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
