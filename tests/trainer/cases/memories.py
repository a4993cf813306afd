"""Scripts that keep something of a batch for the loss of the next, of each worker's own samples or of all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from .scripts import Open, net, points, sgd, shuffled

Gather = Callable[[Tensor], Tensor]


def trained(open_: Open, model: nn.Module, compute: Callable[[Gather, list[Tensor]], Tensor], **how: Any) -> None:
    """A loop whose loss is computed by a function, which is given what puts rows of all workers together, or does not.

    Args:
        open_: a session.
        model: of the script.
        compute: the loss of a batch.
        how: ``gathers``, and ``data`` and ``batch`` where they are no common ones.
    """
    opt = sgd(model)
    with open_(model, opt) as run:
        for batch in run.loader(shuffled(how.get("data"), how.get("batch", 16))):
            opt.zero_grad()
            run.backward(compute(run.gather if how["gathers"] else lambda rows: rows, batch))
            opt.step()


def queue_of_keys(open_: Open, *, gathers: bool, joins: bool = False) -> None:
    """MoCo: negatives are keys of earlier batches (He et al. 2020)."""
    model = net()
    keys_of, queue, at = copy.deepcopy(model), functional.normalize(torch.randn(4, 32), dim=0), 0

    def compute(gather: Gather, batch: list[Tensor]) -> Tensor:
        nonlocal queue, at
        with torch.no_grad():
            keys = functional.normalize(keys_of(batch[0]), dim=1)
        asked = functional.normalize(model(0.9 * batch[0]), dim=1)
        logits = torch.cat([(asked * keys).sum(1, keepdim=True), asked @ queue.clone()], 1) / 0.2
        loss = functional.cross_entropy(logits, torch.zeros(len(keys), dtype=torch.long))
        new = gather(keys)
        if joins:
            queue = torch.cat([queue.T, new])[-32:].T
        else:
            queue[:, at : at + len(new)] = new.T
            at = (at + len(new)) % 32
        return loss

    trained(open_, model, compute, gathers=gathers)


def teachers_center(open_: Open, *, gathers: bool) -> None:
    """DINO: the teacher's outputs are centred by their running mean (Caron et al. 2021)."""
    model = net()
    teacher, center = copy.deepcopy(model), torch.zeros(1, 4)

    def compute(gather: Gather, batch: list[Tensor]) -> Tensor:
        nonlocal center
        with torch.no_grad():
            told = teacher(batch[0])
        goal = ((told - center) / 0.2).softmax(-1)
        loss = -(goal * model(0.9 * batch[0]).log_softmax(-1)).sum(-1).mean()
        center = 0.5 * center + 0.5 * gather(told).mean(0, keepdim=True)
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return loss

    trained(open_, model, compute, gathers=gathers)


class Codebook(nn.Module):
    """Vectors that move to what is nearest to them (van den Oord et al. 2017, appendix A.1)."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: Tensor
        self.counts: Tensor
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, z: Tensor, gather: Gather) -> Tensor:
        nearest = torch.cdist(z, self.codes).argmin(1)
        found = self.codes[nearest]
        with torch.no_grad():
            chosen, of = functional.one_hot(gather(nearest), 6).float(), gather(z.detach())
            self.counts.mul_(0.5).add_(chosen.sum(0), alpha=0.5)
            self.codes.lerp_(chosen.T @ of / self.counts[:, None], 0.5)
        return found


def codebook(open_: Open, *, gathers: bool) -> None:
    model, codes = net(), Codebook()

    def compute(gather: Gather, batch: list[Tensor]) -> Tensor:
        z = model(batch[0])
        return (z - codes(z, gather)).square().mean()

    trained(open_, model, compute, gathers=gathers)


def bank_of_samples(open_: Open, *, gathers: bool) -> None:
    """Temporal ensembling: each sample's goal is what was predicted of it (Laine & Aila 2017)."""
    model, bank = net(), torch.full((128, 4), 0.25)

    def compute(gather: Gather, batch: list[Tensor]) -> Tensor:
        x, labels, number = batch
        out = model(x)
        loss = functional.cross_entropy(out, labels) + (out.softmax(1) - bank[number]).square().sum(1).mean()
        bank[gather(number)] = gather(out.detach().softmax(1))
        return loss

    trained(open_, model, compute, gathers=gathers, data=TensorDataset(*points().tensors, torch.arange(128)))


# What stays exact.


def hidden_states(open_: Open) -> None:
    """Texts that go on in the next batch, each in its row (word_language_model)."""
    torch.manual_seed(0)
    texts = torch.randint(12, (8, 61))
    model = nn.ModuleDict({"words": nn.Embedding(12, 8), "reads": nn.LSTM(8, 16, batch_first=True)})
    model["tells"] = nn.Linear(16, 12)
    opt, state = sgd(model), None
    with open_(model, opt) as run:
        for first in range(0, 60, 10):
            mine = texts[run.split(8)]
            opt.zero_grad()
            out, state = model["reads"](model["words"](mine[:, first : first + 10]), state)
            state = tuple(one.detach() for one in state)
            told = model["tells"](out.reshape(-1, 16))
            run.backward(functional.cross_entropy(told, mine[:, first + 1 : first + 11].reshape(-1)))
            opt.step()


def changed_by_hand(open_: Open) -> None:
    """A step by gradients that nobody sums."""
    model = net()
    with open_(model, sgd(model)) as run:
        for x, labels in run.loader(shuffled()):
            by = torch.autograd.grad(functional.cross_entropy(model(x), labels), list(model.parameters()))
            with torch.no_grad():
                for one, its in zip(model.parameters(), by, strict=True):
                    one -= 0.1 * its


def stepped_by_hand(open_: Open) -> None:
    """A step by gradients of all workers, without an optimizer."""
    model = net()
    opt = sgd(model)
    with open_(model, opt) as run:
        for x, labels in run.loader(shuffled()):
            opt.zero_grad()
            run.backward(functional.cross_entropy(model(x), labels))
            with torch.no_grad():
                for one in model.parameters():
                    one -= 0.1 * one.grad
            opt.step()


def named(name: str, run: Callable[..., None], **options: Any) -> Callable[[Open], None]:
    """A script with options, under a name of its own."""
    script = partial(run, **options)
    script.__name__ = name  # type: ignore[attr-defined]  # a partial takes any
    return script


KEEP = (queue_of_keys, teachers_center, codebook, bank_of_samples)
"""What keeps something of its samples."""

REFUSED = (
    *(named(f"{one.__name__}_of_own", one, gathers=False) for one in KEEP[1:]),
    named("joined_queue_of_own", queue_of_keys, gathers=False, joins=True),
)

EXACT = (*(named(f"{one.__name__}_of_all", one, gathers=True) for one in KEEP), hidden_states, stepped_by_hand)
