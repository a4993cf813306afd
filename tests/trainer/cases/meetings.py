"""Scripts in which samples meet others of their batch: by gradients, by their order, or by plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from .memories import Gather, named, trained
from .scripts import Open, net, sgd, shuffled

Compute = Callable[[nn.Module, Gather, Tensor, Tensor], Tensor]


def runs(compute: Compute, open_: Open, *, gathers: bool) -> None:
    """A common loop with such a loss."""
    model = net()
    trained(open_, model, lambda gather, batch: compute(model, gather, *batch), gathers=gathers)


def inner_step(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """MAML, second order: the outer loss is of parameters that a step by the samples has moved (Finn et al. 2017)."""
    own = dict(model.named_parameters())
    of = functional.cross_entropy(model(gather(x)), gather(y))
    by = torch.autograd.grad(of, list(own.values()), create_graph=True)
    fast = {name: one - 0.5 * its for (name, one), its in zip(own.items(), by, strict=True)}
    return functional.cross_entropy(functional_call(model, fast, (x.flip(1),)), y)


def inner_step_of_functions(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """The same, first order, as `torch.func` has it."""

    def of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, parameters, (x,)), y)

    own = {name: one.detach() for name, one in model.named_parameters()}
    by = grad(of)(own, gather(x), gather(y))
    return of({name: one - 0.5 * by[name] for name, one in model.named_parameters()}, x.flip(1), y)


def step_of_inputs(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """Inputs that go along the gradient of a mean, which is smaller the more samples there are."""
    x = x.detach().requires_grad_()
    (by,) = torch.autograd.grad(functional.cross_entropy(model(x), y), x)
    return functional.cross_entropy(model((x + 20.0 * by).detach()), y)


def mixed_with_others(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """mixup of a batch with itself the other way round (Zhang et al. 2018)."""
    out = model(0.7 * x + 0.3 * x.flip(0))
    return 0.7 * functional.cross_entropy(out, y) + 0.3 * functional.cross_entropy(out, y.flip(0))


def pasted_of_others(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """CutMix with the neighbour (Yun et al. 2019)."""
    pasted = x.clone()
    pasted[:, 2:5] = x.roll(1, 0)[:, 2:5]
    return functional.cross_entropy(model(pasted), y)


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


def less_a_number(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """Rewards less their mean, which is a Python number by then."""
    reward = x.square().sum(1)
    mean = gather(reward).mean().item()
    return -((reward - mean) * model(x).log_softmax(1)[:, 0]).mean()


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


def sorted_by_length(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """Sequences that are sorted for packing, and back."""
    recurrent = nn.LSTM(1, 4, batch_first=True)
    with torch.no_grad():
        for number, one in enumerate(recurrent.parameters()):
            one.fill_(0.1 * (number + 1))
    lengths, order = (1 + y).sort(descending=True)
    packed = pack_padded_sequence(x[order][..., None], lengths, batch_first=True)
    _, (last, _) = recurrent(packed)
    return functional.cross_entropy(model(x) + last[0][order.argsort()], y)


def shuffled_again(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """Samples and labels in another order, and a place for each label."""
    order = torch.arange(len(x) - 1, -1, -1)
    x, y = x[order], y[order]
    return -model(x).log_softmax(1)[torch.arange(len(y)), y].mean()


def terms_for_each(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """A loss that adds a term for each box, as many as its samples have, and is divided by how many."""
    out, boxes = model(x), max(1, int(y.sum()))
    total = functional.cross_entropy(out, y, reduction="sum")
    for row, count in zip(out, y.tolist(), strict=True):
        for number in range(count):
            total = total + functional.smooth_l1_loss(row[number : number + 1], torch.ones(1), reduction="sum")
    return total / boxes


def means_over_dimensions(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """A mean over all values, one over the samples, and a sum that is divided by them (VAE)."""
    out = model(x)
    apart = torch.mean(-0.5 * torch.sum(1 - out.square(), dim=1), dim=0)
    return functional.mse_loss(out, x[:, :4]) + 0.1 * apart + functional.cross_entropy(out, y, reduction="sum") / len(x)


def numbers_alike(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """Constants, a table of which only a part is used, and a number that was drawn."""
    table = torch.tensor([0.1, 0.2, 0.3, 0.4])
    at = 0.1 if bool((y == 0).any()) else 0.0
    drawn = float(np.random.rand()) * 0.0
    return functional.cross_entropy(model(0.9 * x) + table + at * 0.0 + drawn, y, label_smoothing=0.1)


def numbers_of_rows(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """A number for each sample, by a table, and one for all of them, however many those are (labels of a GAN)."""
    table = {0: 1.0, 1: 0.5, 2: 0.25, 3: 0.125}
    weight, real = torch.tensor([table[int(one)] for one in y]), torch.full((len(x),), 0.9)
    out = model(x)
    of_each = (weight * functional.cross_entropy(out, y, reduction="none")).mean()
    return of_each + functional.binary_cross_entropy_with_logits(out[:, 0], real)


def drawn_in_place(model: nn.Module, gather: Gather, x: Tensor, y: Tensor) -> Tensor:
    """What was made as samples are, and has one number for all."""
    return functional.cross_entropy(model(x * (x.new_empty(len(x), 1).fill_(0.8) / 0.8)), y)


def gradient_by_own(open_: Open, *, number: bool) -> None:
    """What all workers have summed is changed by a statistic of this one's samples."""
    model = net()
    opt = sgd(model)
    with open_(model, opt) as run:
        for x, y in run.loader(shuffled()):
            opt.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            run.backward(loss)
            for one in model.parameters():
                if number:
                    one.grad.mul_(loss.item())  # type: ignore[union-attr]
                else:
                    one.grad.mul_(loss.detach())  # type: ignore[union-attr]
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


def looked_at(gradient: Tensor) -> None:
    """For a log."""
    float(gradient.norm())


def _named_by(compute: Compute, *, gathers: bool) -> Any:
    """A script of a loss, under its name."""
    whose = "of_all" if gathers else "of_own"
    return named(f"{compute.__name__}_{whose}", lambda open_: runs(compute, open_, gathers=gathers))


STATISTIC = ("statistic over the samples (a mean, a gradient)", "meetings.py, line", "run.gather(rows)")
NUMBER = ("meet a number at", "meetings.py, line", "another one on each worker", "run.mean(value)")

REFUSED = {
    **{
        _named_by(one, gathers=False): STATISTIC
        for one in (
            inner_step, inner_step_of_functions, step_of_inputs, mixed_with_others, pasted_of_others, load_of_experts,
        )
    },
    **{_named_by(one, gathers=False): NUMBER for one in (weighed_by_counts, less_a_number)},
    named("clipped_by_hooks", hooked, hook=clipped): ("A hook changes the gradient of 0.weight", "run.backward(loss)"),
    named("clipped_inside", hooked, hook=clipped, inside=True): ("A hook changes the gradient of 0.weight",),
    named("gradient_by_own_loss", gradient_by_own, number=False): ("the gradient of 0.weight", "meetings.py, line"),
}  # fmt: skip
"""Before the first step."""

LATER = {
    named("running_number_of_own", running_number, gathers=False): NUMBER,
    named("gradient_by_own_number", gradient_by_own, number=True): NUMBER,
}
"""Before the second, as nothing is kept before the first."""

EXACT = (
    *(_named_by(one, gathers=True) for one in (inner_step, inner_step_of_functions, weighed_by_counts, less_a_number)),
    named("scaled_by_hooks", hooked, hook=scaled),
    named("hooks_that_look", hooked, hook=looked_at),
    named("running_number_of_all", running_number, gathers=True),
    *(
        _named_by(one, gathers=True)
        for one in (
            sorted_by_length, shuffled_again, terms_for_each, means_over_dimensions, numbers_alike, numbers_of_rows,
            drawn_in_place,
        )
    ),
)  # fmt: skip
