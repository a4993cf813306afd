"""What becomes of an average: taken as it is, or stepped towards as an optimizer would (DiLoCo, arXiv 2311.08105).

The averaged update ``u`` of all workers, mean minus the last common parameters ``x``, is taken as a gradient of its
own, downhill. With the rate ``r`` and Nesterov's momentum ``m``::

    v <- m v + u
    x <- x + r (u + m v)

With ``r`` 1 and ``m`` 0 that is the average: local SGD. Every worker does the same to the same numbers, so that nothing
more is sent.
"""

from __future__ import annotations

from torch import Tensor


class OuterStep:
    """Turns averaged updates into outer steps, and remembers its momentum.

    Args:
        parameters: elements that are stepped; running statistics behind them are averaged as they are.
        rate: of the outer step.
        momentum: of the outer step, in [0, 1).
        like: a tensor of the device and type that updates have.
    """

    def __init__(self, parameters: int, *, rate: float, momentum: float, like: Tensor) -> None:
        self._rate, self._momentum = rate, momentum
        self._velocity = like.new_zeros(parameters if momentum else 0)
        self._parameters = parameters

    def take(self, update: Tensor, begin: int = 0) -> None:
        """Make of an averaged update, in place, what is added to the last common parameters.

        Args:
            update: 1-D, of the elements from ``begin`` on.
            begin: where in the model it begins.
        """
        own = update[: max(0, self._parameters - begin)]
        if self._momentum:
            velocity = self._velocity[begin : begin + own.numel()]
            velocity.mul_(self._momentum).add_(own)
            own.add_(velocity, alpha=self._momentum)
        if self._rate != 1:
            own.mul_(self._rate)

    def state(self) -> Tensor:
        """Its momentum, [parameters], or nothing where it has none."""
        return self._velocity

    def load_state(self, velocity: Tensor) -> None:
        """Go on with a momentum that was kept."""
        self._velocity.copy_(velocity)
