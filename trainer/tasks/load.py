"""From the text that names a task to the `Task` itself."""

from __future__ import annotations

from hetopt.core.errors import BadInput
from hetopt.core.task_reference import resolve, user_code
from hetopt.trainer.task import Task


def load_task(reference: str) -> Task:
    """Return the task that ``reference`` names.

    Args:
        reference: a bundled name, ``module:attribute`` or ``file.py:attribute``; the attribute is a `Task` or a
            function without arguments that returns one.

    Raises:
        BadInput: there is no such task, its code failed, or what it names is not a task.
    """
    found = resolve(reference)
    if not isinstance(found, (Task, type)) and callable(found):
        code = getattr(found, "__code__", None)
        found = user_code(code.co_filename if code else reference, found)
    if not isinstance(found, Task):
        raise BadInput(
            f"'{reference}' is of type {type(found).__name__}, not a hetopt Task.",
            hint="Name a hetopt.trainer.task.Task, or a function without arguments that returns one.",
        )
    return found
