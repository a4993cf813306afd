"""`hetopt profile --check TASK`: what would go wrong with a task on many workers, before anything is measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import hetopt
from hetopt.core.errors import BadInput


def check_task(task: str | None, data: Path | None, *, json_: bool) -> None:
    """Print what is found.

    Raises:
        BadInput: no task is named, torch is missing, or the task has errors.
    """
    from hetopt.cli import render

    if task is None:
        raise BadInput("name the task to check.", hint="hetopt profile --check digits")
    findings = hetopt.check(task, data=data)
    errors = [finding for finding in findings if finding.level == "error"]
    if json_:
        render.print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            where = f" ({finding.where})" if finding.where else ""
            render.bullet(f"{finding.level}: {finding.text}{where}")
            render.bullet(finding.hint, mark="  →")
        if not errors:
            render.line(f"{task} can be trained on many workers.")
    if errors:
        count = "one error" if len(errors) == 1 else f"{len(errors)} errors"
        raise BadInput(f"{task} has {count}.", hint=errors[0].hint)
