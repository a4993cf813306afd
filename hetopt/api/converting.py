"""`hetopt.convert`: writes the four lines of a session into a training script of one process.

The plain case is a loop over a DataLoader in which losses call ``backward``, and optimizers that are made of models'
``parameters()``. The session begins where loader, models and optimizers all have names, around the outermost loop:

    with session(model, optimizer) as run:
        loader = run.loader(loader)
        for epoch in range(epochs):
            for x, y in loader:
                ...
                run.backward(loss)

Nothing of the script is taken out, and whatever is not plain is left to a person, with these lines.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hetopt.api.script_text import SourceFile, called, read_script, several_workers
from hetopt.core.errors import BadInput
from hetopt.core.paths import read_text
from hetopt.core.plain_text import typed

FOUR_LINES = """\
from hetopt import session

with session(model, optimizer) as run:    # around the training; several: (one, other)
    loader = run.loader(loader)           # of what is trained on; no DataLoader: run.split
    for batch in loader:                  # as before
        run.backward(loss)                # in the place of loss.backward()
"""

_SHOWN_AS_THEY_COME = ("enumerate", "tqdm", "track", "islice")
"""Functions around a loader that give its batches in their order."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Edit = tuple[int, int, str]
"""Bytes of a text, from one to another, and the text in their place."""


class NotPlain(BadInput):
    """A script into which a person has to write the four lines."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint or "write the four lines by hand, as docs/your-own-code.md shows")


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A script with a session in it.

    Attributes:
        text: of the new script.
        diff: unified, from the old text to the new one.
        remarks: sentences on what the person should know.
    """

    text: str
    diff: str
    remarks: tuple[str, ...] = ()


def convert(script: Path | str) -> Converted:
    """Write a session into a training script of one process.

    Args:
        script: a file with one loop over a DataLoader, in functions or in a class.

    Raises:
        NotPlain: a person has to write the four lines; the sentence says what was looked for, and where.
        BadInput: it is no Python file, or trains on several workers as it is.
    """
    path = Path(script)
    files = read_script(path)
    converted = convert_text(read_text(path, hint="give the path of the script"), name=path.name, others=files[1:])
    if b"\r\n" not in path.read_bytes():
        return converted
    text = converted.text.replace("\n", "\r\n")  # lines end as they did
    return Converted(text=text, diff=converted.diff, remarks=converted.remarks)


def convert_text(text: str, *, name: str = "script.py", others: Iterable[SourceFile] = ()) -> Converted:
    """Write a session into a text.

    Args:
        text: of the script.
        name: of the file, for messages and the diff.
        others: modules of the author's that it imports.
    """
    files = (SourceFile.of(text, name), *others)
    way = several_workers(files)
    if way == "a session":
        raise BadInput(f"{name} has a session already.", hint=f"it runs as it is: hetopt launch PLAN -- {typed(name)}")
    if way:
        raise BadInput(
            f"{name} trains on several workers already, by {way}.",
            hint=f"it runs as it is: hetopt launch PLAN -- {typed(name)}",
        )
    new, remarks = _Conversion(files).run()
    diff = difflib.unified_diff(
        text.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}", n=2
    )
    return Converted(text=new, diff="".join(diff), remarks=remarks)


@dataclass(frozen=True)
class _Frame:
    """A place on the way from a backward pass out to where training begins.

    Attributes:
        node: the backward pass, or the call that leads to it.
        function: around it; None: the file.
        loader: the loader as it is written here; None: its loop is further out.
    """

    node: ast.AST
    function: Function | None
    loader: str | None


@dataclass(frozen=True)
class _Bound:
    """A value that a name gets, and the function in which it does; None: the file."""

    name: str
    value: ast.expr
    function: Function | None


class _Conversion:
    def __init__(self, files: tuple[SourceFile, ...]) -> None:
        self._file, self._others = files[0], files[1:]
        self._has_loader = any("DataLoader" in file.text for file in files)
        nodes = list(ast.walk(self._file.tree))
        self._calls = [node for node in nodes if isinstance(node, ast.Call)]
        self._bound = [
            _Bound(ast.unparse(target), value, self._function_of(value)) for target, value in _assigned(nodes)
        ]
        self._called = {ast.unparse(call.func) for call in self._calls}
        names = {getattr(node, kind, None) for node in nodes for kind in ("id", "name", "arg")}
        self._run = "session_run" if "run" in names else "run"
        self._import, self._session = "from hetopt import session", "session"
        if "session" in names:
            self._import, self._session = "import hetopt", "hetopt.session"
        self._optimizers = self._find_optimizers()

    def run(self) -> tuple[str, tuple[str, ...]]:
        """Return the new text, and what the person should know."""
        backwards = self._backwards()
        ways = [self._way(backward) for backward in backwards]
        begin = ways[0][-1]
        start = self._start(begin)
        for backward, way in zip(backwards, ways, strict=True):
            if self._start(way[-1]) is not start or way[-1].loader != begin.loader:
                raise self._not_plain(backward, f"is of another loop than that of line {backwards[0].lineno}")
        text = self._with_session(backwards, ways, start)
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise NotPlain(f"{self._file.name}, line {error.lineno} of the new text would be no Python.") from None
        return text, (
            f"Every worker runs the whole script: put what prints and saves under `if {self._run}.is_leader:`.",
            "What it prints of a batch is worker 0's part of it: "
            f"{self._run}.mean(value) is the mean over all samples.",
        )

    def _not_plain(self, node: ast.AST, reason: str) -> NotPlain:
        return NotPlain(f"{self._file.where(node)}: the backward pass {reason}.")

    def _backwards(self) -> list[ast.Call]:
        for call in self._calls:
            if called(call) == "init_process_group":
                raise NotPlain(
                    f"{self._file.where(call)}: the script joins other processes by itself.",
                    hint="wrap its model in DistributedDataParallel: then it runs as it is",
                )
        backwards = [
            call
            for call in self._calls
            if isinstance(call.func, ast.Attribute)
            and call.func.attr == "backward"
            and ast.unparse(call.func.value) not in ("super()", "torch.autograd")
        ]
        if not backwards:
            elsewhere = [file.name for file in self._others if ".backward(" in file.text]
            raise NotPlain(
                f"{self._file.name} calls `backward` nowhere{f'; {elsewhere[0]} does' if elsewhere else ''}."
            )
        if not self._has_loader:
            raise self._not_plain(backwards[0], "is of batches that come from no DataLoader")
        if not self._optimizers:
            raise NotPlain(
                f"{self._file.name} gives no optimizer of a model's parameters a name, as in "
                "`optimizer = torch.optim.SGD(model.parameters(), lr=0.1)`."
            )
        return backwards

    # What the names are

    def _find_optimizers(self) -> dict[str, ast.Call]:
        """Return the calls of classes that are given ``parameters()``, by the name that the optimizer gets."""
        made = {
            bound.name: bound.value
            for bound in self._bound
            if isinstance(bound.value, ast.Call) and _is_made(bound.value) and self._models(bound.value)
        }
        stepping = {name for _, names in self._steps() for name in names}
        return {name: call for name, call in made.items() if _last(name) in stepping} or made

    def _steps(self) -> Iterator[tuple[ast.Call, set[str]]]:
        """Yield the calls of ``step``, with the last names of what may step: ``opt.step()``, ``scaler.step(opt)``."""
        for call in self._calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "step":
                yield call, {_last(ast.unparse(node)) for node in (call.func.value, *call.args[:1])}

    def _models(self, made: ast.AST) -> list[str]:
        """Return the models whose parameters an expression is made of, also through lists that have a name."""
        waiting, known, models = [made], set[str](), list[str]()
        home = self._function_of(made)
        for expression in waiting:  # which grows
            for node in ast.walk(expression):
                if isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters"):
                    models.append(ast.unparse(node.value))
                elif isinstance(node, ast.Name) and node.id not in known:
                    known.add(node.id)
                    waiting += [
                        bound.value
                        for bound in self._bound
                        if bound.name == node.id and bound.function is home and not _is_made(bound.value)
                    ]
        return list(dict.fromkeys(models))

    def _model_names(self, begin: _Frame) -> list[str]:
        """Return the models of all optimizers, whole, as they are written where training begins.

        Raises:
            NotPlain: one has no name there.
        """
        names = []
        for optimizer, made in self._optimizers.items():
            home = self._function_of(made)
            for model in self._models(made):
                parts = model.split(".")
                prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
                name: str | None = next((prefix for prefix in prefixes if prefix in self._called), model)
                if optimizer.startswith("self.") and not model.startswith("self") and home is not begin.function:
                    aliases = [
                        bound.name
                        for bound in self._bound
                        if bound.function is home and ast.unparse(bound.value) == name
                    ]
                    name = next(iter(aliases), None)
                root = model.partition(".")[0]
                if name is None or not root.isidentifier() or root in self._turns():
                    raise NotPlain(
                        f"{self._file.where(made)}: the model of {optimizer}, {model}, has no name of its own."
                    )
                names.append(name)
        return list(dict.fromkeys(names))

    def _turns(self) -> set[str]:
        """Return the names that loops and comprehensions give another value each time."""
        loops = [node for node in ast.walk(self._file.tree) if isinstance(node, (ast.For, ast.comprehension))]
        return {node.id for loop in loops for node in ast.walk(loop.target) if isinstance(node, ast.Name)}

    def _function_of(self, node: ast.AST) -> Function | None:
        return next((outer for outer in self._file.around(node) if isinstance(outer, Function)), None)

    def _class_of(self, function: Function | None) -> ast.AST | None:
        outer = None if function is None else self._file.parents[function]
        return outer if isinstance(outer, ast.ClassDef) else None

    def _sees(self, function: Function | None, name: str, made: ast.AST) -> bool:
        """Return whether a function may use a name that is given a value there."""
        home = self._function_of(made)
        if name.startswith("self."):
            return home is not None and self._class_of(home) is self._class_of(function) is not None
        return home is None or home is function or (function is not None and home in self._file.around(function))

    # From a backward pass outwards

    def _way(self, backward: ast.Call) -> list[_Frame]:
        """Return the places from a backward pass to where training begins, innermost first."""
        frames: list[_Frame] = []
        node: ast.AST = backward
        loader = None
        while True:
            function = self._function_of(node)
            loader = loader or self._loader_around(node)
            frames.append(_Frame(node, function, loader))
            seen = [self._sees(function, name, made) for name, made in self._optimizers.items()]
            own = [self._function_of(made) is function for made in self._optimizers.values()]
            if loader and all(seen) and (any(own) or function is None or not self._is_repeated(function)):
                return frames
            calls = self._calls_of(function) if function else []
            if function is None or len(calls) != 1 or len(frames) > len(self._calls):
                reason = "is in no `for` loop over a loader that has a name"
                if function is not None:
                    reason = f"is in {function.name}, which is called in {len(calls)} places"
                elif loader:
                    reason = "is of optimizers that have no name where its loop is"
                raise self._not_plain(backward, reason)
            if loader:
                loader = self._outside(loader, function, calls[0])
                if loader is None:
                    raise self._not_plain(backward, f"is of a loader that {function.name} makes anew in every call")
            node = calls[0]

    def _calls_of(self, function: Function) -> list[ast.Call]:
        is_method = self._class_of(function) is not None
        calls = [
            call
            for call in self._calls
            if called(call) == function.name and isinstance(call.func, ast.Attribute) == is_method
        ]
        own = [call for call in calls if ast.unparse(call.func) == f"self.{function.name}"]
        return own or calls  # optimizer.step() is none of the class's step

    def _is_repeated(self, function: Function) -> bool:
        """Return whether a function is called in a loop, or by one that is."""
        waiting: list[Function | None] = [function]
        for outer in waiting:  # which grows
            for call in self._calls_of(outer) if outer else ():
                if self._loops(call):
                    return True
                home = self._function_of(call)
                waiting += [] if home in waiting else [home]
        return False

    def _loops(self, node: ast.AST) -> list[ast.For | ast.While]:
        """Return the loops around a node in its function, innermost first."""
        loops = []
        for outer in self._file.around(node):
            if isinstance(outer, (Function, ast.ClassDef)):
                break
            if isinstance(outer, (ast.For, ast.While)):
                loops.append(outer)
        return loops

    def _loader_around(self, node: ast.AST) -> str | None:
        """Return what the nearest loop over batches reads: ``loader``, ``enumerate(self.loader)``, ``tqdm(loader)``."""
        for loop in self._loops(node):
            if isinstance(loop, ast.While):
                continue
            read = self._inside(loop.iter)
            is_item = isinstance(read, ast.Subscript) and isinstance(read.slice, ast.Constant)
            if isinstance(read, (ast.Name, ast.Attribute)) or is_item:
                return ast.unparse(read)
        return None

    @staticmethod
    def _inside(shown: ast.expr) -> ast.expr:
        while isinstance(shown, ast.Call) and called(shown) in _SHOWN_AS_THEY_COME and shown.args:
            shown = shown.args[0]
        return shown

    def _outside(self, name: str, function: Function, call: ast.Call) -> str | None:
        """Return what a function's name is where the function is called; None: it is made inside."""
        root, rest = name, ""
        for mark in ".[":
            if mark in root:
                root, _, tail = root.partition(mark)
                rest = mark + tail + rest
        parameters = _parameters(function)
        given: ast.expr | None = None
        if root in parameters:
            method = self._class_of(function) is not None and isinstance(call.func, ast.Attribute)
            place = parameters.index(root) - method
            by_name = [keyword.value for keyword in call.keywords if keyword.arg == root]
            by_place = [] if place < 0 else call.args[place : place + 1]
            given = next(iter([*by_name, *by_place]), None)
            if place < 0 and isinstance(call.func, ast.Attribute):
                given = call.func.value
        else:
            own = [bound.value for bound in self._bound if bound.name == root and bound.function is function]
            if len(own) == 1 and isinstance(own[0], (ast.Name, ast.Attribute)):  # another name of it
                return self._outside(f"{ast.unparse(own[0])}{rest}", function, call)
            return None if own else name
        return f"{ast.unparse(given)}{rest}" if isinstance(given, (ast.Name, ast.Attribute)) else None

    def _start(self, begin: _Frame) -> ast.stmt:
        """Return the statement with which training begins: the outermost loop in which no optimizer is made.

        Raises:
            NotPlain: its loader is made inside, or it shares a line.
        """
        loops = [
            loop
            for loop in self._loops(begin.node)
            if not any(node in self._optimizers.values() for node in ast.walk(loop))
        ]
        around = (outer for outer in (begin.node, *self._file.around(begin.node)) if isinstance(outer, ast.stmt))
        start: ast.stmt = loops[-1] if loops else next(around)
        for bound in self._bound:
            is_loader = bound.function is begin.function and bound.name == begin.loader
            if is_loader and _is_within(bound.value, start):
                raise NotPlain(f"{self._file.where(bound.value)}: {bound.name} is made anew each time.")
        return start

    # What is written

    def _with_session(self, backwards: list[ast.Call], ways: list[list[_Frame]], start: ast.stmt) -> str:
        begin = ways[0][-1]
        assert begin.loader is not None
        text = self._file.text.encode()  # columns of the tree count bytes
        lines = text.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        margin = lines[start.lineno - 1][: start.col_offset].decode()
        if margin.strip():
            raise NotPlain(f"{self._file.where(start)}: the loop shares a line with another statement.")
        unit = "\t" if any(line.startswith(b"\t") for line in lines) else "    "
        edits: list[Edit] = []
        shared: set[str] = set()
        for backward, way in zip(backwards, ways, strict=True):
            handle = self._handle(way)
            if handle == self._run and begin.function not in (None, *self._file.around(backward)):
                shared.add(self._run)
            edits += _replaced(backward, handle, text, starts)
        if begin.function is not None and self._is_of_file(begin.loader, begin.function):
            shared.add(begin.loader)
        if shared and self._function_of(begin.function or start) is not None and begin.function is not None:
            raise NotPlain(f"{self._file.where(begin.function)}: {begin.function.name} is in another function.")
        if shared and begin.function is not None:
            body = begin.function.body
            first = body[1] if ast.get_docstring(begin.function) is not None and len(body) > 1 else body[0]
            place = starts[first.lineno - 1]
            inner = lines[first.lineno - 1][: first.col_offset].decode()
            edits.append((place, place, f"{inner}global {', '.join(sorted(shared))}\n"))
        place = starts[start.lineno - 1]
        given = (_tuple(self._model_names(begin)), _tuple(list(self._optimizers)))
        head = f"{margin}with {self._session}({', '.join(given)}) as {self._run}:\n"
        edits.append((place, place, f"{head}{margin}{unit}{begin.loader} = {self._run}.loader({begin.loader})\n"))
        inside_strings = {
            number
            for node in ast.walk(start)
            if isinstance(node, (ast.Constant, ast.JoinedStr))
            # Others of several lines are pieces in brackets.
            and any(mark in lines[node.lineno - 1] for mark in (b'"""', b"'''", b"\\\n"))
            for number in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
        }
        for number in range(start.lineno, (start.end_lineno or start.lineno) + 1):
            if number not in inside_strings and lines[number - 1].strip():
                edits.append((starts[number - 1], starts[number - 1], unit))
        place = starts[self._import_line(start) - 1]
        edits.append((place, place, f"{self._import}\n"))
        pieces, done = [], 0
        for first_byte, last_byte, new in sorted(edits, key=lambda edit: edit[0]):  # stable: as they were added
            pieces += [text[done:first_byte], new.encode()]
            done = last_byte
        return b"".join([*pieces, text[done:]]).decode()

    def _handle(self, way: list[_Frame]) -> str:
        """Return how the session is reached from a backward pass: by its name, or as its loader's ``run``."""
        inner, begin = way[0], way[-1]
        if begin.function is None or inner.function is begin.function or inner.loader is None:
            return self._run
        is_other = any(bound.name == inner.loader and bound.function is inner.function for bound in self._bound)
        return self._run if is_other else f"{inner.loader}.run"

    def _is_of_file(self, name: str, function: Function) -> bool:
        """Return whether a name is the file's variable in a function."""
        own = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        return name.isidentifier() and name not in own.union(_parameters(function))

    def _import_line(self, start: ast.stmt) -> int:
        """Return the line before which the import goes: behind the file's first imports, or its docstring."""
        body = self._file.tree.body
        is_import = (isinstance(node, (ast.Import, ast.ImportFrom)) and node.lineno < start.lineno for node in body)
        before = [node for node, counts in zip(body, is_import, strict=True) if counts]
        if not before and ast.get_docstring(self._file.tree) is not None:
            before = body[:1]
        return (before[-1].end_lineno or before[-1].lineno) + 1 if before else body[0].lineno


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield everything that is given a value, with the value; tuples part by part where both sides are."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield from ((part, node.value) for part in getattr(target, "elts", [target]))
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield node.optional_vars, node.context_expr


def _parameters(function: Function) -> list[str]:
    return [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_within(node: ast.AST, outer: ast.stmt) -> bool:
    return outer.lineno <= getattr(node, "lineno", 0) <= (outer.end_lineno or outer.lineno)


def _is_made(value: ast.AST) -> bool:
    """Return whether a value is an object of a class, as far as names tell."""
    return isinstance(value, ast.Call) and called(value)[:1].isupper()


def _replaced(backward: ast.Call, handle: str, text: bytes, starts: list[int]) -> list[Edit]:
    """Return the edits that make ``run.backward(loss)`` of ``loss.backward()``; the loss stays as it is written."""
    begin = starts[backward.lineno - 1] + backward.col_offset
    end = starts[(backward.func.end_lineno or 1) - 1] + (backward.func.end_col_offset or 0)
    dot = text.rindex(b".", begin, end)
    rest = text.index(b"(", end) + 1
    return [
        (begin, begin, f"{handle}.backward("),
        (dot, rest, ", " if backward.args or backward.keywords else ""),
    ]


def _tuple(names: list[str]) -> str:
    return f"({', '.join(names)})" if len(names) > 1 else names[0]
