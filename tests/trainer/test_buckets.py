"""Buckets leave in one order while backward still makes the rest, and nothing that a model does changes their sum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hetopt.core.comm import cost
from hetopt.core.errors import RunFailed
from hetopt.core.run_spec import Compression
from hetopt.trainer.comm.exchange import DenseBuckets, Exchange
from hetopt.trainer.comm.peers import Guard
from hetopt.trainer.data.cursor import MicroBatch
from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.session.gradients import GradientSum
from hetopt.trainer.steps.adaptive_controller import ExchangeConfig
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.steps.step import DoesNotFit, FusedStep, LossModule, parts_of
from hetopt.trainer.steps.stopwatch import FORWARD, Slowdown, Stopwatch

CPU = torch.device("cpu")
PARTS = [MicroBatch(epoch=0, indices=range(4)), MicroBatch(epoch=0, indices=range(4, 8))]


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process alone, with a bucket for each layer."""
    monkeypatch.setattr(cost, "FIRST_BUCKET_BYTES", 4 * 9)
    monkeypatch.setattr(cost, "BUCKET_BYTES", 4 * 9)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Stack(nn.Module):
    """Three layers, the last of which may be left out, repeated in backward, or run out of memory there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.fails = ""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.first(inputs).tanh()).tanh()
        if self.fails == "forward":
            _run_out(hidden)
        if self.fails == "backward":
            hidden.register_hook(_run_out)
        if self.kind == "unused":
            return hidden.sum(1)
        if self.kind == "repeated":
            again = checkpoint(self.third, hidden, use_reentrant=True)
            hidden = checkpoint(self.third, again, use_reentrant=True)
        return self.third(hidden).sum(1)


def _run_out(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


class Steps(Slowdown):
    """A step in buckets, which notes how far computation was when a bucket left."""

    waits = True

    def __init__(self, kind: str = "plain", passes: int = 1) -> None:
        self.model = Stack(kind)
        self.parts = PARTS[:passes]
        self.reached: list[float] = []
        generator = torch.Generator().manual_seed(1)
        pairs = TensorPairs(torch.randn(8, 8, generator=generator), torch.randn(8, generator=generator))

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        self.step = FusedStep(
            module=LossModule(self.model, loss, "fp32"),
            reader=BatchReader(dataset=pairs, device=CPU, seed=0),
            in_buckets=DenseBuckets(Guard("dense")),
            stopwatch=Stopwatch(),
            pace=self,
        )

    def reach(self, done: float) -> None:
        self.reached.append(done)

    def run(self) -> Tensor:
        """Take a step; the gradient."""
        self.reached = []
        self.step.run(self.parts, 8, None)
        return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()]).clone()


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "unused"])
def test_what_is_sent_under_backward_is_what_is_sent_after_it(kind: str, passes: int) -> None:
    steps = Steps(kind, passes)
    afterwards = steps.run()
    assert steps.reached == [1.0], "whether a first micro-batch fits is known when all of it is computed"
    steps.run()
    assert torch.equal(steps.run(), afterwards)
    shares = [part.done for part in parts_of(list(steps.model.parameters()))]
    assert len(shares) == 3
    paced = [FORWARD + (1 - FORWARD) * share for share in shares[:-1]]
    assert steps.reached == ([*paced, 1.0] if kind == "plain" else [1.0]), "parts leave in one order"


def test_a_gradient_that_changes_after_it_was_sent_ends_the_run() -> None:
    steps = Steps("repeated")
    steps.run()
    steps.run()
    with pytest.raises(RunFailed, match="made twice in one backward pass"):
        steps.run()


@pytest.mark.parametrize(
    ("fails", "passes", "refusal"),
    [("forward", 1, DoesNotFit), ("backward", 2, DoesNotFit), ("backward", 1, RunFailed)],
)
def test_memory_that_runs_out_ends_the_run_only_once_a_part_was_sent(
    fails: str, passes: int, refusal: type[RunFailed]
) -> None:
    """Of two passes the first sends nothing. What was sent in part cannot be left out: the others wait for the rest."""
    steps = Steps(passes=passes)
    expected = [steps.run() for _ in range(3)][-1]
    steps.model.fails = fails
    with pytest.raises(RunFailed) as refused:
        steps.run()
    assert type(refused.value) is refusal
    steps.model.fails = ""
    if refusal is DoesNotFit:
        assert torch.equal(steps.run(), expected)
        return
    with pytest.raises(RunFailed, match="a backward pass failed while its gradient was being sent"):
        steps.run()


def dense(shapes: Sequence[tuple[int, ...]]) -> ExchangeConfig:
    numel = sum(math.prod(shape) for shape in shapes)
    return ExchangeConfig(compression=Compression(), dense_bytes=4 * numel, exchange=Exchange(Compression(), numel))


@pytest.mark.parametrize("kind", ["plain", "unused", "repeated"])
def test_a_script_s_gradient_is_weighed_when_its_first_part_is_made_and_sent_under_backward(kind: str) -> None:
    """The weight is known once the others are at the same point; what changes once it was sent is summed anew."""
    model, inputs = Stack(kind), torch.randn(4, 8)
    model(inputs).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    sums = GradientSum(list(model.named_parameters()), dense, world_size=1, overlaps=True)
    model.zero_grad()
    sums.begin()
    asked: list[bool] = []

    def weigh() -> float:
        asked.append(model.first.weight.grad is not None)
        return 0.25

    sums.expect(weigh, lambda done: None)
    model(inputs).sum().backward()
    assert asked == ([] if kind == "unused" else [False, False, True])
    sums.sum(0.25, None)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is gradient is None or torch.equal(parameter.grad, 0.25 * gradient)
