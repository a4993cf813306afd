"""Scripts in which samples meet others of their batch: by gradients, by their order, or by plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler, default_collate

from .memories import Gather, named, trained
from .scripts import Open, loop, net, points, sgd, shuffled

Compute = Callable[[nn.Module, Gather, Tensor, Tensor], Tensor]


def runs(compute: Compute, open_: Open, **how: Any) -> None:
    """A common loop with such a loss."""
    model = net()
    trained(open_, model, lambda gather, batch: compute(model, gather, *batch), **how)


def inner_step(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """MAML, second order: the outer loss is of parameters that a step by the samples has moved (Finn et al. 2017)."""
    own = dict(model.named_parameters())
    of = functional.cross_entropy(model(gather(x)), gather(y))
    by = torch.autograd.grad(of, list(own.values()), create_graph=True)
    fast = {name: one - 0.5 * its for (name, one), its in zip(own.items(), by, strict=True)}
    return functional.cross_entropy(functional_call(model, fast, (x.flip(1),)), y)


def step_of_inputs(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """Inputs that go along the gradient of a mean, which is smaller the more samples there are."""
    x = x.detach().requires_grad_()
    (by,) = torch.autograd.grad(functional.cross_entropy(model(x), y), x)
    return functional.cross_entropy(model((x + 20.0 * by).detach()), y)


def mixed_with_others(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """mixup of a batch with itself the other way round (Zhang et al. 2018)."""
    out = model(0.7 * x + 0.3 * x.flip(0))
    return 0.7 * functional.cross_entropy(out, y) + 0.3 * functional.cross_entropy(out, y.flip(0))


def load_of_experts(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """A product of two means over the samples (Fedus et al. 2022)."""
    chances = model(x).softmax(1)
    load = functional.one_hot(chances.argmax(1), 4).float().mean(0)
    return functional.cross_entropy(model(x), y) + (load * chances.mean(0)).sum()


def weighed_by_counts(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """Class weights of the labels at hand, counted by NumPy."""
    counts = np.bincount(gather(y).numpy(), minlength=4)
    weight = torch.tensor(1.0 / np.maximum(counts, 1), dtype=torch.float32)
    return functional.cross_entropy(model(x), y, weight=weight)


def running_number(open_: Open, *, gathers: bool) -> None:
    """The same with a number that goes on from batch to batch."""
    model, mean = net(), 0.0

    def compute(gather: Gather, batch: list[Tensor]) -> Tensor:
        nonlocal mean
        reward = batch[0].square().sum(1)
        loss = -((reward - mean) * model(batch[0]).log_softmax(1)[:, 0]).mean()
        mean = 0.5 * mean + 0.5 * gather(reward).mean().item()
        return loss

    trained(open_, model, compute, gathers=gathers)


def coin_of_torch(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """Teacher forcing, or a layer that is left out: one coin for all samples."""
    return functional.cross_entropy(model(x.square() if torch.rand(1).item() < 0.5 else x), y)


class Buckets(Sampler[list[int]]):
    """Batches of samples of similar lengths. It does not say how many are in one, and the last has fewer."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return -(-len(self._lengths) // 16)

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(len(self._lengths)), key=lambda one: self._lengths[one])
        for number in torch.randperm(len(self)).tolist():
            yield order[16 * number : 16 * (number + 1)]


class Reads(nn.Module):
    """What it says of packed texts, by its last state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reader, self.head = nn.LSTM(5, 16), nn.Linear(16, 4)

    def forward(self, texts: PackedSequence) -> Tensor:
        said: Tensor = self.head(self.reader(texts)[1][0][-1])
        return said


def bucketed(open_: Open) -> None:
    """Packed sequences are a tuple of four, as many as one of the workers has samples."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randn(3 + one % 9, 5, generator=generator) for one in range(90)]

    def collate(own: list[int]) -> tuple[PackedSequence, Tensor]:
        return pack_sequence([texts[one] for one in own], enforce_sorted=False), torch.tensor(own) % 4

    model = Reads()
    opt = sgd(model)
    torch.manual_seed(1)
    loader = DataLoader(
        range(90),  # type: ignore[arg-type]  # a sequence is a data set
        batch_sampler=Buckets([len(one) for one in texts]),
        collate_fn=collate,
    )
    with open_(model, opt) as run:
        for packed, y in run.loader(loader):
            opt.zero_grad()
            run.backward(functional.cross_entropy(model(packed), y))
            opt.step()


def hardest_by_numpy(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """Online hard example mining whose samples are compared outside torch."""
    losses = gather(functional.cross_entropy(model(x), y, reduction="none"))
    hardest = np.argsort(-losses.detach().numpy())[: len(losses) // 2]
    return losses[torch.from_numpy(hardest.copy())].mean()


def partners_by_python(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """mixup sample by sample; the partner is the next one."""
    mixed = [0.7 * one + 0.3 * x[(at + 1) % len(x)] for at, one in enumerate(x)]
    return functional.cross_entropy(model(torch.stack(mixed)), y)


def boxes(open_: Open) -> None:
    """Detection: a list of images and one of their boxes, and of each image a mean over the boxes that it has."""

    def collate(samples: list[Any]) -> Any:
        return tuple(zip(*samples, strict=True))

    def item(seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        count = seed % 3 + 1
        labels = torch.randint(0, 4, (count,), generator=generator)
        return torch.randn(3, 3, generator=generator), {"labels": labels}

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 12), nn.Unflatten(1, (3, 4)))
    opt = sgd(model)
    data: Any = [item(seed) for seed in range(64)]
    with open_(model, opt) as run:
        for images, told in run.loader(DataLoader(data, batch_size=16, shuffle=True, collate_fn=collate)):
            out, terms = model(torch.stack(images)), []
            for at, one in enumerate(told):
                count = len(one["labels"])
                each = functional.cross_entropy(out[at, :count], one["labels"], reduction="sum") / count
                terms.append(each + 0.1 * out[at, :count].abs().mean())
            opt.zero_grad()
            run.backward(sum(terms, torch.zeros(())) / len(told))
            opt.step()


def mask_by_numpy(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """Self-paced learning: the easier half of what a worker has."""
    each = gather(functional.cross_entropy(model(x), y, reduction="none"))
    told = each.detach().numpy()
    return (each * torch.from_numpy((told < np.median(told)).astype(np.float32))).mean()


def differentiated_by_rows(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """A penalty on each sample's Jacobian, by `torch.func`."""
    own = dict(model.named_parameters())
    by = vmap(jacrev(lambda one: functional_call(model, own, (one,))))(x)
    return functional.cross_entropy(model(x), y) + 1e-2 * by.square().sum((1, 2)).mean()


def critic_with_penalty(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """WGAN-GP: two means of outputs, and one of a function of gradients by inputs (Gulrajani et al. 2017)."""
    critic = nn.Sequential(model, nn.LeakyReLU(0.2), nn.Linear(4, 1, bias=False))
    nn.init.ones_(critic[2].weight)
    between = (0.3 * x + 0.7 * x.tanh()).requires_grad_()
    (by,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return critic(x).mean() - critic(x.tanh()).mean() + 0.1 * ((by.norm(2, dim=1) - 1) ** 2).mean()


def nodes_of_a_graph(open_: Open) -> None:
    """A graph network computes all nodes, of which a batch has some in its loss."""
    model, data = net(), points()
    opt = sgd(model)
    nodes, classes = data.tensors
    near = (torch.cdist(nodes, nodes) < 2.0).float()
    near /= near.sum(1, keepdim=True)
    with open_(model, opt) as run:
        for (chosen,) in run.loader(shuffled(TensorDataset(torch.arange(100)), batch=24)):
            opt.zero_grad()
            run.backward(functional.cross_entropy((near @ model(near @ nodes))[chosen], classes[chosen]))
            opt.step()


def later(open_: Open, *, gathers: bool, first: int) -> None:
    """Inputs that are standardised by their batch, from one on."""
    model, number = net(), 0

    def compute(gather: Gather, batch: list[Tensor]) -> Tensor:
        nonlocal number
        x, number = batch[0], number + 1
        if number > first:
            x = (x - gather(x).mean(0)) / gather(x).std(0)
        return functional.cross_entropy(model(x), batch[1])

    trained(open_, model, compute, gathers=gathers, data=points(16 * (2 * first + 2)))


def drawn_by_losses(open_: Open) -> None:
    """A sampler that is told the losses of samples, each worker's of its own."""
    model = net()
    opt = sgd(model)
    sampler = WeightedRandomSampler([1.0] * 128, 128)
    data = TensorDataset(*points().tensors, torch.arange(128))
    with open_(model, opt) as run:
        torch.manual_seed(1)
        for x, y, at in run.loader(DataLoader(data, 16, sampler=sampler)):
            losses = functional.cross_entropy(model(x), y, reduction="none")
            opt.zero_grad()
            run.backward(losses.mean())
            opt.step()
            sampler.weights[at] = losses.detach().double()


def mixup(samples: list[Any]) -> list[Tensor]:
    """As torchvision's reference has it, with the neighbour."""
    x, y = default_collate(samples)
    goal = functional.one_hot(y, 4).float()
    return [0.7 * x + 0.3 * x.roll(1, 0), 0.7 * goal + 0.3 * goal.roll(1, 0)]


def noise(samples: list[Any]) -> list[Tensor]:
    """Drawn for each sample, and sorted by label."""
    x, y = default_collate(sorted(samples, key=lambda one: int(one[1])))
    return [x + 0.0 * torch.randn_like(x), y]


def collated(open_: Open, *, by: Callable[[list[Any]], list[Tensor]]) -> None:
    """Batches that a collate function has changed."""
    loop(open_, model := net(), sgd(model), shuffled(collate_fn=by))


@dataclass
class Texts:
    """A batch."""

    x: Tensor
    lengths: Tensor


class Reader(nn.Module):
    """Of sequences that are padded."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embed, self.states, self.out = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, batch: Texts) -> Tensor:
        x, lengths = batch.x, batch.lengths
        states, _ = self.states(self.embed(x))
        if self.how == "largest":
            return self.out(states.relu().amax(1))
        if self.how == "last":
            return self.out(states[torch.arange(len(x)), lengths - 1])
        if self.how == "each":
            return self.out(states)
        there = (x > 0).unsqueeze(2)
        return self.out((states * there).sum(1) / lengths.unsqueeze(1) if self.how == "masked" else states.mean(1))


def padded(open_: Open, *, how: str, to: int = 0) -> None:
    """Each share is padded to its longest sample, or all to one length."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(1, 20, (4 + n % 9,), generator=generator) for n in range(128)]

    def collate(samples: list[Tensor]) -> Texts:
        x = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        return Texts(functional.pad(x, (0, max(0, to - x.shape[1]))), torch.tensor([len(one) for one in samples]))

    model = Reader(how)
    opt = sgd(model)
    with open_(model, opt) as run:
        for batch in run.loader(shuffled(texts, collate_fn=collate)):
            opt.zero_grad()
            x, out = batch.x, model(batch)
            run.backward(
                functional.cross_entropy(out.flatten(0, 1), (x % 4).flatten().where(x.flatten() > 0, -100))
                if how == "each"
                else functional.cross_entropy(out, batch.lengths % 4)
            )
            opt.step()


def hooked(open_: Open, *, hook: Callable[[Tensor], Tensor | None], inside: bool = False) -> None:
    """Gradients that a hook sees on their way to parameters, or inside the model."""
    model = net()
    opt = sgd(model)
    if not inside:
        for one in model.parameters():
            one.register_hook(hook)
    with open_(model, opt) as run:
        for x, y in run.loader(shuffled()):
            opt.zero_grad()
            hidden = model[0](x)
            if inside:
                hidden.register_hook(hook)
            run.backward(functional.cross_entropy(model[1:](hidden), y))
            opt.step()


def clipped(gradient: Tensor) -> Tensor:
    """By value."""
    return gradient.clamp(-1e-3, 1e-3)


def scaled(gradient: Tensor) -> Tensor:
    """Half of it, and none of the first."""
    mask = torch.ones_like(gradient)
    mask[0] = 0
    return 0.5 * mask * gradient


def noise_on_gradients(open_: Open, *, seeds: bool) -> None:
    """As torch draws it, and as a generator of the script's own does."""
    model = net()
    opt = sgd(model)
    generator = torch.Generator().manual_seed(1) if seeds else None
    with open_(model, opt) as run:
        for x, y in run.loader(shuffled()):
            opt.zero_grad()
            run.backward(functional.cross_entropy(model(x), y))
            for one in model.parameters():
                assert one.grad is not None
                one.grad.add_(torch.randn(one.shape, generator=generator), alpha=0.01)
            opt.step()


def two_loaders_at_once(open_: Open) -> None:
    """FixMatch: batches of two loaders go through the model together, and it is split again (Sohn et al. 2020)."""
    model = net()
    opt = sgd(model)
    with open_(model, opt) as run:
        first = run.loader(shuffled(batch=8, drop_last=True))
        second = run.loader(shuffled(TensorDataset(points().tensors[0].flip(0)), batch=24, drop_last=True))
        for (x, y), (u,) in zip(first, second, strict=False):
            out = model(torch.cat([x, 0.98 * u, u + 0.1 * u.sin()]))
            weak, strong = out[len(x) :].chunk(2)
            likely, label = weak.detach().softmax(1).max(1)
            each = functional.cross_entropy(strong, label, reduction="none") * (likely > 0.3)
            opt.zero_grad()
            run.backward(functional.cross_entropy(out[: len(x)], y) + each.mean())
            opt.step()


def _named_by(compute: Compute, *, gathers: bool, **how: Any) -> Any:
    """A script of a loss, under its name."""
    whose = "of_all" if gathers else "of_own"
    return named(f"{compute.__name__}_{whose}", lambda open_: runs(compute, open_, gathers=gathers, **how))


REFUSED = (
    *(
        _named_by(one, gathers=False)
        for one in (
            inner_step, step_of_inputs, mixed_with_others, load_of_experts, hardest_by_numpy, partners_by_python,
            coin_of_torch, weighed_by_counts,
        )
    ),
    _named_by(mask_by_numpy, gathers=False, batch=64),
    named("clipped_by_hooks", hooked, hook=clipped),
    named("mixed_by_collate", collated, by=mixup),
    named("padding_in_mean", padded, how="mean"),
    named("noise_on_gradients", noise_on_gradients, seeds=False),
    named("running_number_of_own", running_number, gathers=False),
    named("drawn_by_losses", drawn_by_losses),
)  # fmt: skip

MUCH_LATER = (named("much_later_of_own", later, gathers=False, first=200),)

EXACT = (
    *(
        _named_by(one, gathers=True)
        for one in (
            inner_step, weighed_by_counts, hardest_by_numpy, critic_with_penalty,
            differentiated_by_rows, mask_by_numpy,
        )
    ),
    named("running_number_of_all", running_number, gathers=True),
    nodes_of_a_graph,
    named("drawn_by_collate", collated, by=noise),
    named("padding_not_in_masked", padded, how="masked"),
    bucketed,
    named("seeded_noise_on_gradients", noise_on_gradients, seeds=True),
    two_loaders_at_once,
)  # fmt: skip
