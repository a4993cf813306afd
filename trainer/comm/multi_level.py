"""Compresses the compressed, as GraVAC does: a second selection among the elements of a first."""

from __future__ import annotations

from torch import Generator, Tensor

from hetopt.trainer.comm.compressor import Compressor
from hetopt.trainer.comm.payload import SparsePayload


class MultiLevelCompressor:
    """Selects ``floor_ratio`` of the gradient, and of that as much as makes ``ratio`` of the whole.

    While a controller tries smaller and smaller ratios, only the floor's selection looks at the whole gradient. Of
    nested selections such as Top-k this gives what selecting at once would. A ratio above the floor is selected at
    once. (Tyagi and Swany, arXiv 2305.12201.)

    Args:
        inner: selects, both times.
        floor_ratio: fraction of the elements that the first selection keeps.
    """

    def __init__(self, inner: Compressor[SparsePayload], floor_ratio: float) -> None:
        self._inner = inner
        self._floor_ratio = floor_ratio

    @property
    def name(self) -> str:
        """The inner compressor's: on the wire there is no difference."""
        return self._inner.name

    def compress(self, flat: Tensor, ratio: float, generator: Generator | None) -> SparsePayload:
        """Select twice; as deterministic as the inner compressor."""
        if ratio >= self._floor_ratio:
            return self._inner.compress(flat, ratio, generator)
        floor = self._inner.compress(flat, self._floor_ratio, generator)
        # Of the elements that are there, which may be a few more or less than the floor's fraction.
        part = min(1.0, ratio * flat.numel() / floor.values.numel())
        chosen = self._inner.compress(floor.values, part, generator)
        return SparsePayload(
            indices=floor.indices.index_select(0, chosen.indices), values=chosen.values, numel=flat.numel()
        )
