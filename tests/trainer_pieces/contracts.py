"""What every compressor, memory and collective must obey: a new one subclasses the contract and says how to make it."""

from __future__ import annotations

import io
import itertools

import pytest
import torch

from hetopt.profiler.errors import BadInput
from hetopt.trainer.exchange.compressor import DensePayload, SparsePayload
from hetopt.trainer.exchange.wire import wire_bytes, wire_format

GRADIENTS = {
    "normal": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(n)),
    "heavy-tailed": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(n)).pow(5),
    "layers of unequal size": lambda n: (
        torch.randn(n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-6, 3, n)
    ),
    "mostly zero": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(n)) * (torch.arange(n) % 50 == 0),
    "all equal": lambda n: torch.full((n,), -2.0),
    "zero": lambda n: torch.zeros(n),
}
CASES = tuple(itertools.product((1, 7, 1000, 200_003), (1.0, 0.3, 0.01, 0.001)))  # elements, ratio


def serialised_bytes(payload: DensePayload | SparsePayload) -> int:
    """Bytes of the payload's tensors, counted by writing them out."""
    stream = io.BytesIO()
    tensors = [payload.values] if isinstance(payload, DensePayload) else [payload.indices, payload.values]
    for tensor in tensors:
        stream.write(tensor.numpy().tobytes())
    return stream.tell()


@pytest.mark.parametrize("kind", GRADIENTS)
class CompressorContract:
    """Laws of a compressor; one that sends some elements as they are also obeys `MaskContract`."""

    def make(self):
        raise NotImplementedError

    def compress(self, gradient, ratio):
        return self.make().compress(gradient, ratio, torch.Generator().manual_seed(5))

    def test_wire_bytes_are_the_bytes_of_the_payload(self, kind):
        compressor = self.make()
        assert wire_format(compressor.name).collective == compressor.collective
        for numel, ratio in CASES:
            payload = self.compress(GRADIENTS[kind](numel), ratio)
            assert serialised_bytes(payload) == payload.nbytes == compressor.wire_bytes(numel, ratio)
            assert payload.nbytes == wire_bytes(compressor.name, numel, ratio)

    def test_only_the_generator_and_the_gradient_decide_and_neither_global_state_nor_gradient_changes(self, kind):
        for numel, ratio in CASES:
            gradient = GRADIENTS[kind](numel)
            kept, random_state = gradient.clone(), torch.get_rng_state()
            one, two = self.compress(gradient, ratio), self.compress(gradient, ratio)
            assert torch.equal(gradient, kept)
            assert torch.equal(torch.get_rng_state(), random_state)
            assert torch.equal(one.values, two.values)
            if isinstance(one, SparsePayload):
                assert torch.equal(one.indices, two.indices)

    def test_shape_and_type_survive_and_zero_stays_zero(self, kind):
        for numel, ratio in CASES:
            back = self.make().decompress(self.compress(GRADIENTS[kind](numel), ratio))
            assert (back.shape, back.dtype) == ((numel,), torch.float32)
            assert not self.make().decompress(self.compress(torch.zeros(numel), ratio)).any()

    def test_energy_is_not_created(self, kind):
        for numel, ratio in CASES:
            gradient = GRADIENTS[kind](numel)
            sent = self.make().decompress(self.compress(gradient, ratio))
            assert sent.double().square().sum() <= gradient.double().square().sum() * (1 + 1e-12)


@pytest.mark.parametrize("kind", GRADIENTS)
class MaskContract:
    """Laws of compressors that send some elements as they are: what is sent and what is left are disjoint."""

    def make(self):
        raise NotImplementedError

    def split(self, gradient, ratio):
        payload = self.make().compress(gradient, ratio, torch.Generator().manual_seed(5))
        rest = gradient.clone()
        payload.subtract_from(rest)
        return self.make().decompress(payload), rest

    def test_sent_plus_rest_is_the_gradient_exactly(self, kind):
        for numel, ratio in CASES:
            gradient = GRADIENTS[kind](numel)
            sent, rest = self.split(gradient, ratio)
            assert torch.equal(sent + rest, gradient)
            assert not (sent * rest).any()
            assert ratio < 1 or torch.equal(sent, gradient)

    def test_retained_energy_is_one_minus_the_contraction(self, kind):
        for numel, ratio in CASES:
            gradient = GRADIENTS[kind](numel)
            sent, rest = (part.double().square().sum().item() for part in self.split(gradient, ratio))
            assert sent + rest == pytest.approx(gradient.double().square().sum().item(), rel=1e-12)


class MemoryContract:
    """Laws of a memory for gradients of `NUMEL` elements."""

    NUMEL = 500

    def make(self):
        raise NotImplementedError

    def gradients(self, count):
        generator = torch.Generator().manual_seed(11)
        return [torch.randn(self.NUMEL, generator=generator) for _ in range(count)]

    @staticmethod
    def first_half(flat):
        indices = torch.arange(len(flat) // 2, dtype=torch.int32)
        return SparsePayload(indices=indices, values=flat[indices], numel=len(flat))

    def after(self, steps):
        memory = self.make()
        for gradient in self.gradients(steps):
            prepared = memory.prepare(gradient)
            memory.commit(prepared, self.first_half(prepared))
        return memory

    def test_starts_from_nothing(self):
        gradient = self.gradients(1)[0]
        assert torch.equal(self.make().prepare(gradient), gradient)
        assert not any(value.any() for value in self.make().state().values())

    def test_preparing_has_no_side_effects(self):
        memory = self.after(3)
        state, (gradient, other) = memory.state(), self.gradients(2)
        kept = gradient.clone()
        first = memory.prepare(gradient).clone()
        memory.prepare(other)
        assert torch.equal(memory.prepare(gradient), first)
        assert torch.equal(gradient, kept)
        assert all(torch.equal(state[key], value) for key, value in memory.state().items())

    def test_state_is_a_copy_and_brings_everything_back(self):
        memory, fresh = self.after(3), self.make()
        state = memory.state()
        frozen = {key: value.clone() for key, value in state.items()}
        fresh.load_state(state)
        for gradient in self.gradients(4):
            one, two = memory.prepare(gradient), fresh.prepare(gradient)
            assert torch.equal(one, two)
            memory.commit(one, self.first_half(one))
            fresh.commit(two, self.first_half(two))
        assert all(torch.equal(state[key], value) for key, value in frozen.items())

    def test_foreign_state_is_refused(self):
        with pytest.raises(BadInput, match="saved gradient memory"):
            self.make().load_state({**self.make().state(), "foreign": torch.zeros(3)})


class CollectiveContract:
    """Laws of a collective without a group; with one, see the tests of several processes."""

    def make(self):
        raise NotImplementedError

    def payload(self, flat):
        raise NotImplementedError

    def test_alone_the_sum_is_the_payload(self):
        flat = torch.randn(100, generator=torch.Generator().manual_seed(2))
        payload, out = self.payload(flat), torch.full((100,), torch.nan)
        expected = torch.zeros(100)
        payload.add_to(expected)
        self.make().run(payload, out, None)
        assert torch.equal(out, expected)

    def test_the_sum_may_replace_the_gradient_it_came_from(self):
        flat = torch.randn(100, generator=torch.Generator().manual_seed(3))
        payload, expected = self.payload(flat), torch.zeros(100)
        payload.add_to(expected)
        self.make().run(payload, flat, None)
        assert torch.equal(flat, expected)
