"""Training scripts of many kinds, each as somebody would write it around a session."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

Open = Callable[..., Any]
"""`hetopt.trainer.session.session`, or what stands in its place when the script runs without it."""


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def workers() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def points(samples: int = 128) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 8, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def shuffled(data: Any = None, batch: int = 16, **options: Any) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(points() if data is None else data, batch_size=batch, shuffle=True, **options)


def loop(
    open_: Open,
    model: nn.Module,
    opt: Any,
    loader: Any = None,
    *,
    epochs: int = 1,
    before: Callable[[int], str] = lambda number: "",
    **options: Any,
) -> None:
    """A common loop; `before` a batch of a number something is done, and the batch may be skipped, or the loop left."""
    with open_(model, opt, **options) as run:
        batches = run.loader(shuffled() if loader is None else loader)
        for _ in range(epochs):
            for number, (x, y) in enumerate(batches):
                opt.zero_grad()
                word = before(number)
                if word == "leave":
                    break
                if word == "skip":
                    continue
                run.backward(cross_entropy(model(x), y))
                opt.step()


# What trains as on one machine.


def usual(open_: Open) -> None:
    loop(open_, model := net(), sgd(model), shuffled(points(101)), epochs=2)


class Mixed(nn.Module):
    """Parameters of three kinds, complex ones among them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4).double()
        self.waves = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.fft.ifft(torch.fft.fft(self.first(x)) * self.waves).real
        return self.last(turned.double())


def mixed_kinds(open_: Open) -> None:
    loop(open_, model := Mixed(), torch.optim.SGD(model.parameters(), lr=0.05))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.out = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rows(x).mean(1))


def words() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    draw = lambda high, *size: torch.randint(0, high, size, generator=generator)  # noqa: E731
    return TensorDataset(draw(50, 101, 3), draw(4, 101))


def sparse_adam(open_: Open) -> None:
    """It takes sparse gradients only, and moves the rows that have one."""
    model = Bag()
    opts = torch.optim.SparseAdam(model.rows.parameters(), lr=0.01), torch.optim.Adam(model.out.parameters())
    with open_(model, opts) as run:
        for x, y in run.loader(shuffled(words())):
            for opt in opts:
                opt.zero_grad()
            run.backward(cross_entropy(model(x), y))
            for opt in opts:
                opt.step()


def accumulate_rest(open_: Open) -> None:
    """Ten batches in windows of four: the last of an epoch has two."""
    model = net()
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    loader = shuffled(points(157))
    with open_(model, opt, accumulate=4) as run:
        batches = run.loader(loader)
        for _ in range(2):
            for number, (x, y) in enumerate(batches):
                run.backward(scaler.scale(cross_entropy(model(x), y) / 4))
                if (number + 1) % 4 == 0 or number + 1 == len(batches):
                    scaler.unscale_(opt)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                    scaler.step(opt)
                    scaler.update()
                    opt.zero_grad()


def prefetch(open_: Open) -> None:
    """The next batch is asked for before the one at hand is computed; the last has other proportions."""
    model = net()
    opt = sgd(model)
    with open_(model, opt) as run:
        loader = run.loader(shuffled(points(101)))
        for _ in range(2):
            batches = iter(loader)
            coming = next(batches)
            while coming is not None:
                (x, y), coming = coming, next(batches, None)
                opt.zero_grad()
                run.backward(cross_entropy(model(x), y))
                opt.step()


def unfreeze(open_: Open) -> None:
    model = net()
    opt = sgd(model)
    model[0].requires_grad_(False)
    with open_(model, opt) as run:
        loader = run.loader(shuffled())
        for epoch in range(2):
            model[0].requires_grad_(epoch == 1)
            for x, y in loader:
                opt.zero_grad()
                run.backward(cross_entropy(model(x), y))
                opt.step()


def used_now_and_then(open_: Open) -> None:
    """Adam moves a parameter without a gradient in another way than one whose gradient is zero."""
    model = nn.ModuleList([net(0), net(1)])
    opt = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    with open_(model, opt) as run:
        for number, (x, y) in enumerate(run.loader(shuffled())):
            opt.zero_grad()
            run.backward(cross_entropy(model[number % 2](x), y))
            opt.step()


def networks() -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator."""
    torch.manual_seed(0)
    return nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def adversarial(open_: Open, sessions: int = 1, *, freezes: bool = False, clips: bool = True) -> None:
    """The generator's loss reaches the discriminator, too, whose gradients of it are dropped, or never made."""
    maker, judge = networks()
    by_maker, by_judge = sgd(maker, 0.01), torch.optim.Adam(judge.parameters(), lr=0.01)
    bce = nn.functional.binary_cross_entropy_with_logits

    def train(first: Any, second: Any) -> None:
        loader = first.loader(shuffled(points(101)))
        for _ in range(2):
            for x, _ in loader:
                ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
                judge.requires_grad_(True)
                by_judge.zero_grad()
                made = maker(x[:, :4])
                first.backward(bce(judge(x), ones) + bce(judge(made.detach()), zeros))
                by_judge.step()
                judge.requires_grad_(not freezes)
                by_maker.zero_grad()
                loss = bce(judge(made), ones)
                loss.backward() if second is None else second.backward(loss)
                nn.utils.clip_grad_norm_(maker.parameters(), 0.1) if clips else None
                by_maker.step()

    if sessions == 1:
        with open_((maker, judge), (by_maker, by_judge)) as run:
            train(run, run)
        return
    with open_(judge, by_judge) as first:
        if sessions == 0:
            train(first, None)
            return
        with open_(maker, by_maker) as second:
            train(first, second)


def adversarial_frozen(open_: Open) -> None:
    adversarial(open_, freezes=True)


def adversarial_two_sessions(open_: Open) -> None:
    adversarial(open_, 2)


def adversarial_in_no_session(open_: Open) -> None:
    adversarial(open_, 0)


def actor_critic(open_: Open) -> None:
    """Both losses before both steps, on a trunk that one of them owns; gradients are clipped together."""
    torch.manual_seed(0)
    trunk, actor, critic = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 1)
    opts = torch.optim.Adam([*trunk.parameters(), *actor.parameters()], lr=0.01), sgd(critic)
    with open_((trunk, actor, critic), opts) as run:
        for number, (x, y) in enumerate(run.loader(shuffled(points(101)))):
            hidden = trunk(x).tanh()
            value = critic(hidden.detach() if number % 2 else hidden)[:, 0]
            run.backward((value - y.float()).square().mean(), retain_graph=True)
            run.backward(cross_entropy(actor(hidden), y))
            nn.utils.clip_grad_norm_([*trunk.parameters(), *actor.parameters(), *critic.parameters()], 0.1)
            for opt in opts:
                opt.step()
                opt.zero_grad()


def loaded_on_one(open_: Open) -> None:
    """Only rank 0 finds the checkpoint: the others take its optimizer's state too."""
    model = net()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    if rank() == 0:
        for x, y in DataLoader(points(), batch_size=32):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            opt.step()
    loop(open_, model, opt)


def recomputed(open_: Open) -> None:
    """Parameters of which backward makes the gradient in two parts, one after the other."""
    torch.manual_seed(0)
    twice, last = nn.Linear(8, 8), nn.Linear(8, 4)
    model = nn.Sequential(last, twice)
    opt = sgd(model)
    with open_(model, opt) as run:
        for x, y in run.loader(shuffled()):
            opt.zero_grad()
            once = checkpoint(twice, x.requires_grad_(), use_reentrant=True)
            run.backward(cross_entropy(last(checkpoint(twice, once.tanh(), use_reentrant=True)), y))
            opt.step()


def changed_by_a_hook(open_: Open) -> None:
    """Gradients that the script changes as soon as they are made, or puts others in their place."""
    model = net()
    opt = sgd(model)

    def thrice(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(3)

    def other(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = 2 * parameter.grad

    with open_(model, opt) as run:
        model[0].weight.register_post_accumulate_grad_hook(thrice)
        model[2].bias.register_post_accumulate_grad_hook(other)
        for x, y in run.loader(shuffled()):
            opt.zero_grad()
            run.backward(cross_entropy(model(x), y))
            opt.step()


def closure(
    open_: Open,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    dtype: torch.dtype = torch.float64,
    *,
    parts: int = 1,
    **options: Any,
) -> None:
    """A step calls a function of the script for the loss and its gradient; that may come in parts of the batch."""
    x, y = points().tensors
    model = net().to(dtype)
    opt = optimizer(model.parameters(), **{"lr": 0.1, **options})
    whole = DataLoader(TensorDataset(x.to(dtype), y), batch_size=128)
    with open_(model, opt, accumulate=parts) as run:
        loader = run.loader(whole)
        for _ in range(4):
            for x, y in loader:

                def compute(x: Tensor = x, y: Tensor = y) -> Tensor:
                    opt.zero_grad()
                    total = x.new_zeros(())
                    for _ in range(parts):
                        loss = cross_entropy(model(x), y) / parts
                        run.backward(loss)
                        total = total + loss.detach()
                    return total

                opt.step(compute)


def lbfgs_double(open_: Open) -> None:
    closure(open_, torch.optim.LBFGS, max_iter=5, line_search_fn="strong_wolfe")


class Sharper(torch.optim.Optimizer):
    """Two gradients a step (SAM), away from here and back, in two calls: the second steps by the optimizer inside."""

    def __init__(self, params: Any, base: torch.optim.Optimizer) -> None:
        self.base_optimizer = base
        super().__init__(params, {})
        self.param_groups = base.param_groups
        self.moves: list[Tensor] = []

    @torch.no_grad()
    def first_step(self) -> None:
        self.moves = [0.01 * one.grad for one in self.param_groups[0]["params"]]
        for parameter, move in zip(self.param_groups[0]["params"], self.moves, strict=True):
            parameter.add_(move)

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter, move in zip(self.param_groups[0]["params"], self.moves, strict=True):
            parameter.sub_(move)
        self.base_optimizer.step()


def sharpness_in_two_calls(open_: Open, *, by_itself: bool = False) -> None:
    model = net()
    opt = Sharper(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.1))
    with open_(model, opt) as run:
        for x, y in run.loader(shuffled()):
            for step in (opt.first_step, opt.second_step):
                opt.zero_grad()
                loss = cross_entropy(model(x), y)
                loss.backward() if by_itself else run.backward(loss)
                step()


def sharpness_by_itself(open_: Open) -> None:
    sharpness_in_two_calls(open_, by_itself=True)


def gradient_penalty(open_: Open) -> None:
    """Of a discriminator's derivative by its samples (WGAN-GP); the generator learns at every other batch."""
    maker, judge = networks()
    opts = torch.optim.Adam(maker.parameters(), lr=0.01), sgd(judge, 0.01)
    with open_((maker, judge), opts) as run:
        for number, (x, _) in enumerate(run.loader(shuffled(points(101)))):
            opts[1].zero_grad()
            made = maker(x[:, :4])
            between = (0.3 * x + 0.7 * made.detach()).requires_grad_()
            (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            run.backward(judge(made.detach()).mean() - judge(x).mean() + 10 * penalty)
            opts[1].step()
            if number % 2:
                opts[0].zero_grad()
                run.backward(-judge(made).mean(), inputs=list(maker.parameters()))
                opts[0].step()


def narrow(open_: Open, dtype: torch.dtype = torch.bfloat16) -> None:
    """Autocast with a GradScaler, as recipes have it."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=dtype == torch.float16)
    with open_(model, opt) as run:
        for x, y in run.loader(shuffled(points(101))):
            opt.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = cross_entropy(model(x), y)
            run.backward(scaler.scale(loss))
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()


def narrow_and_scaled(open_: Open) -> None:
    narrow(open_, torch.float16)


class Shuffling(IterableDataset[Any]):
    """Shuffles by Python's random numbers, which no worker may draw otherwise than the others."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(101))
        random.shuffle(order)
        data = points(101)
        return (data[index] for index in order)


def shuffling_stream(open_: Open) -> None:
    random.seed(3)
    model = net()
    opt = sgd(model)
    with open_(model, opt, accumulate=4) as run:
        loader = run.loader(DataLoader(Shuffling(), batch_size=16))
        for _ in range(2):
            for number, (x, y) in enumerate(loader):
                run.backward(cross_entropy(model(x), y) / 4)
                if number % 4 == 3 or number == 6:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                    opt.step()
                    opt.zero_grad()


def pairs(a: Tensor, b: Tensor) -> Tensor:
    """A contrastive loss over all pairs of a batch."""
    a, b = nn.functional.normalize(a), nn.functional.normalize(b)
    return cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def contrastive(open_: Open) -> None:
    """With a temperature that is learned, clipped; the last batch has five samples."""
    model = net()
    scale = nn.Parameter(torch.tensor(1.0))
    opt = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    with open_(model, opt) as run:
        for x, _ in run.loader(shuffled(points(101))):
            opt.zero_grad()
            run.backward(pairs(run.gather(model(x)) * scale, run.gather(model(x.flip(1)))))
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()


def counted_items(open_: Open) -> None:
    """A sum over what a window of batches has many of, divided by their number (`num_items_in_batch`)."""
    model = net()
    opt = sgd(model)
    with open_(model, opt, accumulate=4) as run:
        batches = iter(run.loader(shuffled(points(101))))
        while window := [batch for batch in (next(batches, None) for _ in range(4)) if batch is not None]:
            items = run.total(sum(int((y != 3).sum()) for _, y in window))
            for x, y in window:
                run.backward(cross_entropy(model(x), y, ignore_index=3, reduction="sum") / items, weight="sum")
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            opt.step()
            opt.zero_grad()


def normalised(dims: int = 1, **options: Any) -> nn.Sequential:
    """A network with BatchNorm over samples, or over samples and places."""
    torch.manual_seed(0)
    if dims == 1:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, **options), nn.Tanh(), nn.Linear(16, 4))
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 6, 2, padding=1),
        nn.BatchNorm2d(6, **options),
        nn.ReLU(),
        nn.Conv2d(6, 4, 2),
        nn.BatchNorm2d(4, affine=False),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def batch_statistics(open_: Open, model: nn.Module | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The whole recipe: BatchNorm, clipping, OneCycle, accumulation, an average of weights; what the layers know."""
    model = normalised() if model is None else model
    opt = sgd(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-1, total_steps=16)
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, n: 0.9 * old + 0.1 * new)
    with open_(model, opt, accumulate=2, batch_norm="synchronized") as run:
        loader = run.loader(shuffled(points(109)))
        for _ in range(2):
            for number, (x, y) in enumerate(loader):
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    loss = cross_entropy(model(x), y) / 2
                run.backward(loss)
                if number % 2 or number + 1 == len(loader):
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    opt.step()
                    schedule.step()
                    opt.zero_grad()
                    average.update_parameters(model)
            model.eval()
            model(points().tensors[0])  # every worker by itself
            model.train()
    return torch.cat([one.flatten().double() for one in (*model.buffers(), *average.parameters())])


def batch_statistics_counted(open_: Open) -> Tensor:
    """Beside losses of which workers count unequally, and of which one has none."""
    model = normalised()
    opt = sgd(model)
    with open_(model, opt, batch_norm="synchronized") as run:
        for x, y in run.loader(shuffled(points(101))):
            opt.zero_grad()
            run.backward(cross_entropy(model(x), y, ignore_index=3))
            opt.step()
    return torch.cat([one.flatten().double() for one in model.buffers()])


def drawn_batches(open_: Open) -> list[float]:
    """A loop of a language model without a DataLoader: the next batch is drawn ahead, and some to evaluate."""
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = points(101).tensors
    torch.manual_seed(4)
    evaluated = []
    with open_(model, opt, accumulate=2) as run:

        def get_batch() -> tuple[Tensor, Tensor]:
            rows = run.split(torch.randint(len(x), (16,)))
            return x[rows], y[rows]

        inputs, labels = get_batch()
        for step in range(6):
            if step % 3 == 0:
                with torch.no_grad():
                    inputs_seen, labels_seen = get_batch()
                    evaluated.append(float(cross_entropy(model(inputs_seen), labels_seen)))
            for _ in range(2):
                loss = cross_entropy(model(inputs), labels) / 2
                inputs, labels = get_batch()
                run.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
    return evaluated


class Deep(nn.Module):
    """Leaves layers out, all samples of a batch the same ones (stochastic depth)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.relu(block(x)) if random.random() < 0.6 else x
        return self.last(x)


class OrderByPython(BatchSampler):
    """Shuffles by the generator that the loop draws from as well."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(96))
        random.shuffle(order)
        return (order[at : at + 16] for at in range(0, 96, 16))


def drawn_for_the_batch(open_: Open, readers: int = 0) -> None:
    """A depth, and the weight of a term, for all samples of a batch; the second epoch's order behind them."""
    random.seed(3), np.random.seed(3)
    model = Deep()
    opt = sgd(model)
    loader = DataLoader(
        points(96), batch_sampler=OrderByPython(range(96), batch_size=16, drop_last=False), num_workers=readers
    )
    with open_(model, opt) as run:
        for x, y in chain.from_iterable([loader := run.loader(loader), loader]):
            opt.zero_grad()
            weight = float(np.random.beta(0.5, 0.5))
            out = model(x)
            run.backward(weight * cross_entropy(out, y) + (1 - weight) * out.square().mean())
            opt.step()


EXACT = (
    usual,
    drawn_for_the_batch,
    mixed_kinds,
    sparse_adam,
    gradient_penalty,
    accumulate_rest,
    prefetch,
    unfreeze,
    used_now_and_then,
    adversarial,
    adversarial_frozen,
    actor_critic,
    loaded_on_one,
    recomputed,
    changed_by_a_hook,
    lbfgs_double,
    sharpness_in_two_calls,
    shuffling_stream,
    contrastive,
    counted_items,
    batch_statistics,
    batch_statistics_counted,
    drawn_batches,
)


NARROW = (narrow, narrow_and_scaled)
"""Of which every worker rounds its part of a gradient to eight or eleven bits."""


# What is refused, or stops all workers with a sentence.


def wrapped_in_ddp(open_: Open) -> None:
    model = nn.parallel.DistributedDataParallel(net()) if workers() > 1 else net()
    loop(open_, model, sgd(model))


def distributed_sampler(open_: Open) -> None:
    data = points()
    sampler = DistributedSampler(data) if workers() > 1 else None
    loop(open_, model := net(), sgd(model), DataLoader(data, batch_size=16, sampler=sampler))


def loader_of_its_own(open_: Open) -> None:
    class Doubling(DataLoader[Any]):
        def __iter__(self) -> Any:
            return ((2 * x, y) for x, y in super().__iter__())

    loop(open_, model := net(), sgd(model), Doubling(points(), batch_size=16))


def group_of_one(open_: Open) -> None:
    if workers() > 1:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    loop(open_, model := net(), sgd(model))


def half(open_: Open) -> None:
    loop(open_, model := net().bfloat16(), sgd(model))


def lazy(open_: Open) -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with open_(model, opt):
        return


def shared_by_two(open_: Open) -> None:
    model = net()
    with open_(model, (sgd(model), sgd(model[2]))):
        return


def fourth_on_one(number: int) -> bool:
    """Whether it is the fourth batch of worker 1."""
    return number == 3 and rank() == 1


def skip_on_one(open_: Open) -> None:
    loop(open_, model := net(), sgd(model), before=lambda number: "skip" if fourth_on_one(number) else "")


def leave_on_one(open_: Open) -> None:
    loop(open_, model := net(), sgd(model), before=lambda number: "leave" if fourth_on_one(number) else "")


def failing(number: int) -> str:
    if fourth_on_one(number):
        raise ValueError("a bad sample")
    return ""


def fail_on_one(open_: Open) -> None:
    loop(open_, model := net(), sgd(model), before=failing)


def fail_before_a_layer(open_: Open) -> None:
    """The others wait in a layer that normalises by the whole batch."""
    loop(open_, model := normalised(), sgd(model), before=failing, batch_norm="synchronized")


def mean_on_one(open_: Open) -> None:
    model = net()
    opt = sgd(model)
    with open_(model, opt) as run:
        for x, y in run.loader(shuffled()):
            opt.zero_grad()
            loss = cross_entropy(model(x), y)
            run.backward(loss)
            opt.step()
            if rank() == 0:
                run.mean(loss.detach())


def rate_on_one(open_: Open) -> None:
    opt = sgd(model := net())

    def slower(number: int) -> str:
        opt.param_groups[0]["lr"] = 0.05 if number >= 3 and rank() == 1 else 0.1
        return ""

    loop(open_, model, opt, before=slower)


def unfreeze_on_one(open_: Open) -> None:
    model = net()

    def frozen(number: int) -> str:
        model[0].weight.requires_grad_(number < 3 or rank() == 0)
        return ""

    loop(open_, model, sgd(model), before=frozen)


def drift(open_: Open) -> None:
    """One worker changes what its optimizer remembers, behind the optimizer's back."""
    opt = sgd(model := net())

    def changed(number: int) -> str:
        if number == 5 and rank() == 1:
            opt.state[model[2].bias]["momentum_buffer"].add_(1e-3)
        return ""

    loop(open_, model, opt, epochs=6, before=changed)


def stream_by_rank(open_: Open) -> None:
    class Own(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            data = points()
            return (data[index] for index in range(rank(), len(data), workers()))

    loop(open_, model := net(), sgd(model), DataLoader(Own(), batch_size=16))


def coupled_later(open_: Open) -> None:
    """The second loss of every other batch depends on all its samples."""
    model = net()
    opt = sgd(model)
    with open_(model, opt) as run:
        for number, (x, y) in enumerate(run.loader(shuffled())):
            opt.zero_grad()
            run.backward(cross_entropy(model(x), y))
            if number % 2:
                found = model(x)
                run.backward(cross_entropy(found @ found.T, torch.arange(len(x))))
            opt.step()


def gathered_in_one(open_: Open) -> None:
    """Two views are put together before they are gathered."""
    model = net()
    opt = sgd(model)
    with open_(model, opt) as run:
        for x, _ in run.loader(shuffled()):
            found = run.gather(model(torch.cat([x, x.flip(1)])))
            run.backward((found @ found.T).logsumexp(1).mean())


def gathered_and_added(open_: Open) -> None:
    model = net()
    opt = sgd(model)
    with open_(model, opt) as run:
        for x, _ in run.loader(shuffled()):
            run.backward(pairs(run.gather(model(x)), run.gather(x[:, :4])), weight="sum")


def gathered_behind(open_: Open) -> None:
    """A backward pass of the script's own."""
    model = net()
    opt = sgd(model)
    with open_(model, opt) as run:
        for x, _ in run.loader(shuffled()):
            pairs(run.gather(model(x)), run.gather(x[:, :4])).backward()


def split_by_rank(open_: Open) -> None:
    model = net()
    with open_(model, sgd(model)) as run:
        run.split(101 - 30 * rank())


def own_indices(open_: Open) -> None:
    """Every worker takes its rows of a batch that it has drawn itself."""
    x, y = points().tensors
    model = net()
    opt = sgd(model)
    torch.manual_seed(3)
    with open_(model, opt) as run:
        for _ in range(6):
            rows = torch.randint(len(x), (16,))[run.split(16)]
            opt.zero_grad()
            run.backward(cross_entropy(model(x[rows]), y[rows]))
            opt.step()


def clip_before_sum(open_: Open) -> None:
    model = net()
    opt = sgd(model)
    with open_(model, opt) as run:
        for x, y in run.loader(shuffled()):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
    del run


def clip_in_window(open_: Open) -> None:
    model = net()
    opt = sgd(model)
    with open_(model, opt, accumulate=4) as run:
        for number, (x, y) in enumerate(run.loader(shuffled())):
            run.backward(cross_entropy(model(x), y) / 2)
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                opt.step()
                opt.zero_grad()


REFUSED = (
    wrapped_in_ddp,
    distributed_sampler,
    loader_of_its_own,
    group_of_one,
    half,
    lazy,
    shared_by_two,
    skip_on_one,
    leave_on_one,
    fail_on_one,
    fail_before_a_layer,
    mean_on_one,
    rate_on_one,
    unfreeze_on_one,
    drift,
    stream_by_rank,
    coupled_later,
    gathered_in_one,
    gathered_and_added,
    gathered_behind,
    own_indices,
    split_by_rank,
    sharpness_by_itself,
    clip_before_sum,
    adversarial_two_sessions,
    adversarial_in_no_session,
    clip_in_window,
)
"""Ended with a sentence, or other than one machine."""


# Random numbers where data are drawn.


class Drawing(Dataset[Any]):
    """Every sample comes with numbers from the three generators."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))], dtype=torch.float64)
        return points(64)[index][0], drawn


def drawn(open_: Open, **options: Any) -> Tensor:
    """What a worker's samples drew."""
    random.seed(0), np.random.seed(0)
    model = net()
    found = []
    torch.manual_seed(1)
    with open_(model, sgd(model)) as run:
        for x, numbers in run.loader(DataLoader(Drawing(), batch_size=16, **options)):
            found.append(numbers)
            run.backward(model(x).square().mean())
    return torch.cat(found)
