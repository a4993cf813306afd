"""The gradients of many parameters side by side: float32 numbers in one buffer, float64 in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_DOUBLE = (torch.float64, torch.complex128)


@dataclass(slots=True)
class Place:
    """Where the gradient of one parameter lies in a `FlatGradients`.

    Attributes:
        real: its numbers in the buffer, in the parameter's shape; of a complex one with a last dimension of two.
        view: the same as the parameter sees it.
        used: whether a gradient was put here.
        rows: which rows have a gradient, where it is sparse; None: all of them.
        given: what was left in the parameter's ``.grad``; None: nothing.
    """

    real: Tensor
    view: Tensor
    used: bool = False
    rows: Tensor | None = None
    given: Tensor | None = None


class FlatGradients:
    """Buffers with room for one gradient of every parameter.

    Args:
        parameters: whose gradients.
        single: where the float32 ones are to lie; None: anywhere.
        ahead: float32 numbers that lie before them, where they lie anywhere: to travel along.

    Attributes:
        single: [elements] float32.
        whole: [ahead + elements] the same with the numbers before them.
        double: [elements] float64.
        places: of the parameters, in their order.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], single: Tensor | None = None, *, ahead: int = 0) -> None:
        reals = [torch.view_as_real(one) if one.is_complex() else one for one in parameters]
        device = parameters[0].device if parameters else torch.device("cpu")
        wide = [one.dtype in _DOUBLE for one in parameters]
        sizes = [real.numel() for real in reals]
        numbers = ahead + _total(sizes, wide, False)
        self.whole = torch.zeros(numbers, device=device) if single is None else single
        self.single = self.whole[ahead:]
        self.double = torch.zeros(_total(sizes, wide, True), device=device, dtype=torch.float64)
        narrow_parts = iter(
            torch.split(self.single, [n for n, is_wide in zip(sizes, wide, strict=True) if not is_wide])
        )
        wide_parts = iter(torch.split(self.double, [n for n, is_wide in zip(sizes, wide, strict=True) if is_wide]))
        self.places: list[Place] = []
        for parameter, real, is_wide in zip(parameters, reals, wide, strict=True):
            own = next(wide_parts if is_wide else narrow_parts).view(real.shape)
            self.places.append(Place(real=own, view=torch.view_as_complex(own) if parameter.is_complex() else own))
        self._views = [place.view for place in self.places]
        self._version = self._versions()

    def put(self, index: int, gradient: Tensor, weight: float) -> None:
        """Write a gradient times ``weight`` to its place. A weight of 0 leaves zeros, whatever the gradient is."""
        place, gradient = self.places[index], gradient.detach()
        place.used, place.rows = weight != 0, None
        if weight == 0:
            place.real.zero_()
        elif gradient.layout == torch.sparse_coo and gradient.sparse_dim() == 1:
            gradient = gradient.coalesce()
            rows = gradient.indices()[0]
            place.view.zero_()
            place.view[rows] = gradient.values() * weight
            place.rows = torch.zeros(len(place.view), dtype=torch.uint8, device=place.view.device)
            place.rows[rows] = 1
        elif gradient.layout != torch.strided:
            torch.mul(gradient.to_dense(), weight, out=place.view)
        elif gradient.data_ptr() == place.view.data_ptr():
            place.view.mul_(weight)
        else:
            torch.mul(gradient, weight, out=place.view)

    def put_all(self, gradients: Sequence[Tensor | None], weight: float, *, first: int = 0) -> bool:
        """Write gradients times ``weight`` to places that follow each other; None leaves zeros.

        Args:
            gradients: of the parameters from the ``first`` on.
            weight: of this worker.
            first: parameter's number.

        Returns:
            Whether each has one, and a dense one.
        """
        dense = [one.detach() for one in gradients if one is not None and one.layout == torch.strided]
        if weight and len(dense) == len(gradients):
            views = self._views[first : first + len(dense)]
            torch._foreach_copy_(views, dense)
            if weight != 1:
                torch._foreach_mul_(views, weight)
            self._all_used(self.places[first : first + len(dense)])
            return True
        for index, gradient in enumerate(gradients, start=first):
            if gradient is None:
                self.clear(index)
            else:
                self.put(index, gradient, weight)
        return False

    def all_used(self) -> None:
        """Every place has a gradient, and a dense one."""
        self._all_used(self.places)

    @staticmethod
    def _all_used(places: Sequence[Place]) -> None:
        for place in places:
            place.used, place.rows = True, None

    def clear(self, index: int) -> None:
        """Leave zeros at a place, and no gradient."""
        place = self.places[index]
        place.real.zero_()
        place.used, place.rows, place.given = False, None, None

    def add(self, other: FlatGradients) -> None:
        """Add the gradients of another one for the same parameters."""
        self.single.add_(other.single)
        self.double.add_(other.double)
        for own, more in zip(self.places, other.places, strict=True):
            if more.used:
                alike = more.rows if not own.used else None
                if own.used and own.rows is not None and more.rows is not None:
                    alike = own.rows | more.rows
                own.used, own.rows = True, alike

    def take_over(self, index: int, other: FlatGradients, its: int) -> None:
        """The gradient that another one has of the same parameter."""
        own, old = self.places[index], other.places[its]
        own.real.copy_(old.real)
        own.used, own.rows, own.given = old.used, old.rows, None

    def give(self, index: int, parameter: nn.Parameter) -> None:
        """Leave in ``.grad`` what is at a place: sparse where only some rows have a gradient, None where it is none."""
        place = self.places[index]
        if not place.used:
            place.given = None
        elif place.rows is None:
            place.given = place.view
        else:
            rows = place.rows.nonzero()[:, 0]
            place.given = torch.sparse_coo_tensor(
                rows[None], place.view[rows], place.view.shape, is_coalesced=True, check_invariants=False
            )
        parameter.grad = place.given

    def holds(self, index: int, parameter: nn.Parameter) -> bool:
        """Whether ``.grad`` is what `give` left there (its numbers may have been changed in place)."""
        given, gradient = self.places[index].given, parameter.grad
        if given is None or gradient is None:
            return False
        if given is gradient:
            return True
        strided = given.layout == gradient.layout == torch.strided
        return strided and given.data_ptr() == gradient.data_ptr()

    def note(self) -> None:
        """From here on `changed` looks at who else writes into the buffers."""
        self._version = self._versions()

    @property
    def changed(self) -> bool:
        """Whether somebody wrote into the buffers, or what was given of them, since `note`."""
        return self._versions() != self._version

    @property
    def is_cleared(self) -> bool:
        """Whether all that was given is zero now."""
        given = [place.given for place in self.places if place.given is not None]
        return not any(bool(one.to_dense().any()) for one in given)

    def wipe(self) -> None:
        """Leave zeros where there are gradients."""
        self.single.zero_()
        self.double.zero_()
        for place in self.places:
            if place.rows is not None:
                place.rows.zero_()

    def _versions(self) -> tuple[int, ...]:
        given = [place.given for place in self.places if place.given is not None and place.given is not place.view]
        return self.single._version, self.double._version, *(one._version for one in given)


def _total(sizes: Sequence[int], wide: Sequence[bool], which: bool) -> int:
    return sum(size for size, is_wide in zip(sizes, wide, strict=True) if is_wide is which)
