"""Commands that people are told, such that a shell takes them as they were meant."""

from __future__ import annotations

import shlex


def typed(*words: object) -> str:
    """A command, or a part of one, as it is typed: a path with a space in it, a pattern or a quote is in quotes.

    Args:
        words: of the command; each becomes one word of the shell.
    """
    return shlex.join(map(str, words))
