"""How a script ends when somebody asks the run to."""


class Stopped(BaseException):
    """Somebody asked the run to end. Raised on all workers between the same two steps; no script catches it."""
