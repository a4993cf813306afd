"""What a training script's text says about how it goes with other workers: it is parsed, nothing of it runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hetopt.core.errors import BadInput
from hetopt.core.outputs import OUTPUT_VARIABLE
from hetopt.core.reading import read_text
from hetopt.core.search_path import code_folder

PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""What torchrun tells a worker about its place among the others."""

MOST_NAMED = 3
"""Lines that write files, in remarks."""

_ASKED = {
    "get_rank": "RANK",
    "get_world_size": "WORLD_SIZE",
    "get_local_rank": "LOCAL_RANK",
    "get_node_local_rank": "LOCAL_RANK",
}
_LEADER = re.compile(r"rank|leader|master|main_process|is_main|primary|chief|gpu_id|\bgpu\b|proc_id", re.IGNORECASE)
_ALONE = re.compile(r"is_initialized|is_available|world|num_replicas", re.IGNORECASE)
_WRITERS = (
    "save_pretrained", "save_file", "save_image", "savefig", "savetxt", "savez", "to_csv", "to_json", "to_parquet",
    "to_pickle", "to_excel", "to_feather", "to_hdf", "to_html", "write_text", "write_bytes", "write_csv", "write_json",
    "write_parquet", "write_html", "write_image", "tofile", "save_model", "save_checkpoint_file", "savez_compressed",
    "imwrite", "imsave", "mimsave", "FileHandler", "RotatingFileHandler", "TimedRotatingFileHandler",
)  # fmt: skip
_SAVING_MODULES = ("torch", "np", "numpy", "torchaudio", "OmegaConf")
_WRITING = {
    "shutil": ("copy", "copy2", "copyfile", "copytree", "move", "make_archive"),
    "os": ("rename", "replace", "symlink"),
    "joblib": ("dump",),
    "sqlite3": ("connect",),
    "shelve": ("open",),
}
"""Functions of modules that write what they are given the name of."""

_OPENERS = ("gzip", "bz2", "lzma", "io", "codecs", "tarfile")
"""Modules whose ``open`` takes a path, then a mode."""

_OPENING = ("open", "File", "ZipFile", "GzipFile")
_MODE = re.compile(r"[wax](?:[bt+]*|[:|]\w*)")
_LEAVING = ("exit", "quit", "_exit", "SystemExit")

_SPLITTERS = ("array_split", "tensor_split", "chunk")
_SHARDERS = ("shard", "islice", "split_dataset_by_node", "Subset", "array_split")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something in a script's text, and where.

    Attributes:
        place: file and line: ``train.py, line 12``.
        code: what stands there, in short.
    """

    place: str
    code: str


@dataclass(frozen=True)
class SourceFile:
    """A file of a script, parsed."""

    name: str
    text: str
    tree: ast.Module

    @staticmethod
    def of(text: str, name: str) -> SourceFile:
        """Parse a text.

        Raises:
            BadInput: it is no Python.
        """
        try:
            return SourceFile(name, text, ast.parse(text))
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            raise BadInput(
                f"{name} is no Python that can be read{f', at line {line}' if line else ''}.",
                hint="see that it runs by itself",
            ) from None

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def around(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """What a node is in, from inside out, each with its child on the way."""
        while node in self.parents:
            child, node = node, self.parents[node]
            yield node, child

    def source(self, node: ast.AST) -> str:
        """Its text."""
        return ast.get_source_segment(self.text, node) or ""

    def where(self, node: ast.AST) -> str:
        """File and line."""
        return f"{self.name}, line {getattr(node, 'lineno', 1)}"

    def finding(self, node: ast.AST) -> Finding:
        """A node as people are told of it."""
        code = " ".join(self.source(node).split())
        return Finding(place=self.where(node), code=code if len(code) <= 60 else f"{code[:57]}...")


def read_script(path: Path) -> tuple[SourceFile, ...]:
    """A script and the modules of its author's that it imports, the script first.

    Raises:
        BadInput: it cannot be read, or is no Python.
    """
    folder, known, waiting = code_folder(path), {path.resolve()}, [path]
    files = []
    while waiting:
        one = waiting.pop(0)
        name = path.name if one == path else str(one.resolve().relative_to(folder))
        file = SourceFile.of(read_text(one, hint="give the path of the script"), name)
        files.append(file)
        for found in _local_modules(file, one.parent, folder):
            if found.resolve() not in known:
                known.add(found.resolve())
                waiting.append(found)
    return tuple(files)


def _local_modules(file: SourceFile, beside: Path, folder: Path) -> Iterator[Path]:
    for node in ast.walk(file.tree):
        names: list[str] = []
        base = folder
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{one.name}".lstrip(".") for one in node.names)]
            if node.level:
                base = [beside, *beside.parents][node.level - 1]
        for name in names:
            stem = base.joinpath(*name.split(".")) if name else base
            for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
                if name and candidate.is_file():
                    yield candidate


def on_several_workers(files: Iterable[SourceFile]) -> tuple[str, ...]:
    """What a script does that several workers would do at once, a sentence each.

    Raises:
        BadInput: it shares out its data by the worker's number.
    """
    written: list[Finding] = []
    for file in files:
        sharded = own_sharding(file)
        if sharded is not None:
            raise BadInput(
                f"{sharded.place}: the script takes a part of its data by its worker's number ({sharded.code}), and a "
                "session would share out that part alone.",
                hint="give every worker all of the data: a session's loader gives each its part of every batch",
            )
        written += [file.finding(one) for one in shared_files(file)]
    told = [
        f"{one.place} writes the same file on every worker ({one.code}): put it under `if run.is_leader:`."
        for one in written[:MOST_NAMED]
    ]
    if len(written) > MOST_NAMED:
        told.append(f"{len(written) - MOST_NAMED} other lines write files as well.")
    told += [
        f"{one.place} ends the script on some workers alone ({one.code}): the others wait for them, but after training."
        for file in files
        for one in _left_by_some(file)
    ]
    return tuple(told)


def _left_by_some(file: SourceFile) -> Iterator[Finding]:
    """Where the script ends by the worker's number."""
    rank = Derived(file, ("RANK", "LOCAL_RANK"))
    for node in ast.walk(file.tree) if rank.is_asked else ():
        if not isinstance(node, ast.Call) or called(node) not in _LEAVING:
            continue
        tests = [
            outer.test for outer, child in file.around(node) if isinstance(outer, ast.If) and child is not outer.test
        ]
        if any(rank.is_in(one) for test in tests for one in ast.walk(test)):
            yield file.finding(node)


def lost_files(files: Iterable[SourceFile]) -> tuple[str, ...]:
    """Files that a script writes elsewhere than into its folder of the run, a sentence each: with a machine they go."""
    found = [file.finding(one) for file in files for one in _written_elsewhere(file)]
    told = [
        f"{one.place} writes a file that a rented machine loses ({one.code}): write it into run.outputs, or the folder "
        f"that {OUTPUT_VARIABLE} names."
        for one in found[:MOST_NAMED]
    ]
    return (*told, *([f"{len(found) - MOST_NAMED} other lines do as well."] if len(found) > MOST_NAMED else []))


def _written_elsewhere(file: SourceFile) -> Iterator[ast.Call]:
    """Calls that write files, none of whose arguments is made of the folder that comes back."""
    kept = {OUTPUT_VARIABLE}
    pairs = [*((file.source(target), value) for target, value in assigned(file.tree)), *given(file.tree)]
    opened = [(file.source(one.optional_vars), one.context_expr) for one in ast.walk(file.tree)
              if isinstance(one, ast.withitem) and one.optional_vars is not None]  # fmt: skip
    while True:
        names = {name for name, value in (*pairs, *opened) if _mentions(value, kept)} - kept
        if not names:
            break
        kept |= names
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Call) or not _writes(node) or _mentions(node, kept):
            continue
        if not any("temp" in file.source(one) for one in node.args):
            yield node


def _mentions(node: ast.AST, names: Iterable[str]) -> bool:
    """Whether an expression is made of one of these names or texts, or of ``run.outputs``."""
    wanted = set(names)
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and one.attr == "outputs" and ast.unparse(one.value).endswith("run"):
            return True
        if isinstance(one, (ast.Name, ast.Attribute)) and ast.unparse(one) in wanted:
            return True
        if isinstance(one, ast.Constant) and one.value in wanted:
            return True
    return False


_ON_SEVERAL_WORKERS = {"hetopt", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "transformers"}
"""Packages with which a script trains on several workers: by a session, or by DistributedDataParallel inside them."""


def trains_on_several_workers(files: Iterable[SourceFile]) -> bool:
    """Return whether a script may train on several workers: by a session, by DistributedDataParallel or a framework.

    Whether it does is seen when it runs.
    """
    for node in (node for file in files for node in ast.walk(file.tree)):
        if isinstance(node, ast.Import) and any(_package(one.name) in _ON_SEVERAL_WORKERS for one in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and _package(node.module or "") in _ON_SEVERAL_WORKERS:
            return True
        name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
        if name.rpartition(".")[2] == "DistributedDataParallel":
            return True
    return False


def resumes(files: Iterable[SourceFile]) -> bool:
    """Whether a script saves checkpoints of its session and goes on from them: `run.checkpoint` and `run.resume`."""
    called_on_something = {
        node.func.attr
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        # torch.utils.checkpoint.checkpoint(...) computes activations anew, and saves nothing.
        and "checkpoint" not in file.source(node.func.value)
    }
    return {"checkpoint", "resume"} <= called_on_something


def _package(module: str) -> str:
    return module.partition(".")[0]


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def called(call: ast.Call) -> str:
    """The last name of what is called."""
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def default_of(files: Iterable[SourceFile], option: str) -> str:
    """What a script's argument parser gives an option that is not typed; empty: that is not said by a plain value."""
    for file in files:
        for call in ast.walk(file.tree):
            if not (isinstance(call, ast.Call) and called(call) == "add_argument"):
                continue
            if any(isinstance(one, ast.Constant) and one.value == option for one in call.args):
                values = [one.value for one in call.keywords if one.arg == "default"]
                return str(values[0].value) if values and isinstance(values[0], ast.Constant) else ""
    return ""


def own_sharding(file: SourceFile) -> Finding | None:
    """Where a script takes a part of its data by its worker's number; None: nowhere in plain sight.

    A session gives each worker its part of every batch: of a part, that would be a part of a part.
    """
    rank = Derived(file, ("RANK", "LOCAL_RANK"))
    if not rank.is_asked:
        return None
    parts = {file.source(name) for name, value in assigned(file.tree) if _is_split(value)}
    for node in ast.walk(file.tree):
        is_part = isinstance(node, ast.Subscript) and (_is_split(node.value) or file.source(node.value) in parts)
        if isinstance(node, ast.Subscript) and is_part and rank.is_in(node.slice):
            return file.finding(node)
        if isinstance(node, ast.Slice) and any(rank.is_in(one) for one in (node.lower, node.upper, node.step)):
            return file.finding(file.parents[node])
        if isinstance(node, ast.Call):
            given = [*node.args, *(one.value for one in node.keywords)]
            name = called(node)
            if (name in _SHARDERS or (name == "range" and len(given) == 3)) and any(map(rank.is_in, given)):
                return file.finding(node)
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.left, ast.BinOp)
            and isinstance(node.left.op, ast.Mod)
            and any(map(rank.is_in, node.comparators))
        ):
            return file.finding(node)
    return None


def _is_split(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and called(node) in _SPLITTERS


class Derived:
    """Which expressions of a file are computed from what torchrun tells a worker.

    Args:
        file: the script.
        variables: of torchrun.
        names: that are of that kind besides, whoever gives them a value.

    Attributes:
        is_asked: whether the file asks for one of them.
    """

    def __init__(self, file: SourceFile, variables: tuple[str, ...], names: Iterable[str] = ()) -> None:
        self._file, self._variables = file, variables
        self._names = set(names)
        self._attributes: set[str] = set()
        self.is_asked = bool(self._names) or any(self._asks(node) for node in ast.walk(file.tree))
        if not self.is_asked:
            return
        pairs = [*((file.source(target), value) for target, value in assigned(file.tree)), *given(file.tree)]
        fields = list(_fields(file))
        while True:
            known = len(self._names) + len(self._attributes)
            self._names |= {name for name, value in pairs if self.is_in(value)}
            self._attributes |= {name for name, value in fields if self.is_in(value)}
            if len(self._names) + len(self._attributes) == known:
                return

    def _asks(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            asked = node.args[0] if node.args else None
            if called(node) in ("get", "getenv"):
                return isinstance(asked, ast.Constant) and asked.value in self._variables
            return _ASKED.get(called(node)) in self._variables
        return (
            isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Constant)
            and node.slice.value in self._variables
        )

    def is_in(self, node: ast.AST | None) -> bool:
        """Whether an expression is a number that is made of it."""
        if node is None:
            return False
        if self._asks(node):
            return True
        if isinstance(node, (ast.Name, ast.Attribute)):
            is_field = (
                isinstance(node, ast.Attribute) and node.attr in self._attributes and _named(node.value) != "self"
            )
            return is_field or self._file.source(node) in self._names
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return node.slice.value in self._attributes
        is_number = isinstance(node, (ast.BinOp, ast.UnaryOp, ast.IfExp, ast.BoolOp))
        is_number = is_number or (isinstance(node, ast.Call) and called(node) in ("int", "max", "min", "range"))
        return is_number and any(self.is_in(one) for one in ast.iter_child_nodes(node))


def _fields(file: SourceFile) -> Iterator[tuple[str, ast.expr]]:
    """Attributes of objects and keys of dictionaries, with what is put there: in the body of a class or one of its
    methods, by name in a record (``Namespace(rank=...)``), as the default of an option, in a dictionary."""
    for target, value in assigned(file.tree):
        if isinstance(target, ast.Attribute):
            yield target.attr, value
        elif isinstance(target, ast.Name) and isinstance(file.parents.get(file.parents[target]), ast.ClassDef):
            yield target.id, value
        elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            yield str(target.slice.value), value
    records = {"dict", "Namespace", "SimpleNamespace", "EasyDict"}
    records |= {one.name for one in ast.walk(file.tree) if isinstance(one, ast.ClassDef) and not _has_init(one)}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Dict):
            keys = zip(node.keys, node.values, strict=True)
            yield from ((str(key.value), value) for key, value in keys if isinstance(key, ast.Constant))
        elif isinstance(node, ast.Call) and called(node) == "add_argument":
            options = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
            defaults = [one.value for one in node.keywords if one.arg == "default"]
            yield from ((one.lstrip("-").replace("-", "_"), value) for one in options for value in defaults)
        elif isinstance(node, ast.Call) and called(node) in records:
            yield from ((one.arg, one.value) for one in node.keywords if one.arg)


def _has_init(node: ast.ClassDef) -> bool:
    return any(isinstance(one, ast.FunctionDef) and one.name == "__init__" for one in node.body)


def _named(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def given(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Parameters of the file's functions, each with what a call gives for it."""
    functions: dict[str, list[ast.arg]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            inner = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
            functions |= {name: parameters(one)[1:] for name, one in inner.items() if name != "__init__"}
            if "__init__" in inner:
                functions[node.name] = parameters(inner["__init__"])[1:]
        elif isinstance(node, ast.FunctionDef) and node.name not in functions:
            functions[node.name] = parameters(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in functions:
            names = functions[called(node)]
            yield from ((one.arg, value) for one, value in zip(names, node.args, strict=False))
            yield from ((one.arg, one.value) for one in node.keywords if one.arg in {its.arg for its in names})


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """Of a function, those that can be given by place first."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def assigned(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Everything that is given a value inside, with the value; tuples part by part where both sides are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple):
                    if isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(target.elts):
                        yield from zip(target.elts, node.value.elts, strict=True)
                else:
                    yield target, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value


def shared_files(file: SourceFile) -> tuple[ast.Call, ...]:
    """Calls that write a file of the same name on all workers, in plain sight and under no guard of the leader."""
    return tuple(
        node
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Call)
        and _writes(node)
        and not any(_LEADER.search(file.source(one)) or "temp" in file.source(one) for one in node.args[:2])
        and not is_guarded(file, node)
    )


def _writes(call: ast.Call) -> bool:
    name, module = called(call), _root(call.func)
    if name in _WRITING.get(module, ()):
        return True
    if name in _OPENING:
        # The mode's place: open(path, mode), path.open(mode).
        place = 1 if isinstance(call.func, ast.Name) or module in _OPENERS or name != "open" else 0
        modes = [*call.args[place : place + 1], *(one.value for one in call.keywords if one.arg == "mode")]
        return any(isinstance(one, ast.Constant) and _MODE.fullmatch(str(one.value)) for one in modes)
    if name == "save":  # of a module, or of a thing: an image, a tokenizer
        return len(call.args) > 1 if module in _SAVING_MODULES else any(map(_is_text, call.args[:1]))
    if name == "dump":
        return any(map(_is_text, call.args[1:2]))
    if name == "basicConfig":
        return any(one.arg == "filename" for one in call.keywords)
    return name in _WRITERS


def _is_text(node: ast.AST) -> bool:
    """Whether a text stands there, as names of files are written."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_guarded(file: SourceFile, node: ast.AST, *, depth: int = 3) -> bool:
    """Whether only one worker comes to a node: an ``if`` about ranks is around it, or around every call of its
    function."""
    for outer, child in file.around(node):
        if isinstance(outer, (ast.If, ast.IfExp)) and child is not outer.test and _is_of_leader(file, outer.test):
            return True
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            returns = [
                one
                for one in outer.body
                if isinstance(one, ast.If) and _is_of_leader(file, one.test) and isinstance(one.body[-1], ast.Return)
            ]
            if any(one.lineno < getattr(node, "lineno", 0) for one in returns):
                return True
            calls = [
                one
                for one in ast.walk(file.tree)
                if isinstance(one, ast.Call)
                and called(one) == outer.name
                and _root(one.func) not in _SAVING_MODULES
                and depth > 0
            ]
            return bool(calls) and all(is_guarded(file, one, depth=depth - 1) for one in calls)
    return False


def _is_of_leader(file: SourceFile, test: ast.AST) -> bool:
    """Whether a test is about the leader; where one of several is enough, whether all are, or about being alone."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return all(_is_of_leader(file, one) or _ALONE.search(file.source(one)) for one in test.values)
    return bool(_LEADER.search(file.source(test)))
