"""Step time predicted from counted operations and bytes alone, before anything was measured.

For transformers, on any GPU whose data sheet is known (the roofline's two terms, Williams et al. 2009, added):

    t(b) = b (F + (r - 1) F_a) / (u P) + b (m A + v) / W + n l

    F, F_a   operations of a sample, forward and backward, and of these attention's: 3 x forward
             (Kaplan et al. 2020, section 2.1; Hoffmann et al. 2022, appendix F)
    r        how many times as long an operation of attention takes
    P, W     the data sheet's peak rate of matrix products in the precision [1/s], and memory bandwidth [B/s]
    u        share of the peak that matrix products reach
    A, v     bytes of a sample's activations, with the scores that attention keeps where it is not fused; ``m`` how
             often training moves them through memory; bytes moved for the output over a vocabulary
    n l      kernels of a step, and the launch of one

``u``, ``m`` and ``r`` are the same for all transformers, precisions and GPUs.

For convolutions, on one `REFERENCE` GPU, and from there by public measurements of others (`gpu_transfer`):

    t(b) = fixed + F b / (u P)

``u`` the utilisation ("MFU", Chowdhery et al. 2022, appendix B). All numbers and the spread of log t are fitted to
public throughputs (`benchmarks._utilisation_fit`), sources left out in turn; only these few ship.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from hetopt.core.profile import Counted
from hetopt.optimizer.model_counts import FULL, LOGIT_BYTES, ModelCount, Recipe
from hetopt.optimizer.step_time.gpu_transfer import Gpu, Precision, is_half

MOVED_LOGIT_BYTES = 40
"""Of each entry of a language model's output: the product writes it in 16 bits, it is copied to 32 (6 bytes), its
logarithm (8) and the two gradients of that (16) are made one after the other, copied to 16 (6), and read by two
products (4)."""

POSTERIOR = Path(__file__).parent / "utilisation.json"

REFERENCE = Gpu(
    key="A100 40 SXM4",
    capability=8.0,
    fp32_tflops=19.5,
    tf32_tflops=156,
    fp16_tflops=312,
    bandwidth_gb_per_s=1555,
    memory_gib=40,
)
"""The GPU with the most public measurements (NVIDIA A100 datasheet)."""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Roofline model of the step time of transformers, as fitted to public throughputs.

    Attributes:
        share: ``u``.
        passes: ``m``.
        attention: ``r``.
        usual: share of the peak that whole steps reach, in the median of jobs.
        log_sd: standard deviation of the log of (true / predicted) step time of a job that was not fitted.
        gpu_log_sd: the same for a job that was timed, on another GPU than where it was.
        jobs: number of jobs in the fit.
    """

    share: float
    passes: float
    attention: float
    usual: float
    log_sd: float
    gpu_log_sd: float
    jobs: int

    def counted(self, model: ModelCount, precision: Precision, recipe: Recipe = FULL) -> Counted:
        """Return a sample's operations, scaled to run at the peak rate, and the bytes that it moves through memory."""
        flops = model.forward_flops + (self.attention - 1) * model.attention_flops
        moved = self.passes * (model.activation_bytes + model.score_bytes)
        moved += (MOVED_LOGIT_BYTES - self.passes * LOGIT_BYTES) * model.logits
        return Counted(
            flops=recipe.slowdown * recipe.passes * flops / self.share,
            moved_bytes=moved * (1 if is_half(precision) else 2),
            layers=model.layers,
            weight_bytes=recipe.weight_bytes(model.parameters, half=is_half(precision)),
            log_sd=self.log_sd,
        )


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Share of a GPU's peak rate that convolutions reach in training, in one class of precision.

    Attributes:
        share: ``u``, in the median of jobs.
        log_sd: standard deviation of the log of (true / predicted) step time of another job on the reference GPU.
        jobs: number of jobs in the fit.
    """

    share: float
    log_sd: float
    jobs: int


@dataclass(frozen=True, kw_only=True)
class UtilisationPrior:
    """Prior of step times from counted operations: of transformers, and of convolutions.

    Attributes:
        transformer: model of transformers.
        fixed_s: seconds of a step of convolutions, whatever is computed.
        convolution: utilisation by convolutions for each class of precision, ``"half"`` and ``"full"``.
        measured: when the throughputs were measured, in words.
    """

    transformer: Roofline
    fixed_s: float
    convolution: Mapping[str, Utilisation]
    measured: str

    def counted(self, model: ModelCount, precision: Precision, recipe: Recipe = FULL) -> Counted:
        """Return a sample's operations, scaled to run at the peak rate, and its bytes moved, for a model and recipe."""
        if model.kind == "transformer":
            return self.transformer.counted(model, precision, recipe)
        known = self.convolution[precision_class(precision)]
        return Counted(
            flops=recipe.slowdown * recipe.passes * model.forward_flops / known.share,
            layers=model.layers,
            weight_bytes=recipe.weight_bytes(model.parameters, half=is_half(precision)),
            log_sd=known.log_sd,
        )


def sample_s(counted: Counted, gpu: Gpu, precision: Precision) -> float:
    """Return the seconds that a GPU takes for one sample of counted operations and bytes, by its data sheet."""
    computing_s = counted.flops / (1e12 * gpu.tflops(precision))
    return computing_s + (counted.moved_bytes or 0.0) / (1e9 * gpu.bandwidth_gb_per_s)


def precision_class(precision: Precision) -> str:
    """Return the key of a precision in `UtilisationPrior.convolution`: 'half' if 16-bit, else 'full'."""
    return "half" if is_half(precision) else "full"


def save(prior: UtilisationPrior, path: Path = POSTERIOR) -> None:
    """Write a prior to a JSON file as `utilisation_prior` reads it, each number rounded to three significant digits."""

    def rounded(node: object) -> object:
        """Return plain values with each float at three significant digits."""
        if isinstance(node, Mapping):
            return {name: rounded(value) for name, value in node.items()}
        return float(f"{node:.3g}") if isinstance(node, float) else node

    path.write_text(json.dumps(rounded(asdict(prior)), indent=2) + "\n", encoding="utf-8")


@cache
def utilisation_prior() -> UtilisationPrior:
    """Return the bundled prior of step times from counted operations, read once from ``utilisation.json``."""
    stored = json.loads(POSTERIOR.read_text(encoding="utf-8"))
    return UtilisationPrior(
        transformer=Roofline(**stored["transformer"]),
        fixed_s=stored["fixed_s"],
        convolution={name: Utilisation(**known) for name, known in stored["convolution"].items()},
        measured=stored["measured"],
    )
