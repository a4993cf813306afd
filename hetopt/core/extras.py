"""What to install where an optional part of hetopt is missing: a command that works wherever hetopt itself came from.

hetopt may be installed from a checkout, a wheel or an index, so the command names what the extra needs and not hetopt.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil

_NAMED_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where torch is without CUDA, a tenth of what PyPI has; see `requirements/torch_index.py`."""


def install_command(extra: str) -> str:
    """The pip command that installs what an extra of hetopt needs, such as ``train``; as pyproject.toml declares it.

    Where torch is among it and no GPU is here, pip is told of the index that has torch without CUDA.
    """
    needed = []
    for line in importlib.metadata.requires("hetopt") or ():
        named = _NAMED_EXTRA.search(line.partition(";")[2])
        if named is not None and named.group(1) == extra:
            needed.append(line.partition(";")[0].strip())
    without_cuda = any(_name(one) == "torch" for one in needed) and not _has_gpu()
    return f"{f'PIP_EXTRA_INDEX_URL={CPU_INDEX} ' if without_cuda else ''}pip install {shlex.join(needed)}"


def requirement(package: str) -> str:
    """What hetopt needs of a package, such as ``torch==2.13.0``; the package alone where it declares nothing."""
    declared = (line.partition(";")[0].strip() for line in importlib.metadata.requires("hetopt") or ())
    return next((one for one in declared if _name(one) == package), package)


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _has_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None
