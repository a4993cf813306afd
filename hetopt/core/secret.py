"""What all hosts of a run know and nobody else: whoever cannot prove that it does is not let in (see the gate)."""

from __future__ import annotations

import re
import secrets

from hetopt.core.errors import BadInput

SECRET_VARIABLE = "HETOPT_GROUP_SECRET"
"""The run's secret, in the environment of the process that hosts workers; not in theirs."""

SECRET_PATTERN = r"[0-9a-f]{64}"


def new_secret() -> str:
    """A secret for one run."""
    return secrets.token_hex(32)


def checked_secret(secret: str | None) -> bytes:
    """The secret as bytes.

    Raises:
        BadInput: there is none, or it is something that `new_secret` does not give.
    """
    if secret is None or not re.fullmatch(SECRET_PATTERN, secret):
        raise BadInput(
            f"{SECRET_VARIABLE} must be 64 hexadecimal digits, the same on all machines of the run.",
            hint=f"for example {SECRET_VARIABLE}=$(openssl rand -hex 32), once, and copied to all",
        )
    return bytes.fromhex(secret)
