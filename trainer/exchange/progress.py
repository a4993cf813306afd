"""How far an exchange carries training, against sending everything: what is measured on the gradients themselves.

To first order a step lowers the loss by the learning rate times ``<s, G>``, with s the sum that the workers apply and G
the gradient of the loss; sending everything, by ``|G|^2``. Their ratio is the progress of the step in dense steps. It
falls below 1 where what was held back comes so late that the gradient has turned meanwhile, and only there: neither the
energy that is kept nor the delay says when that is.

G is unknown, but every worker v sees it in its own gradient g_v, through noise of its own. Products of it with what
*others* brought have the right mean:

    <s, G>  ~  sum over v of <s - s_v, g_v>
    |G|^2   ~  sum over v of <g - g_v, g_v>,        s = sum of all s_v,  g = sum of all g_v

Of the first sum every worker knows its term, without a message; of the second it would need what was held back by the
others, so sketches of gradients are exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Terms of both sums, of one worker or of all. Only ratios of sums over all workers, and over time, say much."""

    achieved: float
    dense: float
