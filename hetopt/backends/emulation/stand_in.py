"""Plans of jobs that cannot be trained here, with `hetopt.core.stand_in` in the job's place.

A job whose gradient has ``G`` bytes is rehearsed with one of ``g``: over a link ``G / g`` times as slow, a step
exchanges for as long as the job's does. What machines compute is waited for in any case. So everything about the time
of the cluster is kept, and nothing about what is learned.
"""

from __future__ import annotations

import math

from hetopt.backends.prediction.hosting import ThisMachine
from hetopt.core import formatting
from hetopt.core.comm.composition import METHODS
from hetopt.core.errors import BadInput
from hetopt.core.profile import LOCAL, Device, Profile, StepTime
from hetopt.core.run_spec import RunSpec
from hetopt.core.stand_in import GRADIENT_BYTES, PARAMETERS, SHAPES, STAND_IN
from hetopt.optimizer.plan import Plan

STEP_S = 0.002
"""What a worker computes of it, and takes to update it: about as long on any processor of these years. It decides
nothing but how fast a cluster can be rehearsed: one whose steps take less is slowed down."""


def links_slower(plan: Plan) -> float:
    """How many times as slow links must be for the stand-in to exchange as long as the plan's job."""
    return plan.profile.job.gradient_bytes / GRADIENT_BYTES


def in_its_place(plan: Plan, machine: ThisMachine) -> Plan:
    """The plan with the stand-in as its job, as profiled on this machine, for as many steps on the same machines.

    Raises:
        BadInput: what the plan's workers exchange depends on the shapes of the job's parameters.
    """
    compression = plan.run.compression
    if METHODS[compression.name].by_shape:
        raise BadInput(
            f"what {compression.name} sends depends on the shapes of parameters, and a stand-in has others.",
            hint='launch with `compression="dense"`',
        )
    steps = math.ceil(plan.chosen.prediction.steps.value)
    if plan.run.stop.max_steps is not None:
        steps = plan.run.stop.max_steps
    changed = {"profile": _profile(plan.profile, machine), "run": _run(plan.run)}
    return plan.model_copy(update=changed).adjusted(steps=steps)


def remark(plan: Plan) -> str:
    """What a person must know to read the numbers."""
    job, slower = plan.profile.job, f"{links_slower(plan):,.3g}"
    return (
        f"The job ({job.task}) is not trained here: a gradient of {formatting.bytes_(GRADIENT_BYTES)} stands in for "
        f"{formatting.bytes_(job.gradient_bytes)}, over links {slower} times slower for that. Times are the cluster's; "
        "losses mean nothing."
    )


def _run(run: RunSpec) -> RunSpec:
    return run.model_copy(
        update={
            "task": STAND_IN,
            "script": (),
            "data_dir": None,
            "precision": "fp32",
            "micro_batch_size": None,
            "learning_rate_scale": 1.0,
            "learning_rate_rule": "fixed",
        }
    )


def _profile(described: Profile, machine: ThisMachine) -> Profile:
    """The job's, with what this machine computes of the stand-in as the only device."""
    job = described.job.model_copy(
        update={
            "task": STAND_IN,
            "script": (),
            "parameters": PARAMETERS,
            "gradient_bytes": GRADIENT_BYTES,
            "parameter_shapes": SHAPES,
            "least_local_batch_size": 1,
            "learning_rate_rule": "none",
        }
    )
    host = described.host.model_copy(
        update={"logical_cpus": machine.processors, "operating_system": machine.operating_system}
    )
    steps = tuple(
        StepTime(
            local_batch_size=size,
            step_time_s=STEP_S,
            samples_s=(STEP_S,),
            load_s=0.0,
            forward_s=STEP_S / 4,
            backward_s=STEP_S / 4,
            optimizer_s=STEP_S / 2,
        )
        for size in sorted({1, max(2, job.batch_size)})
    )
    device = Device(
        type=LOCAL,
        kind="cpu",
        workers_per_host=machine.processors,
        threads_per_worker=1,
        step_times=steps,
        memory_limit_bytes=host.memory_bytes,
        compressors=described.devices[0].compressors,
    )
    return described.model_copy(
        update={
            "job": job,
            "host": host,
            "devices": (device,),
            "links": (),
            "samples": (),
            "evaluation_s": None,
            "startup_s": None,
            "yardstick_s": None,
        }
    )
