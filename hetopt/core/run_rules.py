"""The rules on which settings of a run go together, checked before anything starts.

A compression with its options, a ratio with its controller, averages of parameters with precision and policies, and any
of them with a training script that brings its own loop.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType

from hetopt.core import formatting
from hetopt.core.comm.composition import (
    CODINGS,
    CORRECTION,
    GATHER,
    NONE,
    OF_CORRECTION,
    Combination,
    combine,
    first_that_applies,
    why_not_averaged,
)
from hetopt.core.comm.options import IDENTITY
from hetopt.core.errors import BadInput, setting
from hetopt.core.plain_text import known, unknown
from hetopt.core.run_spec import (
    BATCH_POLICIES,
    BATCH_SETTINGS,
    RATIO_SETTINGS,
    STAND_IN,
    Compression,
    RunSpec,
    Settings,
    parse_policy,
)

OF_SESSIONS = "session"
"""The task of a run whose script was started without a plan."""

OPTIONS = ("bits", "levels", "rank", "floor_ratio", "least_gain", "coding", "momentum", "clip_norm")
"""Fields of a `Compression` that only some compressors have a use for."""


def checked(compression: Compression) -> Combination:
    """Return a compression's compressor, memory and collective, defaults filled in, once all its settings fit.

    Raises:
        BadInput: a name is unknown; the ratio is not 1 of a compressor that sends something of every element; memory,
            collective or an option do not go with the compressor; or a floor or least gain is set where a step cannot
            choose its ratio.
    """
    chosen = combine(compression.name, memory=compression.memory, collective=compression.collective)
    method = chosen.method
    if not method.by_ratio and compression.ratio != 1.0:
        raise BadInput(
            f"the ratio of {chosen.name} must be 1, as it sends something of every element, got {compression.ratio:g}.",
            hint="use topk, or a ratio of 1",
        )
    given = [option for option in OPTIONS if getattr(compression, option) is not None]
    strange = [option for option in given if option not in method.options]
    if chosen.memory != CORRECTION:
        strange += [option for option in given if option in OF_CORRECTION and option not in strange]
    if strange:
        raise BadInput(
            f"{chosen.name} with {chosen.memory} has no option {strange[0]}.", hint=f"leave {strange[0]} out"
        )
    if compression.coding is not None:
        known(compression.coding, CODINGS, "coding")
    if compression.least_gain is not None or compression.floor_ratio is not None:
        _check_levels(chosen)
    return chosen


def _check_levels(chosen: Combination) -> None:
    """Check that a step can choose between a selection, its floor and everything: by gathering, with a gradient memory.

    Raises:
        BadInput: the collective is another, or there is no memory.
    """
    if chosen.collective != GATHER:
        raise BadInput(
            f"floor_ratio and least_gain go with {GATHER}, as every worker has to know what its own selection keeps, "
            f"got {chosen.collective}.",
            hint=f"leave the collective out, or say {GATHER}",
        )
    if chosen.memory == NONE:
        raise BadInput(
            "Selections in levels count on what they leave out to come later, and nothing is held back without a "
            "memory.",
            hint="leave the memory out, or say error_feedback",
        )


CONTROLLERS: Mapping[str, str] = MappingProxyType(
    {
        "auto": "the compressor, collective and ratio that are predicted to reach the target first",
        "fixed": "one ratio",
        "warm_up": "ever less over four epochs, then the ratio (DGC)",
        "accordion": "ten times the ratio while the gradient's norm changes, the ratio while it does not",
        "gravac": "searches from 10x upwards while enough of the gradient is kept (GraVAC)",
        "threshold": "the ratio while little is lost, else everything (ScaDLES)",
        "scan": "weighs exchange time against gain (AR-Topk)",
    }
)


def parse_batch_policy(text: str) -> tuple[str, Settings]:
    """Parse a batch policy such as ``allocation(micro=4)`` into its name and the settings that are not its defaults.

    Raises:
        BadInput: there is no such policy or setting of it, or a value is out of its range.
    """
    return parse_policy(text, BATCH_POLICIES, BATCH_SETTINGS, "`batch_policy`", "batch policy")


def parse_ratio_policy(text: str) -> tuple[str, Settings]:
    """Parse a ratio policy such as ``gravac(window=50)`` into its name and the settings that are not its defaults.

    Raises:
        BadInput: there is no such policy or setting of it, or a value is out of its range.
    """
    return parse_policy(text, CONTROLLERS, RATIO_SETTINGS, "`ratio_policy`", "ratio policy")


def check_ratio_controller(name: str, ratio: float) -> None:
    """Refuse a ratio outside (0, 1], and 1 where the ratio controller ``name`` would have nothing to decide.

    Args:
        name: name of the ratio policy.
        ratio: fraction of the gradient's elements that the run was asked to send.

    Raises:
        BadInput: the ratio is outside (0, 1], or is 1 and the policy is not ``auto``, ``fixed`` or ``scan``.
    """
    if not 0 < ratio <= 1 or (ratio == 1 and name not in ("auto", "fixed", "scan")):
        raise BadInput(
            f"the ratio of {name} must be above 0 and below 1, got {ratio:g}.", hint="for example a ratio of 0.01"
        )


def why_not_local(spec: RunSpec) -> str | None:
    """Return why a run cannot average parameters (local SGD) with its other settings, in a sentence; None: it can."""
    sync, sums_too = spec.sync, spec.may_average
    return (None if sums_too else why_not_averaged(spec.compression.name)) or first_that_applies(
        {
            f"Under {sync.name} no gradients are exchanged, so there is nothing to decide about how they are.": (
                (spec.ratio_policy != "fixed" or spec.collective_policy != "fixed") and not sums_too
            ),
            f"The loss scale of fp16 has to be agreed on in every step, which {sync.name} leaves out; use bf16.": (
                spec.precision == "fp16"
            ),
        }
    )


def check_follows_noise(spec: RunSpec, *, devices: int = 1, rule: str | None = None) -> None:
    """Refuse a run whose global batch cannot follow the gradient noise (batch policy ``critical``).

    Args:
        spec: of the run.
        devices: that share a model.
        rule: by which the task's learning rate follows the batch size; None: that is not known here.

    Raises:
        BadInput: the run is a script's, averages parameters, compresses gradients or shards the model, its workers
            read samples in orders of their own, or its learning rate does not follow the batch size.
    """
    reason = first_that_applies(
        {
            "a script's loader gives batches of one size, and its optimizer has its own learning rate": (
                bool(spec.script) or spec.task == OF_SESSIONS
            ),
            "noise is measured in sums of whole gradients, so leave out `compression`, `ratio_policy` and `sync`": (
                spec.is_local or spec.steers_exchange or spec.compression.name != IDENTITY
            ),
            "no device of a sharded model has a whole gradient, whose noise is measured": (
                spec.shard not in (None, "none") or devices > 1
            ),
            "the task's `learning_rate_rule` is 'none', and a larger batch makes no more progress at the same rate": (
                rule == "none"
            ),
            "noise is that of samples in one order for all workers": _reads_apart(spec),
        }
    )
    if reason is not None:
        raise BadInput(f'`batch_policy="critical"` cannot be: {reason}.', hint="choose another batch policy")


def _reads_apart(spec: RunSpec) -> bool:
    """Return whether workers read the samples in more than one order: parts, copies of others' samples, or streams."""
    return spec.partition.name != "global" or spec.injection is not None or spec.stream is not None


def why_not_sharded(spec: RunSpec) -> str | None:
    """Return why a run's settings do not go with a model that devices shard, in a sentence; None: they do."""
    sync, name = spec.sync.name, spec.compression.name
    return first_that_applies(
        {
            f"Devices that share a model sum its gradient in every step, which {sync} leaves out.": spec.is_local,
            "How a sharded model's gradients travel is not steered: a ratio or collective policy needs whole ones.": (
                spec.ratio_policy != "fixed" or spec.collective_policy != "fixed"
            ),
            f"{name} works on whole matrices, of which a device of a sharded model has a part.": (
                checked(spec.compression).method.by_shape
            ),
            "The devices that share a model read one stream of samples: no partition, injection or replayed stream.": (
                _reads_apart(spec)
            ),
        }
    )


def steps_of_epochs(epochs: float, dataset_size: int, global_batch_size: int) -> int:
    """Return the optimizer steps of ``epochs`` passes over ``dataset_size`` samples, rounded, at least 1.

    Args:
        epochs: passes over the data, above 0; fractions are allowed.
        dataset_size: samples of an epoch.
        global_batch_size: samples of a step.
    """
    return max(1, round(epochs * dataset_size / global_batch_size))


OF_TASKS = (
    (
        ("learning_rate_scale",),
        "a script's optimizer keeps its own learning rate",
        "plan without `learning_rate_rule`, and start the script with its own option for the rate",
    ),
    (("partition", "injection", "stream"), "a script reads its own data", "leave out `partition`, `inject`, `stream`"),
    (("precision",), "a script says itself what it computes in", "plan without `precision`"),
    (("micro_batch_size",), "a script computes its part of a batch at once", "plan with a smaller `batch_size`"),
    (("prefetch",), "a script's own DataLoader reads", "give the DataLoader `num_workers`"),
    (("evaluate_every_epochs",), "a script evaluates in its own loop", "leave it out"),
    (("probe",), "a script is measured by running it", "`hetopt profile -- SCRIPT`"),
)
"""Fields of `RunSpec` that a script's run must leave at their defaults, the reason, and what to do instead."""


def check_for_script(spec: RunSpec) -> None:
    """Refuse a script's run with settings that only tasks have, such as ``precision``, or that its loop cannot keep.

    Raises:
        BadInput: such a setting is not at its default; the sentence says why, and what to do instead.
    """
    for names, reason, instead in OF_TASKS:
        for name in names:
            value, usual = getattr(spec, name), RunSpec.model_fields[name].default
            if value != usual:
                asked = setting(name, value) if isinstance(value, (float, int, str)) else f"`{name}`"
                raise BadInput(f"{asked} is for tasks: {reason}.", hint=instead)
    unfit = why_not_local(spec) if spec.is_local else None
    if spec.may_average:
        unfit = "A script's workers average parameters in the whole run or not at all, so auto cannot choose it."
    if unfit is None and spec.sync.stretch != 1:
        unfit = "A script sets its own learning rates, so there is no schedule that sync could stretch."
    if unfit is not None:
        raise BadInput(unfit, hint="leave out sync, or the other")


def check_script_batch(spec: RunSpec, samples: int) -> None:
    """Refuse a script that steps by another number of samples than the plan's global batch size.

    Args:
        spec: of the plan's run.
        samples: of a step over all workers, as the script has them.

    Raises:
        BadInput: the script's samples and the plan's global batch size differ.
    """
    planned, name = spec.global_batch_size, Path(spec.script[0]).name
    if samples != planned:
        raise BadInput(
            f"The plan steps by {planned:,} samples, and {name} by {samples:,}.",
            hint=f"start the script with its own option for {planned:,} samples on all workers together, or plan with "
            f"{setting('batch_size', samples)}",
        )


def left_to_script(spec: RunSpec) -> str:
    """Return a remark that the script's own loop decides length and checkpoints, and what the plan assumes of them."""
    stop = spec.stop
    amount, unit = (stop.max_epochs, "epoch") if stop.max_epochs else (stop.max_steps or 0, "step")
    saving = f", and with a checkpoint every {formatting.duration(spec.checkpoint_every_s)}" if spec.resumes else ""
    return (
        f"{Path(spec.script[0]).name} ends and saves by its own loop: the plan reckons with "
        f"{formatting.counted(amount, unit)}{saving}."
    )


def why_shares_differ(*, is_ddp: bool, normalises: bool) -> str:
    """Return half a sentence on why gradients of unequal local batches differ from one machine's, and what may mend it.

    Args:
        is_ddp: True: the script uses DistributedDataParallel; False: a session.
        normalises: whether the model has BatchNorm in training mode, which normalises each worker's samples by
            themselves.
    """
    as_ddp = ", as under DDP" if is_ddp else ""
    if normalises:
        mends = "SyncBatchNorm" if is_ddp else 'batch_norm="synchronized"'
        return f"BatchNorm normalises each worker's samples by themselves{as_ddp}; {mends} mends it"
    mends = as_ddp or "; weight= or gather may mend it"
    return f"the loss couples samples or averages over something else{mends}"


BUNDLED: Mapping[str, str] = MappingProxyType(
    {
        "digits": "hetopt.trainer.tasks.digits:digits",
        "resnet20-cifar10": "hetopt.trainer.tasks.vision:resnet20_cifar10",
        "lstm-small": "hetopt.trainer.tasks.language:lstm_small",
        STAND_IN: "hetopt.trainer.tasks.stand_in:stand_in",
    }
)
"""Bundled tasks by name: where each is defined, as ``module:attribute``. The stand-in is not offered to people."""


def check_found(reference: str) -> None:
    """Refuse a task reference whose bundled task, file or module does not exist; none of its code is run.

    Args:
        reference: name of a bundled task, ``file.py:attribute`` or ``module:attribute``; the attribute is not looked
            up.

    Raises:
        BadInput: there is no such bundled task, file or module.
    """
    if reference in BUNDLED:
        return
    place, colon, _ = reference.rpartition(":")
    if not colon:
        raise names_no_task(reference)
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise BadInput(
                f"the task's file {place} is not there: {Path(place).resolve()} does not exist.",
                hint="go to the folder that holds it, or give its path when you profile",
            )
        return
    package = place.partition(".")[0]
    if package not in sys.modules and PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None:
        raise BadInput(
            f"there is no module '{place}' to import the task from.",
            hint="go to the folder that holds it, or name its file when you profile: path/to/file.py:attribute",
        )


def check_data_folder(folder: Path) -> None:
    """Refuse a folder for a task's data that does not exist.

    Raises:
        BadInput: the folder does not exist, or is no folder.
    """
    if not folder.is_dir():
        raise BadInput(f"there is no data folder {folder}.", hint="give the folder that holds the task's files")


def names_no_task(reference: str) -> BadInput:
    """Return the error for a text that names neither a task nor a script, with a hint on what to write instead."""
    if reference.endswith(".py"):
        return BadInput(f"'{reference}' names a file but no task in it.", hint=f"Add the attribute: {reference}:task")
    if "/" in reference or Path(reference).exists():
        return BadInput(
            f"'{reference}' is neither a bundled task nor a Python script, whose name ends in .py.",
            hint="give the path of the script, or of the file and the task in it: file.py:attribute",
        )
    offered = [name for name in BUNDLED if name != STAND_IN]
    custom = "your own is module:attribute or file.py:attribute"
    return unknown(reference, offered, "bundled task", hint=f"choose one of: {', '.join(offered)}; {custom}")
