"""torchrun's workers as forks of one process that has imported what all of them need, once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from hetopt.core.forks import WORKERS_NEED, ForkServer, NoFork, only_imports

if TYPE_CHECKING:
    from subprocess import Popen


def import_everything(*more: str) -> None:
    """What a fork of this process needs to be a worker at once.

    Args:
        more: modules that workers of a kind need beside those of all.
    """
    with only_imports():
        for name in (*WORKERS_NEED, *more):
            import_module(name)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Torchrun's agent in this process forks its workers; once, before any thread runs and any store is open.

    Where that cannot be, the agent starts them as it always does, and each imports everything for itself.
    """
    import torch

    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's gap
            raise NoFork("this process uses a GPU, which no fork of it could.")
        server = ForkServer.of_this_process()
    except NoFork as why:
        print(f"workers import everything for themselves: {why}", file=sys.stderr)
        yield
        return
    fork_from(server)
    try:
        yield
    finally:
        server.close()


def fork_from(server: ForkServer) -> None:
    """Have torchrun's agent in this process start workers as forks of a server, and by itself where that has ended."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    class ForkedWorker(SubprocessHandler):
        """How the agent sees a worker, which is started in another way than torchrun's own."""

        def _popen(self, args: tuple[Any, ...], env: dict[str, str]) -> Popen[bytes]:
            try:
                words = args[1:]
                program = next(n for n, word in enumerate(words) if word == "-m" or not word.startswith("-"))
                forked = server.start(
                    words[program:],  # after Python and its options
                    environment=env,
                    stdin=0,
                    stdout=self._stdout or 1,
                    stderr=self._stderr or 2,
                )
            except NoFork:
                return super()._popen(args, env)
            return cast("Popen[bytes]", forked)  # the agent asks for its number, polls and waits

    setattr(api, "get_subprocess_handler", ForkedWorker)  # noqa: B010  # torch has no other place for it
