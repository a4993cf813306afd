"""What a session says, in the words of a framework: its user has another name for the session, or calls no backward."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from hetopt.core.errors import BadInput

Words: TypeAlias = Sequence[tuple[str, str]]
"""Regular expressions and what takes their place, in order."""

_WEIGHT = r"run\.backward\(loss, weight=n\)"
_OPTION = r"session\(\.\.\., (\w+)=(\([^)]*\)|[^)]*)\)"
_RUN = r"(?<![\w.])run\."

ACCELERATE: Words = (
    (r"(?<![\w.])run\.backward", "accelerator.backward"),
    (_OPTION, r'Accelerator(session={"\1": \2})'),
    (_RUN, "accelerator.run."),
)

TRANSFORMERS: Words = (
    (f"(pass|state what the loss is a mean over where it is right,) {_WEIGHT}",
     "let loss_weight(loss, samples, num_items_in_batch) of your Trainer return n"),
    (r'weight="sum"', '"sum"'),
    (r"(?<![\w.])run\.backward", "self.accelerator.backward"),
    (_OPTION, r'Trainer(..., session={"\1": \2})'),
    (_RUN, "self.run."),
)  # fmt: skip

LIGHTNING: Words = (
    (_WEIGHT, "self.trainer.strategy.run.backward(loss, weight=n) in a method backward(self, loss) of your module"),
    (_OPTION, r"HetoptStrategy(\1=\2)"),
    (_RUN, "self.trainer.strategy.run."),
)


@contextmanager
def in_words(words: Words) -> Iterator[None]:
    """Inside, refusals of a session say what the user of a framework has.

    Args:
        words: of the framework.
    """
    try:
        yield
    except BadInput as error:
        error.message, error.hint = _said(error.message, words), error.hint and _said(error.hint, words)
        error.args = (error.message,)
        raise


def _said(text: str, words: Words) -> str:
    for pattern, other in words:
        text = re.sub(pattern, other, text)
    return text
