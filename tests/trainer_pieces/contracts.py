"""What every compressor, residual, collective and batch policy must obey: a new one subclasses the contract."""

from __future__ import annotations

import io
import itertools
import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from hetopt.core.comm.composition import METHODS
from hetopt.core.comm.payload_bytes import INDEX_BYTES, VALUE_BYTES, kept_elements, wire_bytes
from hetopt.core.errors import BadInput
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.comm.compressor import DensePayload, SparsePayload, Turn
from hetopt.trainer.policies.policy import BatchObservation

GRADIENTS = {
    "normal": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(n)),
    "heavy-tailed": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(n)).pow(5),
    "layers of unequal size": lambda n: (
        torch.randn(n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-6, 3, n)
    ),
    "mostly zero": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(n)) * (torch.arange(n) % 50 == 0),
    "all equal": lambda n: torch.full((n,), -2.0),
    "denormal": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(n)) * 1e-41,
    "huge": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(n)) * 1e36,
    "zero": lambda n: torch.zeros(n),
}
# Elements, ratio; the long ones take what is only done to long gradients.
CASES = (*itertools.product((1, 7, 1000), (1.0, 0.3, 0.001)), (200_003, 0.01))


def serialised_bytes(payload: DensePayload | SparsePayload) -> int:
    """Bytes of the payload's tensors, counted by writing them out."""
    stream = io.BytesIO()
    tensors = [payload.values] if isinstance(payload, DensePayload) else [payload.indices, payload.values]
    for tensor in tensors:
        stream.write(tensor.numpy().tobytes())
    return stream.tell()


@pytest.mark.parametrize("kind", GRADIENTS)
class CompressorContract:
    """Laws of a compressor that sends elements as they are: what is sent and what is left are disjoint.

    `LEAST` and `MOST` bound how many elements a payload has, as factors of what the ratio allows.
    """

    LEAST = MOST = 1.0
    NAME: str

    def make(self, ratio):
        raise NotImplementedError

    def compress(self, gradient, ratio):
        return self.make(ratio).encode(gradient, Turn(Channel(), seed=5))

    def test_what_is_sent_and_what_is_left_are_the_gradient_to_the_bit(self, kind):
        """Only the turn and the gradient decide; and bytes are those that are planned."""
        name = self.NAME
        for numel, ratio in CASES:
            gradient = GRADIENTS[kind](numel)
            before, random_state = gradient.clone(), torch.get_rng_state()
            payload, again = self.compress(gradient, ratio), self.compress(gradient, ratio)
            assert torch.equal(gradient, before)
            assert torch.equal(torch.get_rng_state(), random_state)
            assert torch.equal(payload.values, again.values)
            if isinstance(payload, SparsePayload):
                assert torch.equal(payload.indices, again.indices)
                assert payload.indices.dtype == torch.int32
                assert (payload.indices.diff() > 0).all(), "indices are distinct and ascend"
            sent, rest = payload.dense(), gradient.clone()
            payload.add_to(rest, -1)
            assert (sent.shape, sent.dtype) == ((numel,), torch.float32)
            assert torch.equal(sent + rest, gradient)
            assert not ((sent != 0) & (rest != 0)).any()
            assert ratio < 1 or torch.equal(sent, gradient)
            sent_bytes = serialised_bytes(payload)
            if METHODS[name].same_size:
                assert sent_bytes == wire_bytes(name, numel, ratio)
            else:
                k, each = kept_elements(numel, ratio), INDEX_BYTES + VALUE_BYTES
                assert math.floor(self.LEAST * k) * each <= sent_bytes <= math.ceil(self.MOST * k) * each


class ResidualContract:
    """Laws of a residual for gradients of `NUMEL` elements."""

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
        residual = self.make()
        for gradient in self.gradients(steps):
            prepared = residual.prepare(gradient)
            residual.commit(self.first_half(prepared))
        return residual

    def test_starts_from_nothing(self):
        gradient = self.gradients(1)[0]
        assert torch.equal(self.make().prepare(gradient), gradient)
        assert not any(value.any() for value in self.make().state().values())

    def test_preparing_has_no_side_effects(self):
        residual = self.after(3)
        state, (gradient, other) = residual.state(), self.gradients(2)
        kept = gradient.clone()
        first = residual.prepare(gradient).clone()
        residual.prepare(other)
        assert torch.equal(residual.prepare(gradient), first)
        assert torch.equal(gradient, kept)
        assert all(torch.equal(state[key], value) for key, value in residual.state().items())

    def test_state_is_a_copy_and_brings_everything_back(self):
        residual, fresh = self.after(3), self.make()
        state = residual.state()
        frozen = {key: value.clone() for key, value in state.items()}
        fresh.load_state(state)
        for gradient in self.gradients(4):
            one, two = residual.prepare(gradient), fresh.prepare(gradient)
            assert torch.equal(one, two)
            residual.commit(self.first_half(one))
            fresh.commit(self.first_half(two))
        assert all(torch.equal(state[key], value) for key, value in frozen.items())

    def test_foreign_state_is_refused(self):
        with pytest.raises(BadInput, match="saved residual"):
            self.make().load_state({**self.make().state(), "foreign": torch.zeros(3)})


class CollectiveContract:
    """Laws of a collective without a group; with one, see the tests of several processes."""

    def make(self):
        raise NotImplementedError

    def compressor(self):
        raise NotImplementedError

    def test_alone_the_sum_is_the_payload(self):
        flat, turn = torch.randn(100, generator=torch.Generator().manual_seed(2)), Turn(Channel())
        out, expected = torch.full((100,), torch.nan), torch.zeros(100)
        self.compressor().encode(flat, turn).add_to(expected)
        self.make().run(self.compressor(), flat, out, turn)
        assert torch.equal(out, expected)

    def test_the_sum_may_replace_the_gradient_it_came_from(self):
        flat, turn = torch.randn(100, generator=torch.Generator().manual_seed(3)), Turn(Channel())
        expected = torch.zeros(100)
        self.compressor().encode(flat.clone(), turn).add_to(expected)
        self.make().run(self.compressor(), flat, flat, turn)
        assert torch.equal(flat, expected)


@st.composite
def balancing_stories(draw):
    """A least share, first shares, and periods as (times, relative spread, steps, epoch); no two times are alike."""
    workers = draw(st.integers(1, 6))
    minimum = draw(st.integers(1, 3))
    shares = draw(st.lists(st.integers(minimum, 200), min_size=workers, max_size=workers))
    times = st.lists(st.floats(1e-4, 1e3), min_size=workers, max_size=workers)
    periods = draw(
        st.lists(st.tuples(times, st.floats(0, 0.5), st.integers(1, 20), st.integers(0, 1)), min_size=1, max_size=8)
    )
    epochs = itertools.accumulate(ended for *_, ended in periods)
    unlike = [1 + 1e-3 * rank / math.pi for rank in range(workers)]
    return (
        minimum,
        shares,
        [
            (tuple(t * u for t, u in zip(times, unlike, strict=True)), spread, steps, epoch)
            for (times, spread, steps, _), epoch in zip(periods, epochs, strict=True)
        ],
    )


# The laws are inherited, and so run from several classes; hypothesis warns of that because such tests may differ in
# how they are executed, which these do not.
inherited = settings(suppress_health_check=[HealthCheck.differing_executors])


class BatchPolicyContract:
    """Laws of a policy that shares the global batch, in multiples of `UNIT` samples."""

    UNIT = 1

    def make(self, minimum):
        raise NotImplementedError

    @staticmethod
    def observe(shares, period):
        times, spread, steps, epoch = period
        return BatchObservation(
            local_batch_sizes=tuple(shares),
            compute_s=tuple(times),
            spread_s=tuple(spread * time_s for time_s in times),
            steps=steps,
            epoch=epoch,
        )

    def first(self, story):
        minimum, shares, periods = story
        return self.make(minimum), tuple(self.UNIT * share for share in shares), periods

    @inherited
    @given(balancing_stories())
    def test_batch_and_bounds_are_kept_whatever_is_measured(self, story):
        policy, shares, periods = self.first(story)
        total, state = sum(shares), policy.initial()
        for period in periods:
            state, decision = policy.decide(state, self.observe(shares, period))
            assert decision.changed == (decision.local_batch_sizes != shares)
            shares = decision.local_batch_sizes
            assert sum(shares) == total
            assert all(share >= story[0] and share % self.UNIT == 0 for share in shares)

    @inherited
    @given(balancing_stories())
    def test_every_rank_decides_alike_and_a_restart_changes_nothing(self, story):
        policy, shares, periods = self.first(story)
        state = policy.initial()
        for period in periods:
            restored = type(policy.initial()).model_validate(json.loads(json.dumps(state.model_dump(mode="json"))))
            assert restored == state
            observation = self.observe(shares, period)
            outcome = policy.decide(state, observation)
            assert policy.decide(restored, observation) == outcome
            assert restored == state
            state, shares = outcome[0], outcome[1].local_batch_sizes

    @inherited
    @given(balancing_stories(), st.randoms(use_true_random=False))
    def test_names_of_ranks_are_irrelevant(self, story, shuffler):
        """But for sums in another order, whose last bit may move a sample."""
        policy, shares, periods = self.first(story)
        order = list(range(len(shares)))
        shuffler.shuffle(order)
        state, other_state = policy.initial(), policy.initial()
        for times, *rest in periods:
            moved_shares, moved_times = [shares[i] for i in order], [times[i] for i in order]
            state, decision = policy.decide(state, self.observe(shares, (times, *rest)))
            other_state, moved = policy.decide(other_state, self.observe(moved_shares, (moved_times, *rest)))
            shares = decision.local_batch_sizes
            there = tuple(shares[i] for i in order)
            if there != moved.local_batch_sizes:
                assert max(abs(a - b) for a, b in zip(there, moved.local_batch_sizes, strict=True)) <= self.UNIT
                break

    def test_equal_workers_keep_equal_shares(self):
        policy, shares, state = self.make(1), (4 * self.UNIT,) * 5, None
        for epoch in range(1, 20):
            observation = self.observe(shares, ((0.25,) * 5, 0.0, 20, epoch))
            state, decision = policy.decide(state or policy.initial(), observation)
            assert not decision.changed

    @inherited
    @given(balancing_stories(), balancing_stories())
    def test_another_cluster_is_met_without_fail(self, story, other):
        """After an elastic restart there may be other workers; what was learned of the old ones does not matter."""
        policy, shares, periods = self.first(story)
        state = policy.initial()
        for period in periods:
            state, decision = policy.decide(state, self.observe(shares, period))
            shares = decision.local_batch_sizes
        _, shares, (period, *_) = other
        shares = tuple(self.UNIT * max(share, story[0]) for share in shares)
        _, decision = policy.decide(state, self.observe(shares, period))
        assert sum(decision.local_batch_sizes) == sum(shares)
