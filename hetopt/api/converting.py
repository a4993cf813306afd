"""`hetopt.convert`: writes the four lines of a session into a training script of one process.

The plain case is a loop over a DataLoader in which losses call ``backward``, and optimizers that are made of models'
``parameters()``, in functions or in the file. The session begins in the function that makes the optimizers, around the
outermost loop, or around the one call that leads to it:

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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetopt.api.script_text import SourceFile, called, read_script, several_workers
from hetopt.core.errors import BadInput
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


class NotPlain(BadInput):
    """The error of a script that cannot be converted: a person has to write the four lines of a session.

    Args:
        message: sentence on what was found, and where.
        hint: what to do; empty: write the lines by hand.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint or "write the four lines by hand, as docs/your-own-code.md shows")


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A training script of one process with the four lines of a session written into it; no file is written.

    Attributes:
        text: text of the new script.
        diff: unified diff from the old text to the new one.
        remarks: sentences on what the person should check in the new script.
    """

    text: str
    diff: str
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Training:
    """The loop, loader, optimizers and models of a plain training script.

    Attributes:
        start: statement that the session goes around.
        loader: name of the loader at ``start``.
        optimizers: names of the optimizers there.
        models: names of the models there.
        run: name of the session.
        handles: expression for the session, by backward call: ``run``, or ``LOADER.run`` in functions given a loader.
    """

    start: ast.stmt
    loader: str
    optimizers: tuple[str, ...]
    models: tuple[str, ...]
    run: str
    handles: dict[ast.Call, str]


def convert(script: Path | str) -> Converted:
    """Return a training script of one process with a session written into it, and the diff; the file stays as it is.

    Args:
        script: file with one training loop over a DataLoader, at its top level or in functions; local modules that it
            imports are read, too.

    Raises:
        NotPlain: the script is not the plain case; the sentence says what was found, and on which line.
        BadInput: the file cannot be read or is no Python, or the script already trains on several workers.
    """
    path = Path(script)
    files = read_script(path)
    return convert_text(files[0].text, name=path.name, others=files[1:])


def convert_text(text: str, *, name: str = "script.py", others: Iterable[SourceFile] = ()) -> Converted:
    """Return the text of a one-process training script with a session written into it, and the diff; run none of it.

    Args:
        text: text of the script.
        name: file name of the script, for messages and the diff.
        others: parsed local modules that the script imports.

    Raises:
        NotPlain: the script is not the plain case; the sentence says what was found, and on which line.
        BadInput: the text is no Python, or the script already trains on several workers.
    """
    files = (SourceFile.of(text, name), *others)
    if way := several_workers(files):
        raise BadInput(
            f"{name} {'has' if way == 'a session' else 'trains on several workers already, by'} {way}.",
            hint=f"it runs as it is: hetopt launch PLAN -- {typed(name)}",
        )
    training = _training_of(files)
    new = _with_session(files[0], training)
    diff = difflib.unified_diff(
        text.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}", n=2
    )
    remarks = (
        f"Every worker runs the whole script: put what prints and saves under `if {training.run}.is_leader:`.",
        f"What it prints of a batch is worker 0's part of it: {training.run}.mean(value) is the mean over all samples.",
    )
    return Converted(text=new, diff="".join(diff), remarks=remarks)


def _training_of(files: Sequence[SourceFile]) -> _Training:
    """Return the training of the first of a script's files.

    Raises:
        NotPlain: it is not the plain case.
    """
    file = files[0]
    calls = [node for node in ast.walk(file.tree) if isinstance(node, ast.Call)]
    if any(called(call) == "init_process_group" for call in calls):
        raise NotPlain(
            f"{file.name}: the script joins other processes by itself.",
            hint="wrap its model in DistributedDataParallel: then it runs as it is",
        )
    backwards = [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and called(call) == "backward"
        and ast.unparse(call.func.value) not in ("super()", "torch.autograd")
    ]
    if not backwards:
        elsewhere = [other.name for other in files[1:] if ".backward(" in other.text]
        raise NotPlain(f"{file.name} calls `backward` nowhere{f'; {elsewhere[0]} does' if elsewhere else ''}.")
    if not any("DataLoader" in each.text for each in files):
        raise _not_plain(file, backwards[0], "is of batches that come from no DataLoader")
    bound = [(target, value, _function_of(file, value)) for target, value in _assigned(file.tree)]
    stepping = {ast.unparse(node) for call in calls if called(call) == "step" for node in (call.func, *call.args[:1])}
    constructed = {
        name: (value, home)
        for name, value, home in bound
        if isinstance(value, ast.Call) and called(value)[:1].isupper() and _models(value, home, bound)
    }
    optimizers = {name: it for name, it in constructed.items() if {name, f"{name}.step"} & stepping} or constructed
    homes = {home for _, home in optimizers.values()}
    if len(homes) != 1 or not all(name.isidentifier() for name in optimizers):
        raise NotPlain(
            f"{file.name} gives no optimizer of a model's parameters a name in one function, as in "
            "`optimizer = torch.optim.SGD(model.parameters(), lr=0.1)`."
        )
    (home,) = homes
    models = dict.fromkeys(model for value, _ in optimizers.values() for model in _models(value, home, bound))
    known = {name for name, _, function in bound if function in (home, None)}.union(_parameters(home))
    for model in models:
        if model.partition(".")[0] not in known:
            raise NotPlain(f"{file.name}: the model {model} has no name of its own where its optimizer is made.")
    names = {getattr(node, kind, None) for node in ast.walk(file.tree) for kind in ("id", "name", "arg")}
    run = "session_run" if "run" in names else "run"
    handles, begins = dict[ast.Call, str](), list[tuple[ast.stmt, str]]()
    for backward in backwards:
        node, loader, handles[backward] = _way_out(file, backward, home, calls, run)
        begins.append((_start(file, node, [value for value, _ in optimizers.values()]), loader))
        if begins[-1] != begins[0]:
            raise _not_plain(file, backward, f"is of another loop than that of line {backwards[0].lineno}")
    start, loader = begins[0]
    for name, value, function in bound:
        if (name, function) == (loader, home) and start in file.around(value):
            raise NotPlain(f"{file.where(value)}: {loader} is made anew each time.")
    return _Training(
        start=start, loader=loader, optimizers=tuple(optimizers), models=tuple(models), run=run, handles=handles
    )


def _way_out(
    file: SourceFile, backward: ast.Call, home: Function | None, calls: Sequence[ast.Call], run: str
) -> tuple[ast.AST, str, str]:
    """Return the call in ``home`` that leads to a backward pass, its loader's name there, and the session's at the end.

    Args:
        file: script.
        backward: call of the backward pass; returned itself where it is in ``home``.
        home: function in which the optimizer is made; None: the module.
        calls: all calls of the script.
        run: name of the session in ``home``.

    Raises:
        NotPlain: more than one call leads there, or the loader has no name on the way.
    """
    node: ast.AST = backward
    function = inner = _function_of(file, node)
    loader, handle = _loader_around(file, node), run
    if function is not home and home is not None:
        handle = f"{loader}.run"
    while function is not home:
        call_sites = [
            call for call in calls if function and isinstance(call.func, ast.Name) and called(call) == function.name
        ]
        if function is None or len(call_sites) != 1:
            name = "the file" if function is None else f"{function.name}, which is called in {len(call_sites)} places"
            raise _not_plain(file, backward, f"is in {name}, and its optimizer is made elsewhere")
        node = call_sites[0]
        is_given = loader in _parameters(function)
        if loader in _stored(function) or (loader is not None and home is not None and not is_given):
            raise _not_plain(file, backward, f"is of a loader that {function.name} is not given")
        loader = _given(call_sites[0], function, loader) if is_given and loader is not None else loader
        function = _function_of(file, node)
        loader = loader or _loader_around(file, node)
    if loader is None or handle == "None.run":
        raise _not_plain(file, backward, "is in no `for` loop over a loader that has a name")
    if handle == run and inner is not home and run in _stored(inner):
        raise _not_plain(file, backward, f"is in a function that has another {run}")
    return node, loader, handle


def _start(file: SourceFile, node: ast.AST, optimizers: Sequence[ast.AST]) -> ast.stmt:
    """Return the statement with which training begins: the outermost loop around ``node`` that makes no optimizer.

    Without such a loop, the statement that ``node`` is in.
    """
    loops = [loop for loop in _loops(file, node) if not any(inner in optimizers for inner in ast.walk(loop))]
    around = (outer for outer in file.around(node) if isinstance(outer, ast.stmt))
    return loops[-1] if loops else next(around)


def _with_session(file: SourceFile, training: _Training) -> str:
    """Return the script's text with a session around ``training``: its import, its ``with``, and its backward calls.

    Raises:
        NotPlain: the loop shares a line, or holds a string of several lines.
    """
    text, start, run = file.text.encode(), training.start, training.run  # columns of the tree count bytes
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    margin = lines[start.lineno - 1][: start.col_offset].decode()
    edits: list[tuple[int, int, str]] = []
    for backward, handle in training.handles.items():
        begin = starts[backward.lineno - 1] + backward.col_offset
        end = starts[(backward.func.end_lineno or 1) - 1] + (backward.func.end_col_offset or 0)
        edits.append((begin, begin, f"{handle}.backward("))
        rest = ", " if backward.args or backward.keywords else ""
        edits.append((text.rindex(b".", begin, end), text.index(b"(", end) + 1, rest))
    unit = "\t" if margin.startswith("\t") else "    "
    taken = any(getattr(node, kind, "") == "session" for node in ast.walk(file.tree) for kind in ("id", "name", "arg"))
    session = "hetopt.session" if taken else "session"
    given = ", ".join(
        f"({', '.join(each)})" if len(each) > 1 else each[0] for each in (training.models, training.optimizers)
    )
    loader = f"{training.loader} = {run}.loader({training.loader})"
    head = f"{margin}with {session}({given}) as {run}:\n{margin}{unit}{loader}\n"
    edits.append((starts[start.lineno - 1], starts[start.lineno - 1], head))
    for number in range(start.lineno, (start.end_lineno or start.lineno) + 1):
        if lines[number - 1].strip():
            edits.append((starts[number - 1], starts[number - 1], unit))
    place = starts[_import_line(file.tree, start) - 1]
    edits.append((place, place, "import hetopt\n" if taken else "from hetopt import session\n"))
    pieces, done = [], 0
    for first_byte, last_byte, new in sorted(edits, key=lambda edit: edit[0]):  # stable: as they were added
        pieces += [text[done:first_byte], new.encode()]
        done = last_byte
    written = b"".join([*pieces, text[done:]]).decode()
    try:
        lost = Counter(_constants(file.tree)) - Counter(_constants(ast.parse(written)))
    except SyntaxError:
        lost = Counter(["a line"])
    if lost or margin.strip():
        raise NotPlain(f"{file.where(start)}: the loop shares a line, or holds a string of several lines.")
    return written


def _import_line(tree: ast.Module, start: ast.stmt) -> int:
    """Return the line before which the import goes: behind the file's first imports, else its docstring, or its top."""
    imports = [
        node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) and node.lineno < start.lineno
    ]
    before = imports or (tree.body[:1] if ast.get_docstring(tree) is not None else [])
    return (before[-1].end_lineno or before[-1].lineno) + 1 if before else tree.body[0].lineno


def _assigned(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that are given a value, with the value; tuples part by part where both sides are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(map(ast.unparse, target.elts), node.value.elts, strict=False)
                else:
                    yield from ((ast.unparse(part), node.value) for part in getattr(target, "elts", [target]))


def _models(
    argument: ast.expr, home: Function | None, bound: Sequence[tuple[str, ast.expr, Function | None]]
) -> list[str]:
    """Return the model in front of each ``.parameters()`` that an optimizer is given, repeats kept; empty: none.

    That is a variable, of a part such as ``model.head`` too, or an attribute of ``self``. A list that has a name is
    looked up.

    Args:
        argument: expression by which the optimizer is made.
        home: function that makes the optimizer; None: the module.
        bound: names that are given a value, each with that and the function around.
    """
    names = {node.id for node in ast.walk(argument) if isinstance(node, ast.Name)}
    lists = [value for name, value, function in bound if name in names and function is home]
    return [
        ".".join((text := ast.unparse(node.value)).split(".")[: 1 + text.startswith("self.")])
        for expression in (argument, *(value for value in lists if not isinstance(value, ast.Call)))
        for node in ast.walk(expression)
        if isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters")
    ]


def _function_of(file: SourceFile, node: ast.AST) -> Function | None:
    return next((outer for outer in file.around(node) if isinstance(outer, Function)), None)


def _loops(file: SourceFile, node: ast.AST) -> list[ast.For | ast.While]:
    """Return the loops around a node in its function, innermost first."""
    function = _function_of(file, node)
    return [
        outer
        for outer in file.around(node)
        if isinstance(outer, (ast.For, ast.While)) and _function_of(file, outer) is function
    ]


def _loader_around(file: SourceFile, node: ast.AST) -> str | None:
    """Return the name that the nearest loop over batches reads, also inside ``enumerate`` and ``tqdm``; None: none."""
    for loop in _loops(file, node):
        read: ast.expr | None = getattr(loop, "iter", None)
        while isinstance(read, ast.Call) and called(read) in _SHOWN_AS_THEY_COME and read.args:
            read = read.args[0]
        if isinstance(read, ast.Name):
            return read.id
    return None


def _given(call: ast.Call, function: Function, parameter: str) -> str | None:
    """Return the name of the variable that a call gives for a parameter; None: it gives none, or another expression."""
    place = _parameters(function).index(parameter)
    by_name = [keyword.value for keyword in call.keywords if keyword.arg == parameter]
    argument = next(iter([*by_name, *call.args[place : place + 1]]), None)
    return argument.id if isinstance(argument, ast.Name) else None


def _parameters(function: Function | None) -> list[str]:
    given = [] if function is None else [function.args.posonlyargs, function.args.args, function.args.kwonlyargs]
    return [parameter.arg for parameters in given for parameter in parameters]


def _stored(function: Function | None) -> set[str]:
    """Return the names that a function gives a value."""
    nodes = () if function is None else ast.walk(function)
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _constants(tree: ast.AST) -> list[str]:
    return [repr(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)]


def _not_plain(file: SourceFile, node: ast.AST, reason: str) -> NotPlain:
    return NotPlain(f"{file.where(node)}: the backward pass {reason}.")
