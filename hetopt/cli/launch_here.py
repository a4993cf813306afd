"""A plan mapped onto this machine as it is now: the launch that `hetopt launch --on local` or rehearsal starts."""

from __future__ import annotations

from pathlib import Path

from hetopt.backends.emulation.description import parse_changes, parse_hosts
from hetopt.backends.emulation.plan import rehearse
from hetopt.backends.prediction.hosting import ThisMachine
from hetopt.backends.prediction.local_plan import predict_on_local
from hetopt.backends.prediction.machine_speed import at_present
from hetopt.cli.parse import text_of
from hetopt.core.calibration_benchmark import measure_yardstick_s
from hetopt.optimizer.launch_record import Launch, Place
from hetopt.optimizer.plan import Plan


def prepare(
    plans: tuple[Plan, Plan],
    place: Place,
    factors: tuple[float, ...] | None,
    hosts: str | None,
    schedule: Path | None,
    data: str | None,
) -> Launch:
    """The launch of a plan, with its prediction there.

    Args:
        plans: as it was made, and as it is to be run now.
        place: ``local`` or ``rehearsal``.
        factors: local: each worker's pace.
        hosts: rehearsal: a description of other hosts than the plan's.
        schedule: rehearsal: a file that tells what happens on the way.
        data: folder of the task's data.

    Raises:
        BadInput: what was asked for cannot be done here.
    """
    made, wanted = plans
    wanted, remarks = at_present(wanted, measure_yardstick_s)
    match place:
        case "local":
            here = predict_on_local(wanted, factors)
            spec, prediction, notes = here.run, here.prediction, here.notes
        case "rehearsal":
            described = None if hosts is None else parse_hosts(hosts)
            count = sum(group.machines for group in wanted.chosen.groups) if described is None else len(described)
            names = [f"h{number}" for number in range(count)]
            changes = () if schedule is None else parse_changes(text_of(schedule, "--schedule"), names)
            rehearsal = rehearse(wanted, ThisMachine.seen(), described, changes)
            spec, prediction, notes = rehearsal.run, rehearsal.prediction, rehearsal.notes
        case "ec2":
            raise ValueError("what is rented is ordered, see ec2_launch")
    if data is not None:
        spec = spec.model_copy(update={"data_dir": str(Path(data).resolve())})
    return Launch(
        created="",
        started_s=0.0,
        run_id="",
        on=place,
        plan=made,
        spec=spec,
        prediction=prediction,
        notes=(*remarks, *notes),
    )
