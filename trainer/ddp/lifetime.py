"""How long modules of DistributedDataParallel live in processes of hetopt: until these end.

Torch 2.13 may hang where one is deleted after its process group, as at the end of a script's `main`: it waits, with the
interpreter's lock, for a thread of gloo's that asks for that lock.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.nn.parallel import DistributedDataParallel

_KEPT: list[DistributedDataParallel] = []


@functools.cache
def keep_modules() -> None:
    """Keep every module that is made from here on until the process ends; asked again, there is nothing left to do."""
    init: Any = DistributedDataParallel.__init__

    @functools.wraps(init)
    def made(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        _KEPT.append(self)

    DistributedDataParallel.__init__ = made  # type: ignore[method-assign]  # torch has no hook for it
