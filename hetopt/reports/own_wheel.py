"""hetopt as it is here, as a wheel that machines of other launchers can install.

What was planned with one version has to run with that version, and no index may have it: a plan that is exported takes
the wheel along. It is made from the installed files (or the checkout behind an editable install) without a build step;
the same files give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import hetopt.core

_EARLIEST = (1980, 1, 1, 0, 0, 0)
_WHEEL = "Wheel-Version: 1.0\nGenerator: hetopt\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def own_wheel() -> tuple[str, bytes]:
    """File name and bytes of the wheel."""
    found = importlib.metadata.distribution("hetopt")
    stem = f"hetopt-{found.version}"
    info = f"{stem}.dist-info"
    files = dict(sorted(_sources()))
    # In a checkout that was installed for editing, what describes it has its older name.
    description = found.read_text("METADATA") or found.read_text("PKG-INFO")
    files[f"{info}/METADATA"] = (description or "").encode()
    files[f"{info}/entry_points.txt"] = (found.read_text("entry_points.txt") or "").encode()
    files[f"{info}/WHEEL"] = _WHEEL.encode()
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    return f"{stem}-py3-none-any.whl", packed.getvalue()


def _sources() -> Iterator[tuple[str, bytes]]:
    here = Path(next(iter(hetopt.core.__path__))).parent
    for folder, folders, files in os.walk(here, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for file in files:
            path = Path(folder) / file
            yield f"hetopt/{path.relative_to(here).as_posix()}", path.read_bytes()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
