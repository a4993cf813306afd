"""What has to be here before a run begins, and the sentence that says so where it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetopt.optimizer.launch_record import Place


def torch() -> None:
    """Refuse a run that could not train.

    Raises:
        BadInput: torch is not installed.
    """
    import importlib.util

    from hetopt.core.errors import BadInput
    from hetopt.core.extras import install_command

    if importlib.util.find_spec("torch") is None:
        raise BadInput("training needs torch, which is not installed.", hint=install_command("train"))


def task(reference: str) -> None:
    """Refuse a run whose task is in no file or module that can be found from here, before anything starts.

    Raises:
        BadInput: so it is.
    """
    from hetopt.core.task_reference import check_found

    check_found(reference)


def rights(place: Place) -> None:
    """Refuse a rehearsal that could not build its network, before there is a run of it."""
    from hetopt.core.errors import BadInput

    if place != "rehearsal":
        return
    from hetopt.backends.emulation.namespaces import why_not

    reason = why_not()
    if reason is not None:
        raise BadInput(f"no cluster can be rehearsed here: {reason}.", hint="use --on local")
