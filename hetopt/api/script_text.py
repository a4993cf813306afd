"""What a training script's text says of itself: it is parsed, nothing of it runs."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hetopt.core.errors import BadInput
from hetopt.core.paths import read_text
from hetopt.core.run_folder import OUTPUT_VARIABLE
from hetopt.core.search_path import code_folder

PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Environment variables by which torchrun tells a worker its place among the others."""


@dataclass(frozen=True)
class SourceFile:
    """A source file of a script with its syntax tree.

    Attributes:
        name: file name for messages, relative to the script's folder.
        text: contents of the file.
        tree: the parsed contents.
    """

    name: str
    text: str
    tree: ast.Module

    @staticmethod
    def of(text: str, name: str) -> SourceFile:
        """Return the parsed source file of a text; nothing of it runs.

        Args:
            text: contents of the file.
            name: file name for messages.

        Raises:
            BadInput: the text is no Python.
        """
        try:
            return SourceFile(name, text, ast.parse(text))
        except (SyntaxError, ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise BadInput(
                f"{name} is no Python that can be read{f', at line {line}' if line else ''}.",
                hint="see that it runs by itself",
            ) from None

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The parent node of each node of the syntax tree but the root."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain ``node``, from its parent out to the module."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def where(self, node: ast.AST) -> str:
        """Return file and line of a node: ``train.py, line 12``."""
        return f"{self.name}, line {getattr(node, 'lineno', 1)}"


def read_script(path: Path) -> tuple[SourceFile, ...]:
    """Parse a script and the local modules that it imports, the script first; nothing of it runs.

    Modules are looked for where Python would find them beside the script; modules of modules are read, too.

    Raises:
        BadInput: the script or a module cannot be read, or is no Python.
    """
    folder, known, waiting = code_folder(path), {path.resolve()}, [path]
    files = []
    while waiting:
        place = waiting.pop(0)
        name = path.name if place == path else str(place.resolve().relative_to(folder))
        file = SourceFile.of(read_text(place, hint="give the path of the script"), name)
        files.append(file)
        for module in _local_modules(file, place.parent, folder):
            if module.resolve() not in known:
                known.add(module.resolve())
                waiting.append(module)
    return tuple(files)


def _local_modules(file: SourceFile, beside: Path, folder: Path) -> Iterator[Path]:
    """Yield the files of the modules that a file imports, as far as they are below ``folder`` or beside the file."""
    for node in ast.walk(file.tree):
        names: list[str] = []
        base = folder
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
            if node.level:
                base = [beside, *beside.parents][node.level - 1]
        for name in names:
            stem = base.joinpath(*name.split(".")) if name else base
            for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
                if name and candidate.is_file():
                    yield candidate


_ON_SEVERAL_WORKERS = {
    "hetopt": "a session",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "lightning_fabric": "Fabric",
    "transformers": "transformers' Trainer",
}
"""Packages with which a script trains on several workers: by a session, or by DistributedDataParallel inside them."""

_OF_TORCH = ("DistributedDataParallel", "fully_shard")
"""What torch has for it."""


def several_workers(files: Sequence[SourceFile]) -> str:
    """Return the name of what a script seems to train on several workers by, such as ``a session``; empty: none known.

    Imports and names tell it: a session of hetopt, torch's DistributedDataParallel or fully_shard, or a framework.
    Whether the script really does so shows only when it runs.

    Args:
        files: files of the script, as of `read_script`.
    """
    packages, names = set[str](), set[str]()
    for node in (node for file in files for node in ast.walk(file.tree)):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imported = [alias.name for alias in node.names]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else imported
            packages.update(module.partition(".")[0] for module in modules)
            names.update(name.rpartition(".")[2] for name in imported)
    if not any("Trainer" in file.text for file in files):
        packages.discard("transformers")  # its models and tokenizers train in anybody's loop
    ways = [way for package, way in _ON_SEVERAL_WORKERS.items() if package in packages]
    return next(iter([*ways, *(way for way in _OF_TORCH if way in names)]), "")


def lost_files(files: Sequence[SourceFile]) -> tuple[str, ...]:
    """Return a warning that a script's own files are lost with a rented machine; empty: it names the output folder.

    Args:
        files: files of the script, the script itself first.
    """
    if any(OUTPUT_VARIABLE in file.text or ".outputs" in file.text for file in files):
        return ()
    return (
        f"{files[0].name} never asks where to write its own files: of a rented machine the model comes back, and what "
        f"is in run.outputs, or the folder that {OUTPUT_VARIABLE} names.",
    )


def resumes(files: Iterable[SourceFile]) -> bool:
    """Return whether a script calls both ``checkpoint`` and ``resume`` of a session, and so goes on after a loss."""
    methods = {
        node.func.attr
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        # torch.utils.checkpoint.checkpoint(...) computes activations anew, and saves nothing.
        and "checkpoint" not in ast.unparse(node.func.value)
    }
    return {"checkpoint", "resume"} <= methods


def called(call: ast.Call) -> str:
    """Return the last part of a called function's name, ``step`` of ``optimizer.step()``; empty: it has no name."""
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
