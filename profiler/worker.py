"""A worker process of a profiling run: joins the others as one that trains does, and measures.

torchrun starts it as ``python -m hetopt.profiler.worker RUN_DIR``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from hetopt.core.errors import BadInput
from hetopt.trainer.worker import leave, main

if TYPE_CHECKING:
    from hetopt.trainer.context import WorkerContext


def measuring() -> Callable[[WorkerContext], None]:
    """Import what a worker does that measures."""
    from hetopt.profiler.probe import run_probe

    return run_probe


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python -m hetopt.profiler.worker RUN_DIR", file=sys.stderr)
        sys.exit(BadInput.exit_code)
    leave(main(sys.argv[1:], measuring))
