"""The order in which hetopt's processes look for modules: installed ones first, then those beside a script.

``python -m MODULE`` looks in the current folder before anywhere else, and there a person may keep a ``torch.py`` or a
``json.py``. What hetopt starts has `INSTALLED_ONLY` in its environment, and so has what that starts. A script finds its
own folder first, as with ``python SCRIPT``; what has been imported by then stays what it is.
(Python documentation, "Command line and environment", -P and PYTHONSAFEPATH, from 3.11 on.)
With the commands that install what is missing (`install_command`).
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

_VARIABLE = "PYTHONSAFEPATH"

INSTALLED_ONLY = {_VARIABLE: "1"}
"""Environment variables of a Python that is to look for modules in no folder of the caller's."""


def search_first(folder: Path) -> None:
    """Put ``folder`` first on ``sys.path``, in place of Python's own entry if it set one; unset PYTHONSAFEPATH."""
    if not os.environ.pop(_VARIABLE, None):
        del sys.path[0]
    sys.path.insert(0, str(folder))


def run_script(script: str) -> None:
    """Run a file in this process as ``python FILE`` would, or as ``python -m`` would where it imports its package.

    ``sys.path`` changes for good (see `search_first`); what the script raises goes through.
    """
    path = Path(script).resolve()
    root = code_folder(path)
    search_first(root)
    if root == path.parent:
        runpy.run_path(script, run_name="__main__")
        return
    sys.path.insert(1, str(path.parent))
    runpy.run_module(".".join(path.relative_to(root).with_suffix("").parts), run_name="__main__", alter_sys=True)


def code_folder(script: Path) -> Path:
    """Return the folder in which a script's own imports are looked for: the script's, or around its package.

    The latter is where it imports relatively, or by name a package that it is in: there ``python -m PACKAGE.SCRIPT`` is
    typed.
    """
    path = script.resolve()
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return path.parent  # whoever runs or reads it says so
    return min(
        (root for node in ast.walk(tree) for root in _roots(node, path)),
        default=path.parent,
        key=lambda root: len(root.parts),
    )


def _roots(node: ast.AST, script: Path) -> Iterator[Path]:
    """Yield the folders from which a script's own packages are imported, as far as an import statement shows them.

    A relative import shows the folder around the outermost package; an import by name the folder around a package of
    that name that the script is in, unless such a module lies beside the script. Other nodes show none.
    """
    if isinstance(node, ast.ImportFrom) and node.level:
        around = script.parents[min(node.level, len(script.parents) - 1)]
        while (around / "__init__.py").is_file():
            around = around.parent
        yield around
        return
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    for module in modules:
        first = module.partition(".")[0]
        beside = script.parent / first
        if not beside.is_dir() and not beside.with_suffix(".py").is_file():
            # A folder without that file is the checkout of what is installed, as likely as not.
            packages = (
                folder for folder in script.parents if folder.name == first and (folder / "__init__.py").is_file()
            )
            yield from (folder.parent for folder in packages)


def begin_in(folder: str) -> None:
    """Put ``folder`` first on ``sys.path`` in place of Python's own entry; under PYTHONSAFEPATH add nothing."""
    if not sys.flags.safe_path:
        del sys.path[0]
    if not os.environ.get(_VARIABLE):
        sys.path.insert(0, folder)


_NAMED_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Package index that has torch without CUDA, a tenth of the size that PyPI has; see `requirements/torch_index.py`."""


def install_command(extra: str) -> str:
    """Return the shell command that installs the packages of a hetopt extra, such as ``train``, by pip.

    Where torch is among them and this machine has no GPU, the command names the index that has torch without CUDA.
    """
    needed = []
    for line in importlib.metadata.requires("hetopt") or ():
        named = _NAMED_EXTRA.search(line.partition(";")[2])
        if named is not None and named.group(1) == extra:
            needed.append(line.partition(";")[0].strip())
    without_cuda = any(_name(package) == "torch" for package in needed) and not _has_gpu()
    return f"{f'PIP_EXTRA_INDEX_URL={CPU_INDEX} ' if without_cuda else ''}pip install {shlex.join(needed)}"


def requirement(package: str) -> str:
    """Return a package with its versions declared by hetopt, ``torch<2.15,>=2.11``; undeclared: its name."""
    declared = (line.partition(";")[0].strip() for line in importlib.metadata.requires("hetopt") or ())
    return next((line for line in declared if _name(line) == package), package)


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _has_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None
