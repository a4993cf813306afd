"""Imported by the process that tests fork from: what a fork of it starts is a fork too, where it has all imports.

A fork server that is wanted for modules that are there is a fork of the process that wants it; hosts of runs that a
forked command starts are forks of that command, and so are the workers of torchrun.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from torch.distributed.elastic.multiprocessing import api

from hetopt.trainer.host.agent import fork_from
from hetopt.trainer.host.forks import WORKERS_NEED, ForkServer, NoFork
from hetopt.trainer.host.rendezvous import Rendezvous
from tests import forked_hosts

_importing = ForkServer.importing
_alone = Rendezvous.alone
_handler = api.get_subprocess_handler


def _ready(modules: Sequence[str], environment: Mapping[str, str]) -> ForkServer:
    if all(name in sys.modules for name in modules):
        with suppress(NoFork):
            return ForkServer.of_this_process()
    return _importing(modules, environment)


def _alone_with_forks() -> Rendezvous:
    """Torchrun's workers are forks, of its process before a thread of its store runs in it."""
    if api.get_subprocess_handler is _handler:  # hosts of runs have seen to it
        with suppress(NoFork):
            fork_from(ForkServer.of_this_process())
    return _alone()


ForkServer.importing = _ready  # type: ignore[assignment,method-assign]  # a function in place of a class's method
Rendezvous.alone = _alone_with_forks  # type: ignore[method-assign]  # likewise
forked_hosts.fork_from(lambda: _ready(WORKERS_NEED, os.environ))
