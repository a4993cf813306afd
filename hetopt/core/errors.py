"""The errors of hetopt, and the exit code with which the command line ends on each.

    HetoptError
    ├── BadInput          2   what was typed or read cannot be used
    ├── NoFeasiblePlan    3   nothing in the catalogue fits the budget or the deadline
    ├── CloudRefused      4   credentials, permission, quota or capacity
    ├── BudgetStop        5   the run was stopped to stay inside the budget or the deadline
    ├── RunFailed         6   a worker died or the run could not go on
    └── RunStopped        7   the run was stopped before its planned end

A message is one sentence that says what is wrong; ``hint`` is what to do next. As text an error is both, so that a
script's traceback says them too. Both name the library's parameters in backticks, as Python has them: `` `steps` `` or
`` `confidence=0.9` ``. The command line shows its options instead (`hetopt.cli.flags`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class HetoptError(Exception):
    """The base of hetopt's errors: a sentence, a hint on what to do next, and an exit code.

    As text an error is the sentence and the hint.

    Attributes:
        exit_code: with which the command line ends.
        message: one sentence on what is wrong.
        hint: what to do next; None: nothing is known.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return message and hint as one sentence; the message alone without a hint."""
        if not self.hint:
            return self.message
        return f"{self.message.rstrip('.')}: {self.hint.rstrip('.')}{'' if self.hint.endswith('?') else '.'}"


class BadInput(HetoptError):
    """An input, typed or read from a file, that cannot be used.

    The command line ends with exit code 2.
    """

    exit_code = 2


class NoFeasiblePlan(HetoptError):
    """The failure to find a cluster in the catalogue that fits the budget and the deadline.

    The command line ends with exit code 3.
    """

    exit_code = 3


class CloudRefused(HetoptError):
    """A refusal by the cloud: credentials, permission, quota or capacity.

    The command line ends with exit code 4.
    """

    exit_code = 4


class BudgetStop(HetoptError):
    """The stop of a run to stay inside its budget or deadline.

    The command line ends with exit code 5.
    """

    exit_code = 5


class RunFailed(HetoptError):
    """The failure of a run: a worker died, or the run could not go on.

    The command line ends with exit code 6.
    """

    exit_code = 6


class RunStopped(HetoptError):
    """The end of a run before its planned end, stopped by a person or from outside.

    The command line ends with exit code 7.
    """

    exit_code = 7


def setting(name: str, value: float | str | Mapping[str, str] | None) -> str:
    """Format a parameter with its value for a message: `` `max_workers=8` ``, `` `sync="local-sgd(8)"` ``.

    Texts are quoted; None stands as it is.
    """
    written = f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{name}={written}`"
