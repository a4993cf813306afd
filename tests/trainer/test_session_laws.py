"""Laws of a session's parts, over generated cases: what is summed, whose batch a loss is of, who is named.

A script that is killed and started again ends, bit by bit, where it would have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import read_events
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.trainer.engine import LARGEST, tensors_mark
from hetopt.trainer.script.batches import AuditResult, Audits, ShareTable, own_items
from hetopt.trainer.session import session
from hetopt.trainer.session.gradients import GradientSum
from hetopt.trainer.session.turns import ACTIONS, disagreement
from hetopt.trainer.session.weights import Counts
from hetopt.trainer.steps.adaptive_controller import ExchangeConfig, make_exchange
from tests.forks import all_end_well
from tests.thinned import few, running

from .resume_program import CASES, EPOCHS, STEPS

ALONE = RunSpec(
    task="session",
    workers=(WorkerSpec(host="here", type="local", local_batch_size=1),),
    stop=StopRule(max_steps=1),
)


def exchange(shapes: Sequence[tuple[int, ...]]) -> ExchangeConfig:
    return make_exchange(ALONE, ALONE.compression, shapes, torch.device("cpu"))


class Parts(nn.Module):
    """Parameters of every kind, of which a loss uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 2).double()
        self.rows = nn.Embedding(7, 3, sparse=True)
        self.waves = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def loss(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(4, 3, generator=generator)
        total = x.new_zeros(())
        if seed % 2:
            total = total + self.one(x).square().mean()
        if seed % 3:
            total = total + self.two(x.double()).square().mean()
        if seed % 5:
            total = total + self.rows(torch.randint(0, 7, (4,), generator=generator)).square().mean()
        return total + (x * self.waves).abs().mean() if seed % 7 else total


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if one.grad is None else one.grad.to_dense().clone() for one in model.parameters()]


actions = st.lists(st.sampled_from(["add", "sum", "sum", "drop", "zero", "scale"]), min_size=1, max_size=12)


@given(actions=actions)
def test_whatever_is_put_aside_summed_dropped_or_kept_ends_as_in_the_script(actions: list[str]) -> None:
    """Backward passes that are summed at once or later, on top of what is there, with gradients cleared in between."""
    plain, ours = Parts(), Parts()
    sums = GradientSum(list(ours.named_parameters()), exchange, world_size=1)
    is_whole = True
    for seed, action in enumerate(actions, start=1):
        if action in ("add", "sum"):
            plain.loss(seed).backward() if plain.loss(seed).requires_grad else None
            sums.begin()
            loss = ours.loss(seed)
            loss.backward() if loss.requires_grad else None
            is_whole = action == "sum"
            sums.sum(1.0, None) if is_whole else sums.hold(1.0)
        elif action in ("drop", "zero"):
            for model in (plain, ours):
                # A sparse gradient that is zeroed in place is not summed with again by torch either.
                model.zero_grad(set_to_none=True) if action == "drop" else [
                    one.grad.zero_() for one in model.parameters() if one.grad is not None
                ]
        elif is_whole:
            for model in (plain, ours):
                for one in model.parameters():
                    if one.grad is not None:
                        one.grad.mul_(0.5)  # as clipping does
        if is_whole:
            for expected, found in zip(gradients(plain), gradients(ours), strict=True):
                if expected is None or found is None:
                    assert expected is found is None
                else:
                    assert torch.allclose(expected, found, rtol=1e-5, atol=1e-6)
    assert ours.rows.weight.grad is None or ours.rows.weight.grad.is_sparse == plain.rows.weight.grad.is_sparse


@given(
    counts=st.lists(st.integers(0, 9), min_size=2, max_size=4).filter(any),
    leaves_out=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_gradients_in_messages_add_up_by_their_weights(counts: list[int], leaves_out: list[bool]) -> None:
    """Whatever a worker without samples has computed, and whichever parameters each of them has used."""
    models = [nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 1)]) for _ in counts]
    sums = [GradientSum(list(one.named_parameters()), exchange, world_size=len(counts)) for one in models]
    loads = torch.zeros(len(counts), sums[0].room, dtype=torch.float64)
    local: list[list[Tensor | None]] = []
    for count, leaves, load, model, own in zip(counts, leaves_out, loads, models, sums, strict=False):
        own.begin()
        parts = [model[0](torch.randn(4, 3)).sum(), *([] if leaves else [model[1](torch.randn(4, 3)).square().sum()])]
        (sum(parts) * (1.0 if count else math.nan)).backward()
        local.append(gradients(model))
        own.pack(load, float(count))
    for model, own in zip(models, sums, strict=True):
        own.unpack(loads.sum(0), float(sum(counts)), 0.0)
        own.sum(1.0)
        for at, parameter in enumerate(model.parameters()):
            used = [(w / sum(counts), one[at]) for w, one in zip(counts, local, strict=True) if w]
            expected = [w * one for w, one in used if one is not None]
            assert (parameter.grad is None) == (not expected)
            assert parameter.grad is None or torch.allclose(parameter.grad, sum(expected), rtol=1e-5, atol=1e-6)


@given(
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    minimum=st.integers(1, 2),
)
def test_parts_of_workers_weigh_as_much_as_the_batch(weights: list[int], sizes: list[int], minimum: int) -> None:
    table = ShareTable(tuple(weights), minimum=minimum)
    values = torch.randn(max(sizes), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for number, size in enumerate(sizes):
        batch = values[:size].tolist()
        parts = [table.part(rank, size, (0, number), number + 1) for rank in range(len(weights))]
        mean = sum(part.weight * sum(own_items(batch, part)) / part.samples for part in parts if part.samples)
        assert math.isclose(mean, sum(batch) / size, abs_tol=1e-12)
        if sum(weights) != size >= minimum:
            assert all(part.samples == 0 or part.samples >= minimum for part in parts)


@settings(deadline=None)
@given(
    weights=st.lists(st.integers(1, 9), min_size=3, max_size=5),
    size=st.integers(1, 40),
    accumulate=st.integers(1, 3),
)
def test_an_audited_batch_is_computed_twice_by_the_leader_and_by_all_others(
    weights: list[int], size: int, accumulate: int
) -> None:
    table = ShareTable(tuple(weights), audits=Audits(accumulate=accumulate))
    audited = []
    for number in range(20 * accumulate):
        step = number // accumulate + 1
        parts = [table.part(rank, size, (0, number + 1), step) for rank in range(len(weights))]
        if not parts[0].is_audit:
            continue
        audited.append(step)
        items = [list(own_items(range(size), part)) for part in parts]
        assert items[0] == list(range(size))
        assert [item for own, part in zip(items[1:], parts[1:], strict=True) if part.samples for item in own] == items[
            0
        ]
        assert sum(part.weight for part in parts[1:]) == pytest.approx(parts[0].weight) == 1
    assert audited == [step for step in (1, 2, 4, 8, 16) for _ in range(accumulate)]


def weights(sizes: Sequence[int], said: Sequence[Any]) -> list[float]:
    """Return the weight of each worker's loss, of which it says so much."""
    counts = [Counts.of(size, None, weight) for size, weight in zip(sizes, said, strict=True)]
    whole = Counts(*map(sum, zip(*counts, strict=True)))
    if not whole.is_mixed:
        assert [own.factor / whole.total for own in counts] == pytest.approx([own.weight(whole) for own in counts])
    return [own.weight(whole) for own in counts]


@given(sizes=st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any), data=st.data())
def test_weights_add_losses_up_to_that_of_the_batch(sizes: list[int], data: st.DataObject) -> None:
    """Means over samples, means over whatever is counted, and sums."""
    tokens = [data.draw(st.integers(0, 20)) if size else 0 for size in sizes]
    losses = [data.draw(st.floats(-3, 3)) for _ in sizes]
    by_samples = weights(sizes, [None] * len(sizes))
    assert sum(by_samples) == pytest.approx(1)
    assert by_samples == pytest.approx([size / sum(sizes) for size in sizes])
    assert weights(sizes, [None, *tokens[1:]]) == (by_samples if sizes[0] else weights(sizes, tokens))
    if any(tokens):
        counted = weights(sizes, tokens)
        total = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
        assert sum(w * loss for w, loss in zip(counted, losses, strict=True)) == pytest.approx(total)
    assert weights(sizes, ["sum"] * len(sizes)) == [float(size > 0) for size in sizes]


@given(seed=st.integers(0, 1000), bias=st.floats(0.0, 2.0))
def test_noise_alone_is_no_difference_and_a_bias_in_it_is(seed: int, bias: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    sums: list[Tensor] = []
    wrong = bias * torch.ones(2000, dtype=torch.float64)
    for _ in range(8):
        noise = torch.randn(2000, generator=generator, dtype=torch.float64)
        found = AuditResult.of(noise + wrong, 100.0, draws=True, before=sums)
    if bias == 0.0 or bias > 1.0:
        assert found.differs(1e-4) == (bias > 1.0)
    assert AuditResult.of(wrong + 1, 100.0, draws=False, before=[]).differs(1e-4)


words = st.tuples(
    st.just(1), st.integers(0, len(ACTIONS) - 1), st.integers(1, 3), st.integers(0, 1), st.integers(0, 2),
    st.integers(0, 1), st.integers(0, 1),
)  # fmt: skip


@given(rows=st.lists(words, min_size=2, max_size=5))
def test_whoever_is_elsewhere_is_named_in_one_line(rows: list[tuple[float, ...]]) -> None:
    if len(set(rows)) == 1:
        return
    said = str(disagreement(rows))
    assert "worker" in said
    assert "\n" not in said
    assert any(f"step {row[2]}" in said for row in rows)


@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=9), at=st.integers(0, 8))
def test_a_changed_bit_changes_the_mark(values: list[float], at: int) -> None:
    tensors = [torch.tensor(values), torch.tensor(values, dtype=torch.float64)]
    before = tensors_mark(tensors)
    assert 0 <= before < LARGEST
    assert tensors_mark([one.clone() for one in tensors]) == before
    word = tensors[0].view(torch.int32)
    word[at % len(values)] ^= 1
    assert tensors_mark(tensors) != before


def test_a_list_is_no_batch_to_split_and_a_factor_on_the_loss_is_torchs() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, factor = torch.ones(4, 2), torch.tensor(3.0)
    model(inputs).mean().backward(factor)  # type: ignore[no-untyped-call]  # torch's gap
    expected = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    with session(model, optimizer) as run:
        with pytest.raises(BadInput, match="was given a list, and shares out a tensor"):
            run.split([1, 2])  # type: ignore[call-overload]
        run.backward(model(inputs[run.split(4)]).mean(), gradient=factor)
        assert all(torch.equal(one.grad, own) for one, own in zip(model.parameters(), expected, strict=True))


FEW = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """What became of the scripts, whole, and killed and resumed."""
    folder = tmp_path_factory.mktemp("resume")
    all_end_well(["-m", "tests.trainer.resume_program", str(folder), *running(pytestconfig, FEW, CASES)])
    return folder


@pytest.mark.parametrize("name", few(FEW, CASES))
def test_a_killed_script_ends_where_it_would_have(name: str, folder: Path) -> None:
    case = CASES[name]
    for rank in range(case.workers):
        assert not [path.read_text() for path in (folder / name).glob("*.txt")]
        assert not (folder / name / f"killed-{rank}.pt").exists()
        whole, resumed = (torch.load(folder / name / f"{label}-{rank}.pt") for label in ("whole", "resumed"))
        left = len(resumed["losses"])
        assert EPOCHS * STEPS - case.killed_at <= left < EPOCHS * STEPS, "it went on in the middle"
        assert resumed["losses"] == whole["losses"][-left:]
        assert torch.equal(resumed["state"], whole["state"])
        assert all(resumed[key] == whole[key] for key in ("rates", "scale", "epochs", "drawn"))
    events = read_events(folder / name / "cut" / "events.jsonl")
    begun = [event["resumed_step"] for event in events if event["event"] == "run_started"]
    assert begun == [0, EPOCHS * STEPS - left]


def test_one_worker_goes_on_with_what_two_have_left(folder: Path) -> None:
    """What they held back is its own now, and the rest of the epoch is all that it reads of it."""
    alone, together = (torch.load(folder / "held back" / f"{label}-0.pt") for label in ("fewer", "resumed"))
    assert len(alone["losses"]) == len(together["losses"])
    assert (alone["rates"], alone["epochs"]) == (together["rates"], together["epochs"])
    assert bool(torch.isfinite(alone["state"]).all())
    assert not torch.equal(alone["state"], together["state"])


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4)


def test_what_cannot_be_saved_or_resumed_is_said(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with session(model, optimizer, folder=tmp_path) as run:
        batches = run.loader(loader())
        with pytest.raises(BadInput, match="has best of type float"):
            run.resume({"schedule": schedule, "best": 0.5})  # type: ignore[dict-item]  # what is to be refused
        assert run.resume() == 0
        for x, y in batches:
            with pytest.raises(RunFailed, match="in the middle of step"):
                run.checkpoint({"schedule": schedule})
            run.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            run.checkpoint({"schedule": schedule})
    with session(model, optimizer, folder=tmp_path) as run:
        run.loader(loader())
        with pytest.raises(BadInput, match="has schedule as `extra`"):
            run.resume()
    wider = nn.Linear(3, 1)
    with session(wider, torch.optim.SGD(wider.parameters(), lr=0.1), folder=tmp_path) as run:
        run.loader(loader())
        with pytest.raises(BadInput, match="does not fit the script's model"):
            run.resume({"schedule": schedule})
