"""The synchronization policies by name, and what of a run does not go with them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hetopt.core.comm.composition import why_not_synchronised
from hetopt.core.run_spec import RunSpec
from hetopt.core.synchronization import SyncName

POLICIES: Mapping[SyncName, str] = MappingProxyType(
    {
        "bsp": "gradients are summed in every step",
        "local-sgd": "parameters are averaged every H steps",
        "fedavg": "parameters of a part of the workers are averaged some times an epoch",
        "ssp": "updates of all arrive at most so many steps late (stale synchronous parallel)",
        "selsync": "parameters are averaged while gradients change (SelSync)",
        "auto": "gradients are summed, until averages of parameters promise to take clearly less time",
    }
)


def why_not_local(spec: RunSpec) -> str | None:
    """One sentence on what of a run does not go with workers that train for themselves; None where all does."""
    sync = spec.sync
    reason = why_not_synchronised(spec.compression.name, "updates" if sync.name == "ssp" else "parameters")
    if reason is not None:
        return reason
    if sync.fragments > 1 and (sync.momentum, sync.buffers) != ("keep", "average"):
        return (
            "Fragments of a model travel alone: momentum stays each worker's own, and running statistics are averaged."
        )
    if spec.ratio_policy != "fixed" or spec.collective_policy != "fixed":
        return f"Under {sync.name} no gradients are exchanged, so there is nothing to decide about how they are."
    if spec.learning_rate_rule == "adascale":
        return f"Under {sync.name} nobody sees the sum of all gradients, whose noise adascale follows."
    if spec.precision == "fp16":
        return f"The loss scale of fp16 has to be agreed on in every step, which {sync.name} leaves out; use bf16."
    return None


def why_not_settling(spec: RunSpec) -> str | None:
    """One sentence on what of a run does not go with sync ``auto``; None where all does."""
    if len(spec.workers) > 1 and spec.ratio_policy != "auto":
        return (
            "Sync auto weighs averages of parameters against the best exchange of gradients, which the ratio policy "
            f"auto looks for and {spec.ratio_policy} does not."
        )
    if spec.learning_rate_rule == "adascale":
        return "Workers that average parameters do not see the sum of all gradients, whose noise adascale follows."
    if spec.precision == "fp16":
        return "The loss scale of fp16 has to be agreed on in every step, which averages leave out; use bf16."
    return None


def steps_of_round(epochs: float, dataset_size: int, global_batch_size: int) -> int:
    """Steps of so many passes over the data; at least one."""
    return max(1, round(epochs * dataset_size / global_batch_size))
