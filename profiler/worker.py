"""Worker process of a profiling run: joins the other workers as in training, and measures.

torchrun starts it as ``python -m hetopt.profiler.worker RUN_DIR``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hetopt.trainer.worker import leave, main


def measuring() -> Callable[[Any], None]:
    """Return the function that a profiling worker runs in its context, after importing the probe's modules."""
    from hetopt.profiler.probe.run import run_probe

    return run_probe


if __name__ == "__main__":
    leave(main(sys.argv[1:], measuring))
