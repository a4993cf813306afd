"""How many more steps a goal takes when compression holds part of the gradient back.

    S(B, gain) = Smin / gain + Emin / B
    S(B, gain) / S(B, 1) = rho / gain + 1 - rho,        rho = Smin / (Smin + Emin / B) = B / (B + Emin / Smin)

(McCandlish et al. 2018 at gain 1.) rho is the share of the steps that averaging more samples would not save. With error
feedback, what compression holds back arrives later: the noise that it carries is averaged all the same, while progress
along the mean gradient is slowed by 1 / gain at worst, the rate that contraction arguments give (Stich and Karimireddy
2020). That mapping is an assumption, not a theorem about any one model: treat it as the cautious end.

Standard library only.
"""

from __future__ import annotations


def step_inflation(gain: float, deterministic_share: float = 1.0) -> float:
    """Steps at this gain over steps of dense training, at least 1.

    Args:
        gain: retained gradient energy, in (0, 1].
        deterministic_share: rho; 1 where it is not known, which assumes the most.
    """
    if not 0 < gain <= 1 or not 0 <= deterministic_share <= 1:
        raise ValueError(f"gain is in (0, 1] and the share in [0, 1], not {gain}, {deterministic_share}")
    return deterministic_share / gain + 1 - deterministic_share


def deterministic_share(global_batch_size: float, critical_batch_size: float) -> float:
    """Rho at a batch size, given the critical one, ``Emin / Smin``; both in samples."""
    if not global_batch_size > 0 or critical_batch_size < 0:
        raise ValueError(f"impossible batch sizes: {global_batch_size}, critical {critical_batch_size}")
    return global_batch_size / (global_batch_size + critical_batch_size)
