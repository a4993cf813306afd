"""Starts a launch, follows it to its end, and says how it ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from hetopt.cli import render, runs, terminal
from hetopt.cli.parse import is_attended
from hetopt.core import formatting
from hetopt.core.errors import BadInput, BudgetStop, HetoptError, NoFeasiblePlan, RunFailed, RunStopped
from hetopt.core.interruption import stopping
from hetopt.core.run_folder import UNFINISHED_MODEL_FILE, checkpoint_step
from hetopt.core.run_status import RunState
from hetopt.reports.live_run import resume_command
from hetopt.reports.status_document import UNSEEN_END

if TYPE_CHECKING:
    from hetopt.api.run import Run
    from hetopt.backends.backend import Prepared
    from hetopt.backends.ec2.renter.backend import Rental
    from hetopt.core.events.fold import RunFold
    from hetopt.core.run_spec import RunSpec
    from hetopt.optimizer.launch_record import Launch
    from hetopt.optimizer.plan import Plan


def started(submit: Callable[[Callable[[str], None]], Run], *, rents: bool, detach: bool, as_json: bool) -> None:
    """Start a run and, unless ``detach``, follow it to its end; an exception while following also stops the run.

    How the run ended is printed and raised by `finish`.

    Args:
        submit: starts the run and returns it; tells its name, to the function it is given, as soon as it has one.
        rents: whether machines are rented for it.
        detach: whether to return when the run has begun, which goes on.
        as_json: whether the report is printed as JSON at the end.

    Raises:
        RunFailed: the run failed.
        BudgetStop: the budget ended it.
        RunStopped: somebody else stopped it before its planned end.
    """
    run: Run | None = None
    with render.progress("training") as live:
        live("renting the machines" if rents else "starting the workers", 0.0)
        try:
            run = submit(lambda name: live.note(f"run {name}; {LOOK}"))
            if detach:
                render.note("the machines have been told to begin" if rents else "it goes on without this command")
                return
            run.wait(reporter=live)
        except BaseException:
            if run is not None and not detach:
                what = f"the rented machines of {run.name}" if rents else f"run {run.name}"
                with stopping(what, f"hetopt stop {run.name}", live):
                    run.backend.stop(run.handle)
                if not rents:
                    _stopped_here(run)
            raise
    finish(run, rented=rents, as_json=as_json)


LOOK = "look at it from another terminal with `hetopt status`, end it with `hetopt stop`"


def finish(run: Run, *, rented: bool, as_json: bool) -> None:
    """Print how a run ended; return where it came to its planned end.

    Args:
        run: run that is over.
        rented: whether machines were rented for it; their cost is printed and the model fetched first.
        as_json: whether the report is printed as JSON, in place of a sentence.

    Raises:
        RunFailed: the run failed.
        BudgetStop: the budget ended it.
        RunStopped: it was stopped before its planned end by somebody else.
    """
    ended_by = _given_back(run) if rented else None
    status = run.status()
    if status.state is RunState.FAILED:
        again = resume_command(run.folder, status, run.launch)
        reading = f"read `hetopt logs {run.name}`{f'; go on with `{again}`' if again else ''}"
        raise RunFailed(status.reason or "the run failed without saying why.", hint=status.next_step(reading))
    record = run.record()
    progress = record.progress
    done = f"{formatting.counted(progress.step, 'step')}"
    if status.state is RunState.STOPPED and record.launch is not None:
        done = f"{formatting.count(progress.step)} of {_planned(record.launch)} steps"
    if record.unread.sentence is not None:
        render.note(record.unread.sentence)
    if as_json and record.launch is not None:
        terminal.write(run.report().to_json())
    else:
        figures = formatting.reached(progress.metrics, progress.loss)
        took = f" in {_took(progress)}" if progress.training_s is not None else ""
        render.line(f"{status.state.value} after {done}{took}{': ' if figures else ''}{figures}", style="strong")
        render.note(f"model and log are in {run.folder}; compare with the prediction by `hetopt report`")
    if ended_by is not None:
        raise ended_by
    if status.state is RunState.STOPPED:
        again = resume_command(run.folder, status, record.launch)
        raise RunStopped(
            f"the run was stopped after {done}; the model of so far is {run.folder / UNFINISHED_MODEL_FILE}.",
            hint=f"go on with `{again}`" if again else "nothing is saved here: launch its plan anew",
        )


def _took(progress: RunFold) -> str:
    """Return the time from launch to end as text: the same sum as the run time of the report."""
    startup_s, training_s = progress.startup_s or 0.0, progress.training_s or 0.0
    return formatting.with_startup(startup_s + training_s + progress.recovery_s, startup_s)


def _stopped_here(run: Run) -> None:
    """Print the step at which Ctrl-C stopped a run, whether it is saved, and how to go on."""
    with suppress(OSError, ValueError, HetoptError):  # a terminal that is gone: the run has ended all the same
        again = resume_command(run.folder, run.status(), run.launch)
        kept = checkpoint_step(run.folder)
        step = run.record().progress.step
        is_script = run.launch is not None and bool(run.launch.spec.script)
        unsaved = "hetopt saved no checkpoint of the script" if is_script else "no checkpoint was saved yet"
        saved = unsaved if kept is None else f"its checkpoint is of step {kept:,}"
        render.note(f"stopped at step {formatting.count(step)}; {saved}{f': go on with `{again}`' if again else ''}")


def _given_back(run: Run) -> HetoptError | None:
    """Print the cost of rented machines and fetch the model.

    Return the error of a run that its budget ended, or None.
    """
    from hetopt.api.account import spent

    usd, is_estimate, reason = spent(run)
    estimated = f"; {UNSEEN_END}" if is_estimate else ""
    render.note(f"the machines are gone; they cost ${usd:.4f} at the prices that were seen meanwhile{estimated}")
    runs.bring_model(run)
    if reason is None or "budget" not in reason:
        return None
    return BudgetStop(
        f"the run was ended with a checkpoint, because {reason}.",
        hint=f"look at what it reached with `hetopt report {run.name}`, and plan again with more",
    )


def _planned(launch: Launch) -> str:
    """Return the planned number of steps as text; the predicted one where a target or epochs end the run."""
    most = launch.spec.stop.max_steps
    predicted = formatting.count(max(1, round(launch.prediction.steps.value)))
    return formatting.count(most) if most is not None else f"about {predicted}"


def confirmed(prepared: Prepared, *, yes: bool) -> Prepared:
    """Return the prepared launch once a person or --yes has confirmed it.

    Where nothing is rented and no host is connected to, nobody is asked.

    Args:
        prepared: launch that is ready to start.
        yes: whether --yes was given.

    Raises:
        BadInput: renting costs money, and nobody is there to say yes.
        NoFeasiblePlan: the plan is a risk that nobody has accepted.
        Exit: a person declines (code 0).
    """
    if prepared.launch.on == "ec2":
        from hetopt.api.account import rental_of

        return _confirmed_rental(rental_of(prepared), yes=yes)
    if prepared.spends_usd is not None and not yes:
        agree_to_spend(prepared.spends_usd)
    elif prepared.connects_to and not yes and is_attended() and not typer.confirm("Start?", default=True, err=True):
        raise typer.Exit(0)
    return prepared


def _confirmed_rental(rental: Rental, *, yes: bool) -> Rental:
    """Return the rental, without its risk, once spending is confirmed: by ``yes``, else by a person at a terminal.

    Raises:
        NoFeasiblePlan: the plan is a risk, which only a person who is asked can take.
        BadInput: nobody is there to say yes.
        Exit: a person declines (code 0).
    """
    if rental.risk is not None and (yes or not is_attended()):
        raise NoFeasiblePlan(
            f"The plan is a risk: {rental.risk}.",
            hint="plan again with other limits, raise --budget, or take the risk with --accept-risk",
        )
    if yes:
        return rental
    if rental.risk is not None:
        render.note(f"RISK: {rental.risk}; else it is stopped unfinished")
    agree_to_spend(rental.order.budget_usd)
    return replace(rental, risk=None)


def agree_to_spend(most_usd: float, what: str = "it", *, hint: str = "or look first with --dry-run") -> None:
    """Ask for consent to spend money (default: no); return where it is given.

    Args:
        most_usd: most that is spent.
        what: is rented, for the question.
        hint: further way out than --yes, for the error.

    Raises:
        BadInput: nobody is there to answer.
        Exit: a person declines (code 0).
    """
    most = f"${most_usd:.2f}"
    if not is_attended():
        raise BadInput(
            f"renting {what} costs up to {most}, and nobody is there to say yes.", hint=f"say so with --yes, {hint}"
        )
    if not typer.confirm(f"Rent {what}, for at most {most}?", default=False, err=True):
        raise typer.Exit(0)


def accept_fewer(plan: Plan, spec: RunSpec, *, yes: bool) -> bool:
    """Return whether to begin on fewer machines, after a remark on what that takes.

    True within the plan's upper time. Beyond it a person is asked; with --yes, or without a person, the answer is
    False.

    The slowest of those that are left computes as much longer as its local batch has grown; communication is as it was.

    Args:
        plan: plan with all machines.
        spec: run spec for those that can be had.
        yes: whether --yes was given.
    """
    prediction = plan.chosen.prediction
    before = {worker.host: worker.local_batch_size for worker in plan.run.workers}
    growth = max(worker.local_batch_size / before[worker.host] for worker in spec.workers)
    step_s = prediction.step_time_s.value
    stretch = (step_s + (growth - 1) * prediction.compute_s) / step_s
    total_s = prediction.total_s.value * stretch
    render.note(
        f"{len(spec.workers)} of {len(plan.run.workers)} workers can be had: {formatting.duration(total_s)} instead of "
        f"{formatting.duration(prediction.total_s.value)}"
    )
    if total_s <= prediction.total_s.high:
        return True
    if yes or not is_attended():
        render.note(f"that is beyond the {formatting.duration(prediction.total_s.high)} that the plan stated at most")
        return False
    return typer.confirm("That is worse than the plan stated. Begin all the same?", default=False, err=True)
