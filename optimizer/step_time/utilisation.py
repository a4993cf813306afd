"""How long a step takes by its counted operations alone, before anything was measured: a prior with a wide interval.

    t(b) = fixed + F b / (u P)

    t       step of ``b`` samples on one `REFERENCE` GPU [s]; on others by what public measurements say (`gpu_transfer`)
    fixed   launching kernels, loading, updating: what does not shrink with the model [s]
    F       operations of matrix work, forward and backward, a sample: 3 x forward, or 6 a parameter and token
            (Kaplan et al. 2020, section 2.1; Hoffmann et al. 2022, appendix F)
    P       the GPU's peak rate in the precision [1/s]
    u       utilisation ("MFU", Chowdhery et al. 2022, appendix B): by kind of model and class of precision

``fixed``, ``u`` and the spread of log t are fitted to public throughputs of jobs whose operations can be counted
(`benchmarks._utilisation_fit`), each job left out in turn; only those few numbers ship.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from hetopt.optimizer.model_counts import Kind
from hetopt.optimizer.step_time.gpu_transfer import Gpu, Precision, is_half

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

CONTRIBUTION = 3.0
"""Operations of a step over those of its forward pass: backward multiplies each matrix twice."""


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """What is believed of one kind of model in one class of precision.

    Attributes:
        share: of the peak rate that training reaches, in the median of jobs.
        log_sd: standard deviation of the log of (true / predicted) step time of another job on the reference GPU.
        jobs: that it was fitted to.
    """

    share: float
    log_sd: float
    jobs: int


@dataclass(frozen=True, kw_only=True)
class UtilisationPrior:
    """All of it.

    Attributes:
        fixed_s: of a step, whatever is computed.
        by_kind: utilisation by kind and by whether matrices are multiplied in 16 bits: ``"transformer half"``.
        measured: when the throughputs were measured, in words.
    """

    fixed_s: float
    by_kind: Mapping[str, Utilisation]
    measured: str

    def of(self, kind: Kind, precision: Precision) -> Utilisation:
        """Of a kind of model in a precision."""
        return self.by_kind[key(kind, half=is_half(precision))]

    def step_time_s(self, kind: Kind, precision: Precision, flops: float) -> float:
        """``t`` of so many operations in a step, on the reference GPU."""
        return self.fixed_s + flops / (self.of(kind, precision).share * REFERENCE.tflops(precision) * 1e12)


def key(kind: Kind, *, half: bool) -> str:
    """The name of a kind and class of precision."""
    return f"{kind} {'half' if half else 'full'}"


def save(prior: UtilisationPrior, path: Path = POSTERIOR) -> None:
    """Write a prior as `utilisation_prior` reads it."""
    rounded = {
        name: {
            "share": float(f"{one.share:.3g}"),
            "log_sd": float(f"{one.log_sd:.3g}"),
            "jobs": one.jobs,
        }
        for name, one in prior.by_kind.items()
    }
    found = {**asdict(prior), "fixed_s": float(f"{prior.fixed_s:.3g}"), "by_kind": rounded}
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


@cache
def utilisation_prior() -> UtilisationPrior:
    """The prior that ships."""
    stored = json.loads(POSTERIOR.read_text(encoding="utf-8"))
    return UtilisationPrior(
        fixed_s=stored["fixed_s"],
        by_kind={name: Utilisation(**one) for name, one in stored["by_kind"].items()},
        measured=stored["measured"],
    )
