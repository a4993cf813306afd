"""What of a run goes with a training script, which brings its own data, loader, optimizer and loop."""

from __future__ import annotations

from pathlib import Path

from hetopt.core import formatting
from hetopt.core.errors import BadInput, setting
from hetopt.core.run_spec import RunSpec
from hetopt.core.synchronization_rules import why_not_local

OF_TASKS = (
    (
        ("learning_rate_scale", "learning_rate_rule"),
        "a script's optimizer keeps its own learning rate",
        "plan without `learning_rate_rule`, and start the script with its own option for the rate",
    ),
    (("partition", "injection", "stream"), "a script reads its own data", "leave out `partition`, `inject`, `stream`"),
    (("precision",), "a script says itself what it computes in", "plan without `precision`"),
    (("micro_batch_size",), "a script computes its part of a batch at once", "plan with a smaller `batch_size`"),
    (("prefetch", "loader_processes"), "a script's own DataLoader reads", "give the DataLoader `num_workers`"),
    (("evaluate_every_epochs",), "a script evaluates in its own loop", "leave it out"),
    (("probe",), "a script is measured by running it", "`hetopt profile -- SCRIPT`"),
)
"""Fields of `RunSpec` that the run of a script leaves at their defaults, why, and what to do instead."""


def check_for_script(spec: RunSpec) -> None:
    """Refuse a run in which a training script would have to do what only a task does.

    Raises:
        BadInput: it is one.
    """
    for names, reason, instead in OF_TASKS:
        for name in names:
            value, usual = getattr(spec, name), RunSpec.model_fields[name].default
            if value != usual:
                asked = setting(name, value) if isinstance(value, (float, int, str)) else f"`{name}`"
                raise BadInput(f"{asked} is for tasks: {reason}.", hint=instead)
    unfit = why_not_local(spec) if spec.is_local else None
    if spec.sync.may_settle:
        unfit = "A script says itself how long it trains, so it cannot switch to averages, which take more steps."
    if unfit is None and (spec.sync.stretch != 1 or spec.sync.rate_power):
        unfit = "A script sets its own learning rates, so there is no schedule that sync could stretch or follow."
    if unfit is not None:
        raise BadInput(unfit, hint="leave out sync, or the other")


def check_batch(spec: RunSpec, samples: int) -> None:
    """Refuse a script whose steps have another number of samples than the plan's.

    Args:
        spec: the plan's.
        samples: of a step over all workers, as the script's loader gives them.

    Raises:
        BadInput: they differ.
    """
    planned, name = spec.global_batch_size, Path(spec.script[0]).name
    if samples != planned:
        raise BadInput(
            f"The plan steps by {planned:,} samples, and the loader of {name} gives {samples:,}.",
            hint=f"start the script with its own option for {planned:,} samples, or plan with "
            f"{setting('batch_size', samples)}",
        )


def left_to_script(spec: RunSpec) -> str:
    """Return one sentence on what the plan reckons with and the script's own loop decides."""
    stop = spec.stop
    amount, unit = (stop.max_epochs, "epoch") if stop.max_epochs else (stop.max_steps or 0, "step")
    saving = f", and with a checkpoint every {formatting.duration(spec.checkpoint_every_s)}" if spec.resumes else ""
    return (
        f"{Path(spec.script[0]).name} ends and saves by its own loop: the plan reckons with "
        f"{formatting.counted(amount, unit)}{saving}."
    )
