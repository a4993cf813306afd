"""`hetopt.convert`: writes a session into a training script, and takes distributed training of other kinds out of it.

The script's text is edited where its syntax tree says so; comments, layout and everything else stay as they are.
"""

from __future__ import annotations

import ast
import difflib
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetopt.core.errors import BadInput
from hetopt.core.reading import read_text

_IMPORT = "from hetopt import session"
_WRAPPERS = ("DistributedDataParallel", "DDP", "DataParallel", "FullyShardedDataParallel", "FSDP")
_BY_HAND = "change the four lines by hand, as docs/your-own-code.md shows"

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
"""What torchrun would say to a worker that is alone."""

_PLACES = {"get_rank": "RANK", "get_world_size": "WORLD_SIZE", "get_local_rank": "LOCAL_RANK"}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce", "broadcast", "all_gather_object", "broadcast_object_list")

Block = list[ast.stmt]


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A script with a session in it.

    Attributes:
        text: of the new script.
        diff: unified, from the old text to the new one.
        remarks: sentences on what the person should know: what was taken out, what becomes of the batch size.
    """

    text: str
    diff: str
    remarks: tuple[str, ...] = ()


def convert(script: Path | str) -> Converted:
    """Write a session into a training script.

    Args:
        script: a file with one model, one optimizer and a loop over a DataLoader.

    Raises:
        BadInput: it is no Python file, or not of that form; the sentence says what was looked for, and where.
    """
    path = Path(script)
    text = read_text(path, hint="give the path of the script")
    return convert_text(text, name=path.name)


def convert_text(text: str, *, name: str = "script.py") -> Converted:
    """As `convert`, from text to text.

    Args:
        text: of the script.
        name: of the file, for messages and the diff.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise BadInput(f"{name} is no Python that can be read{f', at line {line}' if line else ''}.") from None
    new, remarks = _Conversion(text, tree, name).run()
    lines = difflib.unified_diff(
        text.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}", n=2
    )
    return Converted(text=new, diff="".join(lines), remarks=remarks)


@dataclass
class _Edits:
    """Replacements of parts of the text, and lines that come before others or move to the right."""

    lines: list[str]
    parts: list[tuple[int, int, int, int, str]] = field(default_factory=list)
    before: dict[int, list[str]] = field(default_factory=dict)
    indented: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)

    def replace(self, node: ast.expr, text: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        self.parts.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, text))

    def drop(self, node: ast.stmt) -> None:
        assert node.end_lineno is not None
        self.dropped.update(range(node.lineno, node.end_lineno + 1))

    def text(self) -> str:
        """The new text."""
        lines = [line.encode() for line in self.lines]  # columns of the tree count bytes
        for first, start, last, end, text in sorted(self.parts, reverse=True):
            head, tail = lines[first - 1][:start], lines[last - 1][end:]
            lines[first - 1 : last] = [head + text.encode() + tail, *[b""] * (last - first)]
        told: list[str] = []
        for number, line in enumerate(lines, start=1):
            told += self.before.get(number, [])
            if number in self.dropped or (not line and self.lines[number - 1]):
                continue
            shown = line.decode()
            told.append(f"    {shown}" if number in self.indented and shown.strip() else shown)
        return "".join(told)


class _Conversion:
    def __init__(self, text: str, tree: ast.Module, name: str) -> None:
        self._text, self._tree, self._name = text, tree, name
        self._edits = _Edits(text.splitlines(keepends=True))
        self._remarks: list[str] = []
        self._needs_os = False
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def run(self) -> tuple[str, tuple[str, ...]]:
        if any(_called(node) == "session" for node in ast.walk(self._tree) if isinstance(node, ast.Call)):
            raise BadInput(f"{self._name} has a session already.", hint="launch it as it is")
        self._refuse_frameworks()
        optimizer = self._optimizer()
        loop, backward = self._loop()
        self._take_out_distribution()
        self._write_session(optimizer, loop, backward)
        return self._edits.text(), tuple(self._remarks)

    def _source(self, node: ast.AST) -> str:
        found = ast.get_source_segment(self._text, node)
        assert found is not None
        return found

    def _where(self, node: ast.AST) -> str:
        return f"{self._name}, line {getattr(node, 'lineno', 1)}"

    def _refuse_frameworks(self) -> None:
        names = {"accelerate": "Accelerator", "lightning": "Lightning", "pytorch_lightning": "Lightning"}
        for node in ast.walk(self._tree):
            modules = (
                [one.name for one in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for module in modules:
                if module.partition(".")[0] in names:
                    raise BadInput(
                        f"{self._where(node)}: {names[module.partition('.')[0]]} owns the loop of this script.",
                        hint="docs/your-own-code.md says how a session goes with it",
                    )

    def _optimizer(self) -> ast.Assign:
        """The statement that makes the optimizer."""
        found = [
            node
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and self._model(node.value) is not None
        ]
        if not found:
            raise BadInput(
                f"{self._name} makes no optimizer of a model's parameters, as in "
                "`optimizer = torch.optim.SGD(model.parameters(), lr=0.1)`.",
                hint=_BY_HAND,
            )
        if len(found) > 1:
            lines = " and ".join(str(one.lineno) for one in found[:3])
            raise BadInput(
                f"{self._name} makes {len(found)} optimizers (lines {lines}), and each needs a session of its own.",
                hint=_BY_HAND,
            )
        if not isinstance(found[0].targets[0], ast.Name):
            raise BadInput(
                f"{self._where(found[0])}: the optimizer is kept in {self._source(found[0].targets[0])}, not in a "
                "variable.",
                hint=_BY_HAND,
            )
        return found[0]

    def _model(self, call: ast.Call) -> ast.expr | None:
        """The model whose parameters a call is given; None: it is given none."""
        if _called(call) in ("list", "sum", "clip_grad_norm_", "clip_grad_value_", "deepcopy"):
            return None
        for argument in (*call.args, *(one.value for one in call.keywords)):
            for node in ast.walk(argument):
                if isinstance(node, ast.Call) and _called(node) in ("parameters", "named_parameters"):
                    assert isinstance(node.func, (ast.Attribute, ast.Name))
                    return node.func.value if isinstance(node.func, ast.Attribute) else None
        return None

    def _loop(self) -> tuple[ast.For, list[ast.Expr]]:
        """The loop over batches, and its backward passes."""
        backward = [
            node
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
            and node.value.func.attr == "backward"
        ]
        if not backward:
            raise BadInput(f"{self._name} calls `backward` nowhere.", hint=_BY_HAND)
        loops = [self._loop_around(node) for node in backward]
        found = loops[0]
        if found is None or any(one is not found for one in loops):
            raise BadInput(
                f"{self._where(backward[0])}: the backward pass is not in one `for` loop over a loader's batches.",
                hint=_BY_HAND,
            )
        return found, backward

    def _loop_around(self, node: ast.AST) -> ast.For | None:
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, ast.For) and self._loader_of(node) is not None:
                return node
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return None
        return None

    def _loader_of(self, loop: ast.For) -> str | None:
        """The name that a loop's batches come from: ``loader``, ``enumerate(loader)``, ``tqdm(loader)``."""
        told = loop.iter
        while isinstance(told, ast.Call) and told.args and _called(told) != "range":
            told = told.args[0]
        return told.id if isinstance(told, ast.Name) else None

    def _scope(self, node: ast.AST) -> ast.AST:
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return node
        return self._tree

    def _block(self, statement: ast.stmt) -> tuple[Block, int]:
        """The list of statements that one is in, and its place."""
        parent = self._parents[statement]
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block, block.index(statement)
        raise BadInput(f"{self._where(statement)}: the optimizer is made where no session can begin.", hint=_BY_HAND)

    def _take_out_distribution(self) -> None:
        """Process groups, wrappers and samplers of DistributedDataParallel."""
        samplers: set[str] = set()
        wrapped: set[str] = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                if _called(node.value) in ("init_process_group", "destroy_process_group", "barrier"):
                    self._remove(node)
                elif _called(node.value) in _COLLECTIVES:
                    self._remarks.append(
                        f"Line {node.lineno} calls {_called(node.value)}, which needs the workers' group: inside the "
                        "session, run.mean(value) is the mean of all workers."
                    )
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                if _called(node.value) in _WRAPPERS and node.value.args:
                    wrapped |= {one.id for one in node.targets if isinstance(one, ast.Name)}
                    if self._source(node.targets[0]) == self._source(node.value.args[0]):
                        self._remove(node)
                    else:
                        self._edits.replace(node.value, self._source(node.value.args[0]))
                elif _called(node.value) == "DistributedSampler":
                    samplers |= {one.id for one in node.targets if isinstance(one, ast.Name)}
                    self._remove(node)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Subscript):
                self._place_alone(node)
            elif isinstance(node, ast.Call) and _called(node) in _PLACES and not node.args:
                self._edits.replace(
                    node, f'int(os.environ.get("{_PLACES[_called(node)]}", "{_ALONE[_PLACES[_called(node)]]}"))'
                )
                self._needs_os = True
            elif isinstance(node, ast.Call) and _called(node) == "DataLoader":
                self._shuffle(node, samplers)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                function = node.value.func
                if isinstance(function, ast.Attribute) and function.attr == "set_epoch":
                    owner = self._source(function.value)
                    if owner in samplers or owner.endswith(".sampler"):
                        self._remove(node)
            elif isinstance(node, ast.Attribute) and node.attr == "module" and self._source(node.value) in wrapped:
                self._edits.replace(node, self._source(node.value))
        if wrapped or samplers:
            self._remarks.append(
                "The batch size of a loader under DistributedDataParallel is that of one worker; of a session it is "
                "that of all workers together. Multiply it by the number of workers that the learning rate was tuned "
                "for."
            )

    def _place_alone(self, node: ast.Subscript) -> None:
        """A script that is started without torchrun is its only worker."""
        name = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(name, str) and name in _ALONE and self._source(node.value) in ("os.environ", "environ"):
            self._edits.replace(node, f'{self._source(node.value)}.get("{name}", "{_ALONE[name]}")')

    def _shuffle(self, loader: ast.Call, samplers: set[str]) -> None:
        """A loader draws its own samples where it was given a worker's part."""
        for keyword in loader.keywords:
            if keyword.arg != "sampler":
                continue
            inline = isinstance(keyword.value, ast.Call) and _called(keyword.value) == "DistributedSampler"
            if not inline and self._source(keyword.value) not in samplers:
                continue
            order = [one for one in loader.keywords if one.arg == "shuffle"]
            assert keyword.end_lineno is not None
            assert keyword.end_col_offset is not None
            start = (keyword.lineno, keyword.col_offset)
            self._edits.parts.append((*start, keyword.end_lineno, keyword.end_col_offset, "shuffle=True"))
            for one in order:
                self._drop_keyword(one)

    def _drop_keyword(self, keyword: ast.keyword) -> None:
        """With the comma before it; where it begins its line, with the one after it."""
        assert keyword.end_lineno is not None
        assert keyword.end_col_offset is not None
        line = self._edits.lines[keyword.lineno - 1].encode()
        head = line[: keyword.col_offset].rstrip()
        start, end = keyword.col_offset, keyword.end_col_offset
        if head.endswith(b","):
            start = len(head) - 1
        elif not head:
            tail = self._edits.lines[keyword.end_lineno - 1].encode()[end:]
            if tail.strip() in (b"", b","):  # alone on its lines
                self._edits.dropped.update(range(keyword.lineno, keyword.end_lineno + 1))
                return
            end += len(tail) - len(tail.lstrip(b", "))
        self._edits.parts.append((keyword.lineno, start, keyword.end_lineno, end, ""))

    def _remove(self, statement: ast.stmt) -> None:
        block, _ = self._block(statement)
        left = [one for one in block if one is not statement and one.lineno not in self._edits.dropped]
        if not left and not isinstance(self._parents[statement], ast.Module):
            indent = " " * statement.col_offset
            self._edits.before.setdefault(statement.lineno, []).append(f"{indent}pass\n")
        self._edits.drop(statement)

    def _write_session(self, optimizer: ast.Assign, loop: ast.For, backward: Sequence[ast.Expr]) -> None:
        assert isinstance(optimizer.value, ast.Call)
        model = self._model(optimizer.value)
        assert model is not None
        target = optimizer.targets[0]
        assert isinstance(target, ast.Name)
        inner = self._loader_of(loop)
        assert inner is not None
        scope = self._scope(optimizer)
        in_scope = self._scope(loop) is scope
        block, place = self._block(optimizer)
        loader = inner if in_scope else self._argument_of(loop, inner, scope)
        first = self._first_use(block, place, loader, loop)
        accumulate = self._accumulation(loop, target.id)
        options = "" if accumulate is None else f", accumulate={accumulate}"
        indent = " " * first.col_offset
        self._edits.before.setdefault(first.lineno, []).extend(
            [
                f"{indent}with session({self._source(model)}, {target.id}{options}) as run:\n",
                f"{indent}    {loader} = run.loader({loader})\n",
            ]
        )
        last = block[-1]
        assert last.end_lineno is not None
        self._edits.indented |= set(self._movable(first.lineno, last.end_lineno))
        owner = "run" if in_scope else f"{inner}.run"
        for one in backward:
            self._say_backward(one, owner)
        self._import()

    def _say_backward(self, statement: ast.Expr, owner: str) -> None:
        call = statement.value
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Attribute)
        told = [self._source(call.func.value), *map(self._source, call.args)]
        told += [f"{one.arg}={self._source(one.value)}" for one in call.keywords]
        self._edits.replace(call, f"{owner}.backward({', '.join(told)})")

    def _argument_of(self, loop: ast.For, parameter: str, scope: ast.AST) -> str:
        """What the function around the loop is given for its loader, where the optimizer is made."""
        function = self._scope(loop)
        if isinstance(function, ast.FunctionDef):
            names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
            for node in ast.walk(scope):
                if isinstance(node, ast.Call) and _called(node) == function.name and parameter in names:
                    place = names.index(parameter)
                    given = [one.value for one in node.keywords if one.arg == parameter]
                    given += node.args[place : place + 1]
                    if given and isinstance(given[0], ast.Name):
                        return given[0].id
        raise BadInput(
            f"{self._where(loop)}: where the loop's `{parameter}` comes from cannot be followed to where the optimizer "
            "is made.",
            hint=_BY_HAND,
        )

    def _first_use(self, block: Block, place: int, loader: str, loop: ast.For) -> ast.stmt:
        """The statement in which training begins: the first after the optimizer that uses the loader, bound before."""
        uses = [
            statement
            for statement in block[place + 1 :]
            if any(isinstance(node, ast.Name) and node.id == loader for node in ast.walk(statement))
            and not _binds(statement, loader)
        ]
        # What only measures a loader (its length, for a schedule) is no training.
        training = [
            one for one in uses if isinstance(one, (ast.For, ast.While)) or loop in ast.walk(one) or _calls(one, loader)
        ]
        if not training:
            raise BadInput(
                f"{self._name}: after the optimizer is made, nothing trains on `{loader}`.",
                hint=_BY_HAND,
            )
        return training[0]

    def _accumulation(self, loop: ast.For, optimizer: str) -> str | None:
        """Backward passes of a step, as in ``if (i + 1) % k == 0: optimizer.step()``."""
        for node in ast.walk(loop):
            if not isinstance(node, ast.If):
                continue
            steps = any(
                isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "step"
                for statement in node.body
                for one in ast.walk(statement)
            )
            every = [one for one in ast.walk(node.test) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod)]
            if steps and every:
                return self._source(every[0].right)
        return None

    def _movable(self, first: int, last: int) -> Iterator[int]:
        """Lines that may move to the right: those that do not begin inside a string."""
        inside: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self._text).readline):
            if token.type == tokenize.STRING:
                inside |= set(range(token.start[0] + 1, token.end[0] + 1))
        return (number for number in range(first, last + 1) if number not in inside)

    def _import(self) -> None:
        imports = [one for one in self._tree.body if isinstance(one, (ast.Import, ast.ImportFrom))]
        last = imports[-1] if imports else None
        line = 1 if last is None or last.end_lineno is None else last.end_lineno + 1
        lines = [f"\n{_IMPORT}\n" if last is not None else f"{_IMPORT}\n"]
        if self._needs_os and not any("os" in [name.name for name in one.names] for one in imports):
            lines.insert(0, "import os\n")
        self._edits.before.setdefault(line, [])[:0] = lines


def _called(call: ast.Call) -> str:
    """The last name of what is called."""
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _binds(statement: ast.stmt, name: str) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(isinstance(node, ast.Name) and node.id == name for target in targets for node in ast.walk(target))


def _calls(statement: ast.stmt, name: str) -> bool:
    """Whether a name is given to a function as it is (its length is not the loader)."""
    return any(
        isinstance(node, ast.Call)
        and _called(node) != "len"
        and any(isinstance(one, ast.Name) and one.id == name for one in (*node.args, *(k.value for k in node.keywords)))
        for node in ast.walk(statement)
    )
