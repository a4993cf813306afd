"""Laws: whatever a loss is a mean or a sum over, unequal parts of a batch give its gradient, or they are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from hetopt.core.errors import BadInput
from hetopt.trainer.loss_reading import Beside, read_loss
from hetopt.trainer.session.denominators import Denominators, Row
from hetopt.trainer.session.terms import Terms, multiplied, told_of

CLASSES = 7
FEATURES = 5
TOKENS = 6
PADDING = 0

Parts = tuple[Tensor, Tensor, Tensor]
"""Features [samples, FEATURES], labels [samples], and tokens [samples, TOKENS], padded to one length."""


TERMS = 11


class Net(nn.Module):
    """Heads for samples and for tokens, and a scalar that losses may be weighted by."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.samples = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.tokens = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES))
        self.log_variances = nn.Parameter(torch.linspace(0.3, 0.1, TERMS))
        self.log_variance = nn.Parameter(torch.tensor(0.3))
        self.double()


Loss = Callable[[Net, Parts], Tensor]


def terms(model: Net, parts: Parts) -> Tensor:
    """[terms] two losses in turn, more than there are samples."""
    out = model.samples(parts[0])
    two = functional.cross_entropy(out, parts[1]), functional.mse_loss(out, one_hot(parts[1]))
    return torch.stack([two[number % 2] for number in range(TERMS)])


def make_parts(samples: int, seed: int) -> Parts:
    """As many samples, with sequences of unequal length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, TOKENS + 1, (samples, 1), generator=generator)
    tokens = torch.randint(1, CLASSES, (samples, TOKENS), generator=generator)
    return (
        torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64),
        torch.randint(0, CLASSES, (samples,), generator=generator),
        tokens * (torch.arange(TOKENS) < lengths),
    )


def of_tokens(model: Net, parts: Parts, **options: object) -> Tensor:
    """Cross entropy of the next token."""
    x = parts[2]
    logits = model.tokens(x[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(logits, x[:, 1:].flatten(), ignore_index=PADDING, **options)  # type: ignore[arg-type]


def one_hot(labels: Tensor) -> Tensor:
    """Labels as probabilities."""
    return functional.one_hot(labels, CLASSES).double()


def masked(model: Net, parts: Parts) -> Tensor:
    """A mean that the script computes itself, over what is no padding."""
    x = parts[2]
    each = functional.cross_entropy(model.tokens(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    kept = x[:, 1:].flatten() != PADDING
    return (each * kept).sum() / kept.sum()


def chosen(model: Net, parts: Parts) -> Tensor:
    """The same by selecting."""
    x = parts[2]
    each = functional.cross_entropy(model.tokens(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    return each[x[:, 1:].flatten() != PADDING].mean()


def of_sequences(model: Net, parts: Parts) -> Tensor:
    """A mean over tokens within each sample, then over samples."""
    x = parts[2]
    each = functional.cross_entropy(model.tokens(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction="none")
    kept = x[:, 1:] != PADDING
    return ((each * kept).sum(1) / kept.sum(1).clamp(min=1)).mean()


def ctc(model: Net, parts: Parts) -> Tensor:
    """Of two labels in every sequence."""
    logits = model.tokens(parts[2]).log_softmax(2).transpose(0, 1)
    targets = 1 + torch.stack([parts[1], parts[1] + 1], 1) % (CLASSES - 1)
    samples = len(targets)
    return functional.ctc_loss(logits, targets, (TOKENS,) * samples, (2,) * samples, zero_infinity=True)


def penalised(model: Net, parts: Parts) -> Tensor:
    """With a term on the weights, as scripts write weight decay."""
    loss = functional.cross_entropy(model.samples(parts[0]), parts[1])
    return loss + 1e-3 * sum(p.pow(2).sum() for p in model.parameters()) + 0.1 * model.samples[0].weight.norm()


def by_variance(model: Net, parts: Parts) -> Tensor:
    """Weighted by a variance that is learned (Kendall et al. 2018)."""
    return (-model.log_variance).exp() * functional.cross_entropy(
        model.samples(parts[0]), parts[1]
    ) + model.log_variance


def masked_by_number(model: Net, parts: Parts) -> Tensor:
    """The same, divided by a plain number."""
    x = parts[2]
    each = functional.cross_entropy(model.tokens(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    kept = x[:, 1:].flatten() != PADDING
    return (each * kept).sum() / kept.sum().item()


EXACT: dict[str, Loss] = {
    "cross entropy": lambda m, b: functional.cross_entropy(m.samples(b[0]), b[1]),
    "scaled and accumulated": lambda m, b: functional.cross_entropy(m.samples(b[0]), b[1]) * 65536.0 / 4,
    "class weights": lambda m, b: functional.cross_entropy(
        m.samples(b[0]), b[1], weight=torch.arange(1.0, 1 + CLASSES).double()
    ),
    "label smoothing": lambda m, b: functional.cross_entropy(m.samples(b[0]), b[1], label_smoothing=0.1),
    "soft labels": lambda m, b: functional.cross_entropy(m.samples(b[0]), one_hot(b[1])),
    "sum": lambda m, b: functional.cross_entropy(m.samples(b[0]), b[1], reduction="sum"),
    "sum of two": lambda m, b: (
        functional.mse_loss(m.samples(b[0]), one_hot(b[1]), reduction="sum") + 0.5 * m.samples(b[0]).exp().sum()
    ),
    "sum by samples": lambda m, b: functional.cross_entropy(m.samples(b[0]), b[1], reduction="sum") / len(b[0]),
    "sum times one by samples": lambda m, b: (
        functional.cross_entropy(m.samples(b[0]), b[1], reduction="sum") * (1 / len(b[0]))
    ),
    "squares": lambda m, b: functional.mse_loss(m.samples(b[0]), one_hot(b[1])),
    "squares and classes": lambda m, b: (
        functional.mse_loss(m.samples(b[0]), one_hot(b[1])) + 2 * functional.cross_entropy(m.samples(b[0]), b[1])
    ),
    "each feature's mean": lambda m, b: m.samples(b[0]).square().mean(0).sum(),
    "each sample's mean": lambda m, b: m.samples(b[0]).square().mean(1).sum(),
    "binary": lambda m, b: functional.binary_cross_entropy_with_logits(
        m.samples(b[0]), one_hot(b[1]), pos_weight=torch.arange(1.0, 1 + CLASSES).double()
    ),
    "divergence by batch": lambda m, b: functional.kl_div(
        m.samples(b[0]).log_softmax(1), one_hot(b[1]), reduction="batchmean"
    ),
    "triplets": lambda m, b: functional.triplet_margin_loss(m.samples(b[0]), m.samples(b[0] + 1), m.samples(b[0] - 1)),
    "cosines": lambda m, b: 1 - functional.cosine_similarity(m.samples(b[0]), m.samples(b[0] + 1)).mean(),
    "smooth": lambda m, b: functional.smooth_l1_loss(m.samples(b[0]), one_hot(b[1])),
    "likelihoods": lambda m, b: functional.gaussian_nll_loss(m.samples(b[0]), one_hot(b[1]), m.samples(b[0] + 1).exp()),
    "tokens": of_tokens,
    "smoothed tokens": lambda m, b: of_tokens(m, b, label_smoothing=0.1),
    "weighted tokens": lambda m, b: of_tokens(m, b, weight=torch.arange(1.0, 1 + CLASSES).double()),
    "sum of tokens": lambda m, b: of_tokens(m, b, reduction="sum"),
    "masked tokens": masked,
    "masked tokens by a number": masked_by_number,
    "chosen tokens": chosen,
    "sequences": of_sequences,
    "ctc": ctc,
    "penalised": penalised,
    "variance": by_variance,
    "stacked under weights": lambda m, b: (terms(m, b) * torch.linspace(0.3, 0.7, TERMS)).sum(),
    "stacked under variances": lambda m, b: ((-m.log_variances).exp() * terms(m, b) + m.log_variances).mean(),
    "variances one by one": lambda m, b: (
        functional.cross_entropy(m.samples(b[0]), b[1]) / (2 * m.log_variances[0].exp())
        + m.log_variances[0]
        + functional.mse_loss(m.samples(b[0]), one_hot(b[1])) * torch.softmax(m.log_variances, 0)[1]
    ),
    "sum over some": lambda m, b: (
        (2 * m.samples(b[0]).square().mean(1)[b[1] > 1].sum() + m.samples(b[0]).square().mean(1)[b[1] <= 1].sum())
        / len(b[0])
    ),
}

REFUSED: dict[str, Loss] = {
    "root of the mean": lambda m, b: functional.mse_loss(m.samples(b[0]), one_hot(b[1])).sqrt(),
    "dice": lambda m, b: (
        1 - 2 * (m.samples(b[0]).sigmoid() * one_hot(b[1])).sum() / (m.samples(b[0]).sigmoid() + one_hot(b[1])).sum()
    ),
    "samples and tokens": lambda m, b: functional.cross_entropy(m.samples(b[0]), b[1]) + of_tokens(m, b),
    "load balance": lambda m, b: (
        functional.cross_entropy(m.samples(b[0]), b[1])
        + 0.1 * (m.samples(b[0]).softmax(1).mean(0) * one_hot(b[1]).mean(0)).sum()
    ),
    "own weights": lambda m, b: functional.cross_entropy(m.samples(b[0]), b[1]) * (len(b[0]) / 31),
    "reciprocal of a count": lambda m, b: of_tokens(m, b, reduction="sum") * (1 / (b[2][:, 1:] != PADDING).sum()),
    "sum and penalty": lambda m, b: (
        functional.cross_entropy(m.samples(b[0]), b[1], reduction="sum") + m.samples[0].weight.pow(2).sum()
    ),
    "one by one": lambda m, b: (
        sum(functional.cross_entropy(m.samples(x[None]), y[None]) for x, y in zip(b[0], b[1], strict=True)) / len(b[0])
    ),
}


def gradient(model: Net, loss: Tensor) -> Tensor:
    """Of all parameters."""
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    parameters = model.parameters()
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)]
    )


def split(parts: Parts, sizes: list[int]) -> list[Parts]:
    """One worker's samples each."""
    return list(zip(*(torch.split(one, sizes) for one in parts), strict=True))  # type: ignore[arg-type]  # three each


def together(model: Net, loss: Loss, parts: list[Parts], denominators: Denominators) -> Tensor:
    """The workers' gradients, so weighted."""
    losses = [loss(model, one) for one in parts]
    sizes = [len(one[0]) for one in parts]
    rows = [Row.of(read_loss(one, size), samples=size, rows=size) for one, size in zip(losses, sizes, strict=True)]
    weights = denominators.weights([Row.read(row.numbers()) for row in rows])
    gradients = [gradient(model, one) for one in losses]
    return torch.stack([weight * one for weight, one in zip(weights, gradients, strict=True)]).sum(0)


@pytest.fixture(autouse=True)
def quiet() -> object:
    """Torch advises against kl_div's mean, among others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=15)
@given(data=st.data())
def test_parts_give_the_gradient_of_the_batch(name: str, data: st.DataObject) -> None:
    """Hypothesis: of any sizes but equal ones, where what a number means cannot always be told."""
    model, denominators = Net(), Denominators(accumulate=4)
    for step in range(data.draw(st.integers(1, 3), label="steps")):
        sizes = data.draw(
            st.lists(st.integers(2, 9), min_size=2, max_size=4).filter(lambda one: len(set(one)) > 1), label="sizes"
        )
        parts = make_parts(sum(sizes), data.draw(st.integers(0, 999), label="seed") + step)
        whole = gradient(model, EXACT[name](model, parts))
        try:
            found = together(model, EXACT[name], split(parts, sizes), denominators)
        except BadInput:
            assert name.startswith("masked tokens"), "only what a script divides by itself may be unclear"
            return
        assert (found - whole).norm() <= 1e-6 * whole.norm()


POINTS = torch.linspace(-1, 1, 6 * FEATURES, dtype=torch.float64).view(6, FEATURES)
"""That all workers compute, whatever samples they have."""

ADDED: dict[str, Loss] = {
    "samples": EXACT["squares"],
    "tokens": of_tokens,
    "chosen tokens": chosen,
    "sequences": of_sequences,
    "sum of tokens": EXACT["sum of tokens"],
    "points": lambda m, b: functional.mse_loss(m.samples(POINTS).exp(), torch.ones(6, CLASSES).double()),
    "weights at right angles": lambda m, b: (m.samples[0].weight @ m.samples[0].weight.T).square().sum(),
    "chosen samples": lambda m, b: functional.cross_entropy(m.samples(b[0])[b[1] > 1], b[1][b[1] > 1]),
}


def term_by_term(model: Net, added: list[Loss], parts: list[Parts]) -> Tensor:
    """The workers' gradients, each term weighed by itself; with a penalty, which has no weight of its own."""
    of_each = [[one(model, part) for one in added] for part in parts]
    sizes = [len(part[0]) for part in parts]
    losses = [sum(one) + 1e-2 * model.samples[0].weight.pow(2).sum() for one in of_each]
    workers = [Terms(model, 1, rank, len(parts)) for rank in range(len(parts))]
    terms = [
        worker.of(read_loss(loss, size), samples=size, rows=size, values={one.grad_fn: one for one in own})
        for worker, loss, size, own in zip(workers, losses, sizes, of_each, strict=True)
    ]
    told = [[*told_of(own)] for own in terms]
    total = torch.zeros(sum(p.numel() for p in model.parameters())).double()
    for rank, (worker, own, loss) in enumerate(zip(workers, terms, losses, strict=True)):
        weights, factors = worker.combine(own, told)
        with multiplied(factors):
            total += weights[rank] * gradient(model, loss)
    return total


@settings(max_examples=60)
@given(
    names=st.lists(st.sampled_from(sorted(ADDED)), min_size=2, max_size=4, unique=True),
    sizes=st.lists(st.integers(4, 9), min_size=2, max_size=3).filter(lambda one: len(set(one)) > 1),
    seed=st.integers(0, 999),
)
def test_terms_of_any_denominators_give_the_gradient_of_the_batch(
    names: list[str], sizes: list[int], seed: int
) -> None:
    """Or are refused where a count cannot be told from a constant."""
    model, parts, added = Net(), make_parts(sum(sizes), seed), [ADDED[name] for name in names]
    whole = sum(one(model, parts) for one in added) + 1e-2 * model.samples[0].weight.pow(2).sum()
    try:
        found = term_by_term(model, added, split(parts, sizes))
    except BadInput:
        assert set(names) & {"chosen samples", "chosen tokens"}
        return
    expected = gradient(model, whole)
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_terms_that_are_alike_may_be_others_on_each_worker() -> None:
    """One for each class that a worker has samples of: two on both, of other classes."""

    def of_class(number: int) -> Loss:
        def loss(model: Net, parts: Parts) -> Tensor:
            its = parts[1] == parts[1].unique()[number]
            return functional.cross_entropy(model.samples(parts[0])[its], parts[1][its])

        return loss

    features, _, tokens = make_parts(9, 0)
    parts = split((features, torch.tensor([0, 0, 0, 1, 1, 0, 0, 2, 2]), tokens), [5, 4])
    with pytest.raises(BadInput, match="alike"):
        term_by_term(Net(), [of_class(0), of_class(1)], parts)


def test_a_mean_over_as_many_steps_everywhere_is_none_over_a_count() -> None:
    """Of sequences that come first, after a sum over the samples: nodes of graphs would be unequally many."""
    model, parts = Net(), split(make_parts(9, 0), [5, 4])
    losses = [model.tokens(part[2].T).square().mean(2).sum(1).mean() for part in parts]
    readings = [read_loss(loss, size, lengths=(TOKENS,)) for loss, size in zip(losses, (5, 4), strict=True)]
    rows = [Row.of(one, samples=size, rows=size) for one, size in zip(readings, (5, 4), strict=True)]
    with pytest.raises(BadInput, match=f"a mean over {TOKENS} elements on every worker"):
        Denominators().weights(rows)


def test_points_that_each_worker_has_drawn_are_no_constant() -> None:
    """A mean over as many values on all workers that is another one on each."""
    added = [EXACT["squares"], lambda m, b: m.samples(b[0][:3]).square().exp().mean()]
    with pytest.raises(BadInput):
        term_by_term(Net(), added, split(make_parts(9, 0), [5, 4]))


def test_workers_that_count_as_many_tokens_are_no_sum_by_a_constant() -> None:
    """Five and four sequences may hold as many tokens: then the count is the same on both, as a constant is."""
    model = Net()
    for seed in range(400):
        parts = split(make_parts(9, seed), [5, 4])
        counts = [int((one[2][:, 1:] != PADDING).sum()) for one in parts]
        if counts[0] == counts[1]:
            break
    with pytest.raises(BadInput, match=f"divided by {counts[0]} on every worker"):
        together(model, masked, parts, Denominators(accumulate=counts[0]))


OF_NONE: dict[str, Loss] = {
    "masked": lambda m, b: (
        (m.tokens(b[2]).square().mean(2) * (b[2] != PADDING)).sum() / (b[2] != PADDING).sum().clamp(min=1)
    ),
    "chosen": lambda m, b: m.tokens(b[2])[b[2] != PADDING].square().sum() / max(1, int((b[2] != PADDING).sum())),
    "cross entropy": lambda m, b: (
        functional.cross_entropy(m.tokens(b[2]).flatten(0, 1), b[2].flatten(), ignore_index=PADDING, reduction="sum")
        / max(1, int((b[2] != PADDING).sum()))
    ),
}


@pytest.mark.parametrize("name", OF_NONE)
def test_a_worker_that_counts_none_does_not_count(name: str) -> None:
    """It divides by one, as by zero nobody can."""
    model, (features, labels, tokens) = Net(), make_parts(9, 0)
    tokens[5:] = PADDING
    parts = features, labels, tokens
    found = together(model, OF_NONE[name], split(parts, [5, 4]), Denominators())
    whole = gradient(model, OF_NONE[name](model, parts))
    assert (found - whole).norm() <= 1e-6 * whole.norm()


COUNTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked": lambda each, kept: (each * kept).sum() / kept.sum().item(),
    "masked from the left": lambda each, kept: -(kept * -each).sum() / float(kept.sum()),
    "chosen": lambda each, kept: each[kept].sum() / int(kept.sum()),
    "selected": lambda each, kept: each.masked_select(kept).sum() / int(kept.sum()),
    "where": lambda each, kept: torch.where(kept, each, 0.0).sum() / int(kept.sum()),
    "where not": lambda each, kept: torch.where(~kept, torch.zeros_like(each), each).sum() / int(kept.sum()),
    "filled": lambda each, kept: each.masked_fill(~kept, 0.0).sum() / int(kept.sum()),
    "weighted": lambda each, kept: (each * (2.0 * kept)).sum() / float(2 * kept.sum()),
    "multiplied": lambda each, kept: (each * kept).sum() * (1 / kept.sum().item()),
}


@pytest.mark.parametrize("name", [*COUNTED, "cross entropy"])
def test_as_many_tokens_as_samples_are_no_sum_by_the_batch(name: str) -> None:
    """A number of tokens may happen to be that of the samples of all workers, which scripts write as a constant."""

    def loss(model: Net, parts: Parts) -> Tensor:
        if name == "cross entropy":
            return of_tokens(model, parts, reduction="sum") / int((parts[2][:, 1:] != PADDING).sum())
        x = parts[2]
        each = functional.cross_entropy(model.tokens(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), reduction="none")
        return COUNTED[name](each, x[:, 1:].flatten() != PADDING)

    by = 2 if name == "weighted" else 1
    parts = split(make_parts(5, 144), [3, 2])
    assert [by * int((one[2][:, 1:] != PADDING).sum()) for one in parts] == [by * 5, by * 5]
    with pytest.raises(BadInput, match="a sum"):
        together(Net(), loss, parts, Denominators(accumulate=by * 5))


BY_THE_BATCH: dict[str, Loss] = {
    "masked": lambda m, b: (m.samples(b[0]).square() * (one_hot(b[1]) + 0.5)).sum() / 5,
    "as many values on one": lambda m, b: m.samples(b[0]).square()[:, :5].sum() * (1 / 15),
    "as many samples on one": lambda m, b: functional.cross_entropy(m.samples(b[0]), b[1], reduction="sum") * (1 / 3),
    "by one": lambda m, b: functional.cross_entropy(m.samples(b[0]), b[1], reduction="sum") / 1,
}


@pytest.mark.parametrize("name", BY_THE_BATCH)
@pytest.mark.parametrize("sizes", [[3, 2], [4, 1]])
def test_a_sum_by_the_size_of_the_batch_needs_no_word(name: str, sizes: list[int]) -> None:
    """As scripts of autoencoders divide it, however many values a sample has, and under whatever mask."""
    model, parts, loss = Net(), make_parts(5, 144), BY_THE_BATCH[name]
    found = together(model, loss, split(parts, sizes), Denominators())
    whole = gradient(model, loss(model, parts))
    assert (found - whole).norm() <= 1e-6 * whole.norm()


def test_one_over_a_count_that_is_the_same_on_all_workers_is_no_coefficient() -> None:
    """Sequences without padding, in equal parts, are as many tokens everywhere: taken for a coefficient, their sums
    would be added up to as many times the gradient as there are workers."""
    model, parts = Net(), make_parts(8, 0)
    whole = (parts[0], parts[1], 1 + parts[2] % (CLASSES - 1))
    loss = REFUSED["reciprocal of a count"]
    with pytest.raises(BadInput, match=f"divided by {4 * (TOKENS - 1)} on every worker"):
        together(model, loss, split(whole, [4, 4]), Denominators())
    found = together(model, lambda m, b: of_tokens(m, b, reduction="sum") * 0.07, split(whole, [4, 4]), Denominators())
    expected = gradient(model, of_tokens(model, whole, reduction="sum") * 0.07)
    assert (found - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("name", REFUSED)
@settings(max_examples=8)
@given(sizes=st.sampled_from([[3, 9], [5, 2], [12, 5, 3]]), seed=st.integers(0, 99))
def test_what_no_weights_can_add_up_is_refused(name: str, sizes: list[int], seed: int) -> None:
    """With a sentence that names the way out; what a script counts may happen to be in proportion to samples."""
    model, parts = Net(), make_parts(sum(sizes), seed)
    refusal = None
    try:
        found = together(model, REFUSED[name], split(parts, sizes), Denominators())
    except BadInput as error:
        refusal = error
    if refusal is None:
        whole = gradient(model, REFUSED[name](model, parts))
        assert name == "reciprocal of a count"
        assert (found - whole).norm() <= 1e-6 * whole.norm()
    else:
        assert "run.backward" in (refusal.hint or "")


@pytest.mark.parametrize(("is_new", "kind"), [(False, "samples"), (True, "unknown")])
def test_a_batch_of_another_loader_is_meant_where_it_was_asked_for_as_well(is_new: bool, kind: str) -> None:
    """Eight values may be two of each of four samples, or of another loader's eight."""
    values = nn.Linear(2, 2)(torch.ones(4, 2))
    beside = {8: Beside(weighs_alike=False, is_new=is_new)}
    assert read_loss(values.square().mean(), 4, beside=beside).kind == kind
