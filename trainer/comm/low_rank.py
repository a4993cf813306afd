"""PowerSGD: every matrix of the gradient as the product of two thin ones, each of which can be summed on the way.

For a matrix G (m x n) of each worker and a common Q (n x r), one step of power iteration:

    P = orthonormal(sum G Q)        first all-reduce, with everything that is sent as it is
    Q' = sum G^T P                  second all-reduce
    sum G ~ P Q'^T,  next Q = Q'    each worker has sent P (G^T P)^T of its own G

Vectors, and matrices that factors would not make smaller, are sent as they are. Exact when the sum has rank r or less.
(Vogels et al., arXiv 1905.13727.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetopt.core.comm.payload_bytes import Shapes, low_rank, matrix_shape
from hetopt.trainer.comm.compressor import Payload, State, Summed, Turn, shared_generator
from hetopt.trainer.comm.vectors import Workspace

_DEPENDENT = 1e-24  # of a column's energy: less is left of it than rounding in double precision would leave


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixPlace:
    """Offsets of one parameter, as a matrix, in the flat gradient and in the flat left and right factors.

    ``rank`` 0: it is sent as it is, among the left factors.

    Attributes:
        rows: rows of the matrix.
        columns: columns of the matrix.
        rank: columns of its factors; 0: the matrix is sent as it is, among the left factors.
        start: first place in the flat gradient.
        left: first place in the flat left factors.
        right: first place in the flat right factors.
    """

    rows: int
    columns: int
    rank: int
    start: int
    left: int
    right: int

    def matrix(self, flat: Tensor) -> Tensor:
        """Return a view of the parameter's part of a flat gradient, [rows, columns]."""
        return flat[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)

    def left_of(self, factors: Tensor) -> Tensor:
        """Return a view of this parameter's part of the flat left factors, [rows, rank]; at rank 0 its whole matrix."""
        width = self.rank or self.columns
        return factors[self.left : self.left + self.rows * width].view(self.rows, width)

    def right_of(self, factors: Tensor) -> Tensor:
        """Return a view of this parameter's part of the flat right factors, [columns, rank]."""
        return factors[self.right : self.right + self.columns * self.rank].view(self.columns, self.rank)


def matrix_places(shapes: Shapes, rank: int) -> tuple[MatrixPlace, ...]:
    """Return where parameters of these shapes lie in gradient and factors, with ``rank`` as the largest rank.

    A rank of 0 marks a parameter that is sent whole.
    """
    places: list[MatrixPlace] = []
    start = left = right = 0
    for shape in shapes:
        rows, columns = matrix_shape(shape)
        used = low_rank(rows, columns, rank)
        places.append(MatrixPlace(rows=rows, columns=columns, rank=used, start=start, left=left, right=right))
        start, left, right = start + rows * columns, left + rows * (used or columns), right + columns * used
    return tuple(places)


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRankPayload(Payload):
    """Payload of PowerSGD: each matrix as ``left right^T``, and what is sent uncompressed among the left factors.

    Attributes:
        places: places where each parameter lies.
        left: flat left factors, fp32.
        right: flat right factors, fp32.
        numel: elements of the gradient.
    """

    places: Sequence[MatrixPlace]
    left: Tensor
    right: Tensor
    numel: int

    def add_to(self, flat: Tensor, sign: int = 1) -> None:
        """Add the factors' products to a flat gradient, in place; ``sign`` -1 subtracts them."""
        for place in self.places:
            matrix, left = place.matrix(flat), place.left_of(self.left)
            if place.rank:
                matrix.addmm_(left, place.right_of(self.right).t(), alpha=sign)
            else:
                matrix.add_(left, alpha=sign)


class LowRank(Summed[LowRankPayload]):
    """Compressor of each gradient matrix to a product of two thin ones of rank r (PowerSGD).

    Workers may be unlike machines, whose libraries add in unlike orders. So whatever all of them must compute alike,
    orthonormal columns and products of summed factors, is made of single additions and multiplications in a fixed
    order, which every machine rounds alike.

    Args:
        shapes: shapes of the parameters, in the order of the flat gradient.
        rank: largest rank r of a product.
        seed: seed of the first Q, the same on every worker.
        device: device where the gradient lies; None: the CPU.
    """

    def __init__(self, shapes: Shapes, *, rank: int, seed: int = 0, device: torch.device | None = None) -> None:
        self._places = matrix_places(shapes, rank)
        self._left_elements = sum(p.rows * (p.rank or p.columns) for p in self._places)
        right_elements = sum(p.columns * p.rank for p in self._places)
        first = torch.randn(right_elements, generator=shared_generator(seed, 0))
        self._right = first.to(device) if device is not None else first
        self._workspace = Workspace()

    def encode(self, flat: Tensor, turn: Turn) -> LowRankPayload:
        """Return the left factors, all-reduced here, with this worker's right factors; all workers must call it.

        The payload's memory is reused by the next call.
        """
        take, device = self._workspace.take, flat.device
        left = take("left", self._left_elements, torch.float32, device)
        for place in self._places:
            if place.rank:
                torch.mm(place.matrix(flat), place.right_of(self._right), out=place.left_of(left))
            else:
                place.left_of(left).copy_(place.matrix(flat))
        sent_left = take("sent left", left.numel(), torch.float32, device).copy_(left)
        turn.channel.all_reduce(left)
        right = take("right", self._right.numel(), torch.float32, device)
        for place in self._places:
            if place.rank:
                basis = place.left_of(left)
                basis.copy_(orthonormal(basis))
                place.left_of(sent_left).copy_(basis)
                torch.mm(place.matrix(flat).t(), basis, out=place.right_of(right))
        sent_right = take("sent right", right.numel(), torch.float32, device).copy_(right)
        return LowRankPayload(places=self._places, left=sent_left, right=sent_right, numel=flat.numel())

    def wire(self, payload: LowRankPayload, out: Tensor) -> Tensor:
        """Return the right factors of all matrices, to be all-reduced in place."""
        return self._workspace.take("right", payload.right.numel(), torch.float32, payload.right.device)

    def decode(self, payload: LowRankPayload, total: Tensor, out: Tensor, turn: Turn) -> None:
        """Write the products of the summed factors into ``out``; keep ``total`` as the next step's right factors.

        Args:
            payload: what this worker sent; not used.
            total: right factors of all matrices, summed over the workers.
            out: 1-D fp32, [numel]; overwritten.
            turn: this worker's step and seed, by which factors that have become zero are drawn anew.
        """
        left = self._workspace.take("left", self._left_elements, torch.float32, out.device)
        for place in self._places:
            if place.rank:
                write_product(place.left_of(left), place.right_of(total), place.matrix(out))
            else:
                place.matrix(out).copy_(place.left_of(left))
        self._right.copy_(total)
        self._refill(turn)

    def _refill(self, turn: Turn) -> None:
        """Draw columns of Q anew that have become zero (as they do with a gradient of zeros): they would stay so."""
        for place in self._places:
            if place.rank:
                right = place.right_of(self._right)
                empty = (right == 0).all(dim=0)
                if empty.any():
                    drawn = torch.randn(right.shape, generator=shared_generator(turn.seed, turn.step + 1))
                    right[:, empty] = drawn.to(right.device)[:, empty]

    def state(self) -> State:
        """Return a copy of the right factors that the next step starts from, as ``{"right": ...}``."""
        return {"right": self._right.clone()}

    def load_state(self, state: State) -> None:
        """Restore the right factors that `state` returned."""
        self._right.copy_(state["right"])


def orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns, [rows, columns], fp32; a column that depends on others is zero.

    Columns are taken in order. Only single IEEE operations in a fixed order are used, so that all machines get the same
    bits. NaN stays NaN.
    """
    basis: list[Tensor] = []
    for column in columns.double().unbind(dim=1):
        whole = ordered_sum(column * column)
        for other in basis:
            column = column - other * ordered_sum(column * other)
        left = ordered_sum(column * column)
        # Not `left > ...`: a NaN must stay in the basis, for all to see.
        basis.append(torch.where(left <= whole * _DEPENDENT, torch.zeros_like(column), column / left.sqrt()))
    return torch.stack(basis, dim=1).float()


def ordered_sum(values: Tensor) -> Tensor:
    """Return the sum of a 1-D tensor, not empty, added in one order, so that all machines get the same bits."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        head = values[:half].clone()
        head[: len(values) - half] += values[half:]
        values = head
    return values[0]


def write_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write ``left right^T`` into ``out``, [rows, columns], in one order, so that all machines get the same bits."""
    torch.mul(left[:, :1], right[:, 0], out=out)
    for column in range(1, left.shape[1]):
        out.add_(left[:, column : column + 1] * right[:, column])
