"""Existing training loops on unequal workers: `session` wraps the model, the optimizer and the data of a script."""

from hetopt.trainer.session.begin import session
from hetopt.trainer.session.run import Session

__all__ = ["Session", "session"]
