"""`hetopt.convert`: writes a session into a training script, and takes distributed training of other kinds out of it.

Four expressions are looked for, from the backward pass outwards: the loader whose batches it is of, the model, the
optimizer that steps, and the function in which all three are at hand before training begins. There the session goes.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from hetopt.api.script_text import (
    PLACES,
    Derived,
    SourceFile,
    assigned,
    called,
    given,
    lost_files,
    own_sharding,
    parameters,
    read_script,
    shared_files,
    trains_on_several_workers,
)
from hetopt.api.text_edits import TextEdits
from hetopt.core.commands import typed
from hetopt.core.errors import BadInput
from hetopt.core.reading import read_text

if TYPE_CHECKING:
    from hetopt.trainer.session.begin import BatchNormWay

_IMPORT = "from hetopt import session"
_BY_HAND = "change the four lines by hand, as docs/your-own-code.md shows"
_WRAPPERS = ("DistributedDataParallel", "DDP", "DataParallel")
_SHARDED = ("FullyShardedDataParallel", "FSDP", "fully_shard", "parallelize_module", "ZeroRedundancyOptimizer")
_FRAMEWORKS = {
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "deepspeed": "DeepSpeed",
    "horovod": "Horovod",
    "ignite": "Ignite",
    "composer": "Composer",
    "fastai": "fastai",
}
_INTEGRATED = ("Accelerate", "Lightning", "transformers")
"""Frameworks with an integration of their own."""

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
"""What torchrun would say to a worker that is alone."""

_ASKED = {"get_rank": "RANK", "get_world_size": "WORLD_SIZE", "get_local_rank": "LOCAL_RANK"}
_GROUPS = ("init_process_group", "destroy_process_group", "barrier")
_SUMS = ("all_reduce", "reduce")
_SCALED = re.compile(r"batch_?si?ze?|(?<![a-z])(?:lr|rate)(?![a-z])", re.IGNORECASE)
_RESCALED = (
    "Line {line} scaled the {what} by the workers, and no longer does: a session shares out a batch of one size, "
    "whatever the cluster."
)
_FROM_ONE = ("broadcast", "broadcast_object_list")
_OTHER_COLLECTIVES = ("all_gather", "all_gather_object", "all_gather_into_tensor", "gather", "scatter")
_SEEDS = ("manual_seed", "manual_seed_all", "seed", "set_seed", "seed_everything", "default_rng")
_MEETING = ("MASTER_ADDR", "MASTER_PORT", *PLACES)
_SCHEDULE = re.compile(r"sched|LR$|Plateau|Warmup|Annealing|OneCycle|scaler|prof|writer|pbar|env|stats", re.IGNORECASE)
_OPTIMIZER = re.compile(r"opt", re.IGNORECASE)
_MODEL = re.compile(r"model|net|module", re.IGNORECASE)
_JUDGES = re.compile(r"test|val|eval", re.IGNORECASE)
_USES = ("zero_grad", "train", "parameters", "named_parameters", "state_dict", "eval")
_AROUND_LOADERS = ("enumerate", "tqdm", "trange", "islice", "iter", "track", "log_every", "progress_bar", "alive_it")
_COUNTERS = ("range", "count")
_IN_PROCESSES = ("Process", "map", "starmap", "imap", "imap_unordered", "apply", "apply_async", "submit")
_LISTS = ("list", "tuple", "filter", "chain")
_NO_OPTIMIZERS = ("list", "sum", "filter", "clip_grad_norm_", "clip_grad_value_", "deepcopy", "join")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.While


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


def convert(script: Path | str, *, batch_norm: BatchNormWay = "own") -> Converted:
    """Write a session into a training script.

    Args:
        script: a file with one loop over a DataLoader, in functions or in a class.
        batch_norm: what the session is told of BatchNorm; `"synchronized"` normalises by the whole batch.

    Raises:
        BadInput: it is no Python file, or not of that form; the sentence says what was looked for, and where.
    """
    path = Path(script)
    text = read_text(path, hint="give the path of the script")
    if ".backward" not in text:
        training = [one.name for one in read_script(path) if ".backward" in one.text]
        if training:
            raise BadInput(
                f"{path.name} calls `backward` nowhere; {training[0]} does, which it imports.",
                hint=f"`hetopt convert {typed(training[0])} --no-compare`, and import the new file in a copy "
                f"of {path.name}",
            )
    converted = convert_text(text, name=path.name, batch_norm=batch_norm)
    if b"\r\n" in path.read_bytes():  # lines end as they did
        converted = replace(converted, text=converted.text.replace("\n", "\r\n"))
    return converted


def convert_text(text: str, *, name: str = "script.py", batch_norm: BatchNormWay = "own") -> Converted:
    """As `convert`, from text to text.

    Args:
        text: of the script.
        name: of the file, for messages and the diff.
        batch_norm: as of `convert`.
    """
    file = SourceFile.of(text, name)
    new, remarks = _Conversion(file, batch_norm).run()
    lines = difflib.unified_diff(
        text.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}", n=2
    )
    return Converted(text=new, diff="".join(lines), remarks=(*remarks, *lost_files((file,))))


@dataclass
class _Frame:
    """A function on the way from a backward pass to where training begins; each name as it is written there.

    Attributes:
        function: None: the file itself.
        node: in it, the backward pass, or the call that leads to it.
        loader: None: the loop over batches is further out.
        named: where a loader that is shown in a bar gets the name that its loop has: ``bar = tqdm(loader)``.
    """

    function: Function | None
    node: ast.AST
    model: str | None = None
    optimizer: str | None = None
    loader: str | None = None
    named: ast.stmt | None = None


@dataclass
class _Way:
    """From a backward pass to where training begins, innermost first."""

    backward: ast.Expr
    frames: list[_Frame] = field(default_factory=list)

    @property
    def entry(self) -> _Frame:
        return self.frames[-1]


class _Conversion:
    def __init__(self, file: SourceFile, batch_norm: BatchNormWay) -> None:
        self._batch_norm = batch_norm
        self._file, self._edits = file, TextEdits(file.text)
        self._source, self._where = file.source, file.where
        self._remarks: list[str] = []
        self._removed: set[ast.stmt] = set()
        self._guarded: set[int] = set()
        self._declared: set[str] = set()
        self._imports = {_IMPORT}
        calls = [node for node in ast.walk(file.tree) if isinstance(node, ast.Call)]
        self._calls = calls
        self._pairs = list(assigned(file.tree))
        self._lists = list(self._named_lists())
        made = [(self._source(target), value) for target, value in self._pairs if isinstance(value, ast.Call)]
        self._optimizers = {
            target: value for target, value in made if isinstance(value, ast.Call) and self._models(value)
        }
        self._schedules = {
            target for target, value in made if isinstance(value, ast.Call) and _SCHEDULE.search(called(value))
        }
        names = {node.id for node in ast.walk(file.tree) if isinstance(node, ast.Name)}
        self._run = "run" if "run" not in names else "session_run"

    def run(self) -> tuple[str, tuple[str, ...]]:
        self._refuse()
        ways = [self._way(one) for one in self._backwards()]
        entry = ways[0].entry
        start = self._start(entry)
        for one in ways[1:]:
            is_other = one.entry.model != entry.model and one.entry.optimizer == entry.optimizer
            if self._start(one.entry) is not start or one.entry.loader != entry.loader or is_other:
                raise BadInput(
                    f"{self._where(one.backward)}: this backward pass is of another loop than that of line "
                    f"{ways[0].backward.lineno}.",
                    hint=_BY_HAND,
                )
        entry.model = _all_of(one.entry.model for one in ways)
        entry.optimizer = _all_of(one.entry.optimizer for one in ways)
        self._refuse_processes(ways)
        self._take_out_distribution(entry, start)
        self._write_session(ways, entry, start)
        return self._without_unused(self._edits.text()), tuple(dict.fromkeys(self._remarks))

    def _without_unused(self, text: str) -> str:
        """The new text without the imports that only what was taken out used.

        Raises:
            BadInput: it is no Python.
        """
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise BadInput(
                f"{self._file.name} cannot be converted: line {error.lineno} of the new text would be no Python.",
                hint=_BY_HAND,
            ) from None
        before, now = (
            {node.id for node in ast.walk(one) if isinstance(node, ast.Name)} for one in (self._file.tree, tree)
        )
        edits = TextEdits(text)
        for node in tree.body:
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            bound = {one: one.asname or one.name.partition(".")[0] for one in node.names}
            kept = [one for one in node.names if bound[one] in now or bound[one] not in before]
            if not kept:
                edits.drop(node)
            elif len(kept) < len(node.names):
                edits.replace(node, ast.unparse(_with_names(node, kept)))
        return edits.text()

    # What cannot be converted

    def _refuse(self) -> None:
        if trains_on_several_workers((self._file,)):
            raise BadInput(f"{self._file.name} has a session already.", hint="launch it as it is")
        for node in ast.walk(self._file.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [one.name for one in node.names] if isinstance(node, ast.Import) else [str(node.module or "")]
                for module in modules:
                    framework = _FRAMEWORKS.get(module.partition(".")[0])
                    if framework is not None:
                        raise self._owned(node, framework)
                if isinstance(node, ast.ImportFrom) and modules[0].partition(".")[0] == "transformers":
                    trainers = [one.name for one in node.names if one.name in ("Trainer", "Seq2SeqTrainer")]
                    if trainers:
                        raise self._owned(node, f"transformers' {trainers[0]}")
        for call in self._calls:
            if called(call) in _SHARDED:
                raise BadInput(
                    f"{self._where(call)}: {called(call)} spreads the model over the workers, and a session holds all "
                    "of it on each.",
                    hint="take it out if the model fits on one device, and convert what is left",
                )
        sharded = own_sharding(self._file)
        if sharded is not None:
            raise BadInput(
                f"{sharded.place}: the script takes a part of its data by its worker's number ({sharded.code}), and a "
                "session would share out that part alone.",
                hint="give every worker all of the data, then convert: a session's loader gives each its part",
            )

    def _refuse_processes(self, ways: Sequence[_Way]) -> None:
        """Workers are processes already, which `hetopt launch` or torchrun starts."""
        training = {frame.function.name for way in ways for frame in way.frames if frame.function is not None}
        for call in self._calls:
            given = [self._source(one) for one in (*call.args, *(one.value for one in call.keywords))]
            started = next((one for one in given if one in training), None)
            if called(call) in _IN_PROCESSES and started is not None:
                raise BadInput(
                    f"{self._where(call)}: the script trains in processes that it starts, and a session's workers are "
                    "those that `hetopt launch` or torchrun starts.",
                    hint=f"call {started} directly, then convert",
                )

    def _owned(self, node: ast.AST, framework: str) -> BadInput:
        return BadInput(
            f"{self._where(node)}: {framework} owns the loop of this script.",
            hint="docs/frameworks.md shows the lines that bring a session into it"
            if any(one in framework for one in _INTEGRATED)
            else "write the loop out, with the plain model, optimizer and DataLoader, then convert",
        )

    # From the backward pass outwards

    def _backwards(self) -> list[ast.Expr]:
        found = [
            node
            for node in ast.walk(self._file.tree)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
            and node.value.func.attr == "backward"
        ]
        if not found:
            by_grad = [
                call for call in self._calls if self._source(call.func) in ("torch.autograd.grad", "autograd.grad")
            ]
            raise BadInput(
                f"{self._file.name} calls `backward` nowhere.",
                hint=f"let `loss.backward()` compute the gradients of line {by_grad[0].lineno}, then convert"
                if by_grad
                else _BY_HAND,
            )
        return found

    def _way(self, backward: ast.Expr) -> _Way:
        """Follow the calls from a backward pass out to where training begins."""
        way = _Way(backward)
        frame: _Frame | None = _Frame(self._function_of(backward), backward)
        while frame is not None:
            way.frames.append(frame)
            if len(way.frames) > 1 and any(one.function is frame.function for one in way.frames[:-1]):
                raise self._unclear(backward, "is in a function that calls itself")
            self._look_around(frame)
            frame = self._outwards(way, frame)
        entry = way.entry
        if entry.loader is None:
            raise self._no_loop(backward)
        if entry.optimizer is None or not self._is_bound(entry.optimizer, entry.function):
            raise self._no_optimizer(backward)
        if entry.model is None:
            raise self._unclear(backward, "is of a model that cannot be told from the text")
        return way

    def _is_bound(self, name: str, function: Function | None) -> bool:
        """Whether anything in the file gives a name, or what it is of, a value."""
        if name.startswith("("):
            return all(self._is_bound(one, function) for one in _parts(name))
        root = name.partition(".")[0].partition("[")[0]
        known = {self._source(one) for target, _ in self._pairs for one in ast.walk(target)}
        known |= {one.id for one in ast.walk(self._file.tree) if isinstance(one, ast.Name) and self._is_target(one)}
        return root in known or any(one.arg == root for one in (parameters(function) if function else ()))

    @staticmethod
    def _is_target(name: ast.Name) -> bool:
        return isinstance(name.ctx, ast.Store)

    def _unclear(self, node: ast.AST, what: str) -> BadInput:
        return BadInput(f"{self._where(node)}: the backward pass {what}.", hint=_BY_HAND)

    def _no_loop(self, backward: ast.Expr) -> BadInput:
        if not any(called(call).endswith("Loader") for call in self._calls):
            return BadInput(
                f"{self._where(backward)}: the backward pass is not in one `for` loop over a loader's batches, and "
                "this file makes no DataLoader.",
                hint="share out what it draws with run.split, as docs/your-own-code.md shows; or read it from a "
                "DataLoader, then convert",
            )
        return BadInput(
            f"{self._where(backward)}: the backward pass is not in one `for` loop over a loader's batches.",
            hint="read batches by `for batch in loader:` from a DataLoader that has a name, then convert",
        )

    def _no_optimizer(self, backward: ast.Expr) -> BadInput:
        if self._optimizers or any(
            self._models(call) for call in self._calls if _OPTIMIZER.search(self._source(call.func))
        ):
            return self._unclear(backward, "is followed by no step of an optimizer that has a name in this file")
        return BadInput(
            f"{self._file.name} makes no optimizer of a model's parameters, as in "
            "`optimizer = torch.optim.SGD(model.parameters(), lr=0.1)`.",
            hint="let one of torch.optim change the parameters, then convert",
        )

    def _look_around(self, frame: _Frame) -> None:
        """Find in a function what is not known yet."""
        if frame.loader is None:
            scope: ast.AST = frame.function or next(reversed(self._loops(frame.node)), self._file.tree)
            stepped = list(dict.fromkeys([frame.optimizer or "", *self._stepped(scope)]))
            stepped = [one for one in stepped if one]
            frame.optimizer = stepped[0] if stepped else None
            if len(stepped) > 1:
                frame.optimizer, frame.model = self._together(frame, stepped)
        if frame.loader is None:
            frame.loader = next(
                (name for loop in self._loops(frame.node) if (name := self._loader_of(loop, frame))), None
            )
        if frame.model is None:
            frame.model = self._model_in(frame)

    def _together(self, frame: _Frame, stepped: list[str]) -> tuple[str, str]:
        """Several optimizers in one session, and the models that they are of.

        Raises:
            BadInput: what they are of cannot be seen from here.
        """
        made = [self._optimizers.get(one) for one in stepped]
        known = [one for one in made if one is not None and self._can_see(frame, one)]
        if len(known) < len(stepped):
            raise BadInput(
                f"{self._file.name} steps {len(stepped)} optimizers, {' and '.join(stepped)}, and what they are of "
                "cannot be followed.",
                hint="begin the session by hand: session((model, other), (optimizer, other_optimizer))",
            )
        models = dict.fromkeys(_whole([self._source(model) for model in self._models(one)]) for one in known)
        every = dict.fromkeys(part for one in models for part in _parts(one))
        return f"({', '.join(stepped)})", f"({', '.join(every)})" if len(every) > 1 else next(iter(every))

    def _stepped(self, scope: ast.AST) -> Iterator[str]:
        """Optimizers that step there."""
        for call in ast.walk(scope):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "step"):
                continue
            for one in (call.func.value, *call.args[:1]):  # scaler.step(optimizer)
                name = self._source(one)
                if not isinstance(one, (ast.Name, ast.Attribute)) or name in self._schedules:
                    continue
                last = name.rpartition(".")[2]
                if name in self._optimizers or (_OPTIMIZER.search(last) and not _SCHEDULE.search(last)):
                    yield name

    def _model_in(self, frame: _Frame) -> str | None:
        """The model: what the optimizer was made of, if that can be seen from here; else what is trained here."""
        scope = frame.function or self._file.tree
        used: list[str] = []
        for call in ast.walk(scope):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _USES:
                used.append(self._source(call.func.value))
            elif isinstance(call, ast.Call) and isinstance(call.func, (ast.Name, ast.Attribute)):
                used.append(self._source(call.func))
        made = self._optimizers.get(frame.optimizer or "")
        if made is not None and self._can_see(frame, made):
            receivers = [self._source(one) for one in self._models(made)]
            whole = [one for one in used if all(its == one or its.startswith(f"{one}.") for its in receivers)]
            whole = [one for one in whole if one != "self"]
            return min([*whole, _whole(receivers)], key=len)
        named = [one for one in used if _MODEL.search(one.rpartition(".")[2]) and "(" not in one]
        named = [one for one in named if one.partition(".")[0] not in ("torch", "nn", "models")]
        return min(named, key=lambda one: (used.count(one) * -1, len(one)), default=None)

    def _can_see(self, frame: _Frame, made: ast.AST) -> bool:
        """Whether names that stand there mean the same in this function."""
        home = self._function_of(made)
        if home is frame.function or home is None:
            return True
        return self._class_of(home) is not None and self._class_of(home) is self._class_of(frame.function)

    def _outwards(self, way: _Way, frame: _Frame) -> _Frame | None:
        """The function that calls this one, as far as training begins further out; None: it begins here."""
        if frame.function is None:
            return None
        callers = [call for call in self._calls if self._is_call_of(call, frame.function)]
        looped = [call for call in callers if self._loops(call)]
        if frame.loader is not None and not looped:
            return None
        wanted = looped or callers
        if not wanted:
            return None
        call = min(wanted, key=lambda one: (bool(_JUDGES.search(self._source(one))), one.lineno))
        return self._from_call(way, frame, call)

    def _from_call(self, way: _Way, frame: _Frame, call: ast.Call) -> _Frame:
        outer = _Frame(self._function_of(call), call)
        assert frame.function is not None
        for name in ("model", "optimizer", "loader"):
            inner = getattr(frame, name)
            if inner is None:
                continue
            found = self._outside(inner, frame.function, call)
            if found is None and frame.loader is None:
                raise self._no_loop(way.backward)
            if found is None:
                raise BadInput(
                    f"{self._where(call)}: {frame.function.name} is called in a loop, and where its `{inner}` comes "
                    "from cannot be followed out of it, so a session would begin anew in every call.",
                    hint=f"make the {name} once before the loop, and give it to {frame.function.name}; or, where each "
                    "call trains anew, begin a session in it by hand, as docs/your-own-code.md shows",
                )
            setattr(outer, name, found)
        return outer

    def _outside(self, name: str, function: Function, call: ast.Call) -> str | None:
        """What a function's expression is where the function is called; None: it is made inside."""
        if name.startswith("("):  # several
            found = [self._outside(one, function, call) for one in _parts(name)]
            return None if None in found else f"({', '.join(map(str, found))})"
        root, dot, rest = name.partition(".")
        root, bracket, index = root.partition("[")
        made = [self._of_training(value) for target, value in assigned(function) if self._source(target) == root]
        own = [value for value in made if isinstance(value, (ast.Name, ast.Attribute, ast.Call))]
        of_file = {one for node in ast.walk(function) if isinstance(node, ast.Global) for one in node.names}
        bound = {one.id for one in ast.walk(function) if isinstance(one, ast.Name) and self._is_target(one)} - of_file
        names = [one.arg for one in parameters(function)]
        is_method = self._class_of(function) is not None and isinstance(call.func, ast.Attribute)
        given: ast.expr | None = None
        if root in names:
            place = names.index(root)
            if is_method and place == 0:
                assert isinstance(call.func, ast.Attribute)
                given = call.func.value
            else:
                by_name = [one.value for one in call.keywords if one.arg == root]
                by_place = call.args[place - is_method : place - is_method + 1]
                given = next(iter([*by_name, *by_place]), None)
        elif own:
            value = own[0]
            # Another name for what came from outside, or the same made ready: model = self.model, wrapped or moved.
            if isinstance(value, (ast.Name, ast.Attribute)):
                return self._outside(f"{self._source(value)}{bracket}{index}{dot}{rest}", function, call)
            return None
        elif root in bound:
            return None
        else:
            return name  # of the file
        if not isinstance(given, (ast.Name, ast.Attribute, ast.Subscript)):
            return None
        return f"{self._source(given)}{bracket}{index}{dot}{rest}"

    def _of_training(self, value: ast.expr) -> ast.expr:
        """Of ``self.train_dl if train else self.valid_dl`` the one that nobody is judged by."""
        if not isinstance(value, ast.IfExp):
            return value
        others = [one for one in (value.body, value.orelse) if not _JUDGES.search(self._source(one))]
        return others[0] if len(others) == 1 else value

    def _is_call_of(self, call: ast.Call, function: Function) -> bool:
        if called(call) != function.name or self._function_of(call) is function:
            return False
        return isinstance(call.func, ast.Attribute) == (self._class_of(function) is not None)

    def _function_of(self, node: ast.AST) -> Function | None:
        """The outermost function around a node; one that is made in a loop (a closure) belongs to what is around."""
        found = None
        for outer, _ in self._file.around(node):
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found = outer
            elif isinstance(outer, (ast.For, ast.While)):
                found = None
            elif isinstance(outer, ast.ClassDef) and found is not None:
                break
        return found

    def _class_of(self, function: Function | None) -> ast.ClassDef | None:
        outer = None if function is None else self._file.parents.get(function)
        return outer if isinstance(outer, ast.ClassDef) else None

    def _loops(self, node: ast.AST) -> list[Loop]:
        """Around a node in its function, innermost first."""
        found: list[Loop] = []
        home = self._function_of(node)
        for outer, _ in self._file.around(node):
            if outer is home:
                break
            if isinstance(outer, (ast.For, ast.While)):
                found.append(outer)
        return found

    def _loader_of(self, loop: Loop, frame: _Frame) -> str | None:
        """What a loop's batches come from: ``loader``, ``enumerate(self.loader)``, ``tqdm(loaders["train"])``."""
        if isinstance(loop, ast.While):
            return None
        told = loop.iter
        while isinstance(told, ast.Call) or (named := self._named_before(told, loop)) is not None:
            if not isinstance(told, ast.Call):
                assert named is not None
                frame.named, told = named
                continue
            if called(told) == "DataLoader":
                raise BadInput(
                    f"{self._where(told)}: the loop makes its DataLoader anew each time.",
                    hint="make it once, under a name, before training begins",
                )
            if called(told) == "zip":
                others = [one for one in told.args if not (isinstance(one, ast.Call) and called(one) in _COUNTERS)]
                if len(others) == 1:
                    told = others[0]
                    continue
                raise BadInput(
                    f"{self._where(told)}: the loop reads several loaders side by side.",
                    hint="begin the session by hand: `run.loader` for each of them",
                )
            if called(told) not in _AROUND_LOADERS or not told.args:
                return None
            told = told.args[0]
        if isinstance(told, ast.Subscript) and isinstance(told.slice, ast.Name):
            return self._of_phase(loop, told)
        if isinstance(told, ast.Subscript) and not isinstance(told.slice, ast.Constant):
            return None
        return self._source(told) if isinstance(told, (ast.Name, ast.Attribute, ast.Subscript)) else None

    def _named_before(self, told: ast.expr, loop: ast.For) -> tuple[ast.stmt, ast.Call] | None:
        """What is around a loader in a loop, where it got a name before: ``bar = tqdm(loader)``, or with ``with``."""
        found: list[tuple[ast.stmt, ast.Call]] = []
        for node in ast.walk(self._file.tree):
            pairs: list[tuple[ast.expr | None, ast.expr]] = []
            if isinstance(node, ast.Assign):
                pairs = [(node.targets[0], node.value)]
            elif isinstance(node, ast.With):
                pairs = [(one.optional_vars, one.context_expr) for one in node.items]
            for target, value in pairs:
                is_it = target is not None and self._source(target) == self._source(told)
                if is_it and isinstance(value, ast.Call) and called(value) in _AROUND_LOADERS:
                    assert isinstance(node, ast.stmt)
                    assert target is not None
                    is_here = self._function_of(node) is self._function_of(loop) and node.lineno < loop.lineno
                    if is_here and not self._is_itself(target, value):
                        found.append((node, value))
        return max(found, key=lambda one: one[0].lineno, default=None)

    def _of_phase(self, loop: Loop, told: ast.Subscript) -> str | None:
        """``loaders[phase]`` in a loop over phases is the one of training."""
        for outer in self._loops(loop):
            if not isinstance(outer, ast.For) or self._source(outer.target) != self._source(told.slice):
                continue
            phases = outer.iter.elts if isinstance(outer.iter, (ast.List, ast.Tuple)) else []
            training = [one for one in phases if isinstance(one, ast.Constant) and "train" in str(one.value)]
            if len(training) == 1:
                return f"{self._source(told.value)}[{self._source(training[0])}]"
        return None

    def _models(self, call: ast.Call) -> list[ast.expr]:
        """The models whose parameters a call is given, as an optimizer is."""
        if called(call) in _NO_OPTIMIZERS or _SCHEDULE.search(called(call)):
            return []
        given = [*call.args, *(one.value for one in call.keywords)]
        return [
            node.func.value
            for argument in self._with_lists(given, self._function_of(call))
            for node in ast.walk(argument)
            if isinstance(node, ast.Call)
            and called(node) in ("parameters", "named_parameters")
            and isinstance(node.func, ast.Attribute)
        ] or self._models_inside(call)

    def _named_lists(self) -> Iterator[tuple[ast.expr, ast.expr]]:
        """What may be lists of parameters, with their names, and what such are extended by."""
        for target, value in self._pairs:
            is_other = isinstance(value, (ast.Name, ast.Attribute, ast.Constant))
            if not is_other and (not isinstance(value, ast.Call) or called(value) in _LISTS):
                yield target, value
        for node in ast.walk(self._file.tree):
            if isinstance(node, ast.AugAssign):
                yield node.target, node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args[:1]:
                is_list = node.func.attr in ("append", "extend")
                yield from [(node.func.value, node.args[0])] if is_list else []

    def _with_lists(self, given: Sequence[ast.expr], home: Function | None) -> list[ast.expr]:
        """What a call is given, and the lists of parameters that have a name: ``params = list(a.parameters())``."""
        found, known = list(given), set[str]()
        for one in found:  # which grows
            names = {
                self._source(node) for node in ast.walk(one) if isinstance(node, (ast.Name, ast.Attribute))
            } - known
            known |= names
            found += [
                value
                for target, value in self._lists
                if self._source(target) in names and self._function_of(target) in (home, None)
            ]
        return found

    def _models_inside(self, call: ast.Call) -> list[ast.expr]:
        """The models of an optimizer that a function of the file makes and returns."""
        for function in ast.walk(self._file.tree):
            if not isinstance(function, ast.FunctionDef) or not self._is_call_of(call, function):
                continue
            made = [one.value for one in ast.walk(function) if isinstance(one, ast.Return)]
            models = [
                model for one in made if isinstance(one, ast.Call) and one is not call for model in self._models(one)
            ]
            names = [one.arg for one in parameters(function)]
            if self._class_of(function) is not None:
                return [one for one in models if self._source(one).startswith("self.")]
            given = [self._given(call, names, self._source(one)) for one in models]
            return [one for one in given if isinstance(one, (ast.Name, ast.Attribute))]
        return []

    @staticmethod
    def _given(call: ast.Call, names: list[str], name: str) -> ast.expr | None:
        """What a call gives for a parameter of a function that is no method."""
        by_name = [one.value for one in call.keywords if one.arg == name]
        by_place = call.args[names.index(name) :][:1] if name in names else []
        return next(iter([*by_name, *by_place]), None)

    def _start(self, entry: _Frame) -> ast.stmt:
        """The statement with which training begins: the outermost loop, or where its loader gets another name."""
        start: ast.stmt = self._loops(entry.node)[-1]
        if entry.named is not None and all(one is not entry.named for one in ast.walk(start)):
            _, block = self._block(entry.named)
            if all(one is not start for outer in block for one in ast.walk(outer)):
                raise self._unclear(entry.node, "is of a loader that has another name where its loop is")
            start = entry.named
        made = [(target, value) for target, value in assigned(start) if not self._is_itself(target, value)]
        turns = [one for loop in ast.walk(start) if isinstance(loop, ast.For) for one in ast.walk(loop.target)]
        named = [(self._source(target), target) for target, _ in made]
        named += [(one.id, one) for one in turns if isinstance(one, ast.Name)]
        for name, target in named:
            for what in ("model", "optimizer", "loader"):
                parts = _parts(str(getattr(entry, what)))
                told = next((one for one in parts if one == name), None)
                if told is None and target in turns:
                    told = next((one for one in parts if one.partition(".")[0] == name), None)
                if told is not None:
                    raise BadInput(
                        f"{self._where(target)}: the loop has another {what} each time, `{told}`.",
                        hint=f"train by one {what} that is made before the loop, or begin a session for each by hand",
                    )
        return start

    def _is_itself(self, target: ast.expr, value: ast.expr) -> bool:
        return self._source(target) in {self._source(one) for one in ast.walk(value) if isinstance(one, ast.expr)}

    # What is taken out

    def _take_out_distribution(self, entry: _Frame, start: ast.stmt) -> None:
        """Process groups, wrappers and samplers of DistributedDataParallel; processes that the script starts."""
        samplers: dict[str, ast.Call] = {}
        wrapped: set[str] = set()
        spawned: set[str] = set()
        for target, value in self._pairs:
            if isinstance(value, ast.Call) and called(value) == "DistributedSampler":
                if _JUDGES.search(self._source(target)):
                    self._place_sampler(value)
                else:
                    samplers[self._source(target)] = value
            if any(isinstance(one, ast.Call) and called(one) in _WRAPPERS for one in ast.walk(value)):
                wrapped.add(self._source(target))
        for call in self._calls:
            name = called(call)
            if name in _WRAPPERS and call.args:
                self._unwrap(call)
            elif name in ("spawn", "start_processes") and call.args:
                spawned |= self._call_directly(call)
            elif name == "DataLoader":
                self._shuffle(call, samplers)
            elif name == "no_sync" and isinstance(call.func, ast.Attribute):
                self._edits.replace(call, "nullcontext()")
                self._imports.add("from contextlib import nullcontext")
            elif name in _OTHER_COLLECTIVES and self._is_distributed(call):
                self._remarks.append(
                    f"Line {call.lineno} calls {name}, which needs the workers' group: it is there inside the session, "
                    "with several workers."
                )
        self._take_out_samplers(samplers)
        for node in ast.walk(self._file.tree):
            if isinstance(node, (ast.Expr, ast.Assign)):
                self._take_out(node, samplers, entry, start)
            elif isinstance(node, ast.Attribute) and node.attr == "module" and self._source(node.value) in wrapped:
                self._edits.replace(node, node.value)
        self._lead(entry, start, spawned)
        for node in ast.walk(self._file.tree):
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                self._place_alone(node)
            elif isinstance(node, ast.Call) and called(node) in _ASKED and self._is_distributed(node):
                self._edits.replace(node, self._asked(_ASKED[called(node)], instead_of=node))
        self._rescale()
        self._name_seeds()
        if samplers or any(called(call) in _WRAPPERS and called(call) != "DataParallel" for call in self._calls):
            self._remarks.append(
                "The batch size of a loader under DistributedDataParallel is that of one worker; of a session it is "
                "that of all workers together. Multiply it by the number of workers that the learning rate was tuned "
                "for."
            )

    def _asked(self, variable: str, *, instead_of: ast.AST | None = None) -> str:
        """What torchrun says of it; a script that is started without torchrun is its only worker."""
        self._imports.add("import os")
        around = () if instead_of is None else self._file.around(instead_of)
        quote = "'" if any(isinstance(one, ast.JoinedStr) for one, _ in around) else '"'
        return f"int(os.environ.get({quote}{variable}{quote}, {quote}{_ALONE[variable]}{quote}))"

    def _is_distributed(self, call: ast.Call) -> bool:
        """Whether a function is torch.distributed's, by how it is called."""
        function = call.func
        return not isinstance(function, ast.Attribute) or self._source(function.value) in (
            "dist", "distributed", "torch.distributed", "tdist", "c10d",
        )  # fmt: skip

    def _unwrap(self, call: ast.Call) -> None:
        outer = self._file.parents[call]
        if isinstance(outer, ast.Assign) and self._source(outer.targets[0]) == self._source(call.args[0]):
            self._remove(outer)
        else:
            self._edits.replace(call, call.args[0])

    def _call_directly(self, call: ast.Call) -> set[str]:
        """A function that was started once for each GPU is called once, as torchrun starts the script that often."""
        function = call.args[0]
        given = [one.value for one in call.keywords if one.arg == "args"] + call.args[1:2]
        if given and not isinstance(given[0], ast.Tuple):
            raise BadInput(
                f"{self._where(call)}: the script starts processes, and their arguments are not written out.",
                hint=f"call {self._source(function)}(rank, ...) directly, then convert: torchrun starts the processes",
            )
        arguments = given[0].elts if given and isinstance(given[0], ast.Tuple) else []
        parts: list[str | ast.expr] = [function, "(", self._asked("LOCAL_RANK")]
        for one in arguments:
            parts += [", ", one]
        self._edits.replace(call, *parts, ")")
        self._remarks.append(f"Line {call.lineno} starts processes: torchrun, or hetopt launch, starts the script now.")
        found = [
            one
            for one in ast.walk(self._file.tree)
            if isinstance(one, ast.FunctionDef) and one.name == self._source(function)
        ]
        return {parameters(one)[0].arg for one in found if parameters(one)}

    def _shuffle(self, loader: ast.Call, samplers: dict[str, ast.Call]) -> None:
        """A loader draws its own samples where it was given a worker's part."""
        for keyword in loader.keywords:
            if keyword.arg != "sampler":
                continue
            made = samplers.get(self._source(keyword.value))
            if isinstance(keyword.value, ast.Call) and called(keyword.value) == "DistributedSampler":
                made = keyword.value
            if made is None:
                continue
            self._edits.replace(keyword, "shuffle=", _shuffles(made))
            for one in loader.keywords:
                if one.arg == "shuffle":
                    self._edits.drop_keyword(one)

    def _place_sampler(self, made: ast.Call) -> None:
        """Workers go on evaluating a part each, so that what they sum up stays right; they have no group yet there."""
        known = {"num_replicas": 1, "rank": 2}
        parts: list[str | ast.expr] = [made.func, "(", made.args[0]] if made.args else [made.func, "("]
        for one in made.args[1:]:
            parts += [", ", one]
        for keyword in made.keywords:
            parts += [", " if len(parts) > 2 else "", f"{keyword.arg}=", keyword.value]
        for name, variable in (("num_replicas", "WORLD_SIZE"), ("rank", "RANK")):
            if len(made.args) <= known[name] and all(one.arg != name for one in made.keywords):
                parts.append(f", {name}={self._asked(variable)}")
        self._edits.replace(made, *parts, ")")

    def _take_out_samplers(self, samplers: dict[str, ast.Call]) -> None:
        """Whoever else asks for a sampler finds none."""
        for name, made in samplers.items():
            statement = self._file.parents[made]
            others = [
                node
                for node in ast.walk(self._file.tree)
                if isinstance(node, (ast.Name, ast.Attribute))
                and isinstance(node.ctx, ast.Load)
                and self._source(node) == name
                and not self._is_handled(node)
            ]
            if isinstance(statement, ast.Assign) and not others:
                self._remove(statement)
            elif any(self._is_option(one) for one in others):
                self._edits.replace(made, *_by_itself(made))
                self._imports.add("import torch")
            else:
                self._edits.replace(made, "None")

    def _is_option(self, sampler: ast.AST) -> bool:
        """Whether it is among a loader's options: ``{"batch_size": 32, "sampler": sampler}``."""
        outer = self._file.parents[sampler]
        if isinstance(outer, ast.Dict):
            keys = [key for key, value in zip(outer.keys, outer.values, strict=True) if value is sampler]
            return isinstance(keys[0], ast.Constant) and keys[0].value == "sampler"
        return isinstance(outer, ast.keyword) and outer.arg == "sampler"

    def _is_handled(self, sampler: ast.AST) -> bool:
        for outer, child in self._file.around(sampler):
            if isinstance(outer, ast.Call):
                return called(outer) == "DataLoader" or (child is outer.func and called(outer) == "set_epoch")
            if isinstance(outer, ast.stmt):
                return False
        return False

    def _take_out(
        self, statement: ast.Expr | ast.Assign, samplers: dict[str, ast.Call], entry: _Frame, start: ast.stmt
    ) -> None:
        value = statement.value
        if isinstance(statement, ast.Assign):
            target = statement.targets[0]
            told = target.slice if isinstance(target, ast.Subscript) else None
            sets = isinstance(told, ast.Constant) and told.value in _MEETING
            if (sets and self._source(target).partition("[")[0].endswith("environ")) or (
                isinstance(target, ast.Attribute) and target.attr == "require_backward_grad_sync"
            ):
                self._remove(statement)
            return
        if not isinstance(value, ast.Call):
            return
        name, function = called(value), value.func
        owner = self._source(function.value) if isinstance(function, ast.Attribute) else ""
        if name in _GROUPS and self._is_distributed(value):
            self._remove(statement)
        elif name == "setdefault" and owner.endswith("environ") and value.args:
            if isinstance(value.args[0], ast.Constant) and value.args[0].value in _MEETING:
                self._remove(statement)
        elif name == "set_epoch" and (owner in samplers or owner.endswith("sampler")):
            self._remove(statement)
        elif name in _SUMS and self._is_distributed(value) and value.args:
            self._average(statement, value, entry, start)
        elif name in _FROM_ONE and self._is_distributed(value):
            self._with_others_only(statement)

    def _average(self, statement: ast.Expr, call: ast.Call, entry: _Frame, start: ast.stmt) -> None:
        """A loss that is summed to be logged becomes a mean by samples; other sums are left to several workers."""
        told, text = call.args[0], self._source(call)
        said = [self._source(told)]
        said += [self._source(value) for target, value in self._pairs if self._source(target) == self._source(told)]
        is_loss = isinstance(told, (ast.Name, ast.Attribute)) and any("loss" in one.lower() for one in said)
        if is_loss and self._is_inside(statement, entry, start):
            count = "" if "AVG" in text else f" * {self._run}.world_size"
            self._edits.replace(call, told, f".fill_({self._run}.mean(", told, f"){count})")
            return
        self._with_others_only(statement)
        self._remarks.append(
            f"Line {call.lineno} sums over the workers, whose parts of a batch are unequal: right for counts and sums; "
            "of means, run.mean(value) is the mean over all samples."
        )

    def _with_others_only(self, statement: ast.Expr) -> None:
        """A script that is started alone has no group to do it in, and nobody to do it with."""
        margin = self._edits.margin(statement.lineno)
        self._edits.insert(statement.lineno, f"{margin}if torch.distributed.is_initialized():\n", around=1)
        self._edits.indent(statement.lineno, statement.end_lineno or statement.lineno)
        self._imports.add("import torch.distributed")

    def _is_inside(self, node: ast.AST, entry: _Frame, start: ast.stmt) -> bool:
        """Whether a node is in the function of the session, after its beginning."""
        return self._function_of(node) is entry.function and getattr(node, "lineno", 0) >= start.lineno

    def _lead(self, entry: _Frame, start: ast.stmt, spawned: set[str]) -> None:
        """What one worker alone does: by the number among all workers, as each may be the first of its machine."""
        local = Derived(self._file, ("LOCAL_RANK",), spawned)
        rank = Derived(self._file, ("RANK",))
        for node in ast.walk(self._file.tree):
            if not (isinstance(node, ast.Compare) and len(node.ops) == 1):
                continue
            right, sign = node.comparators[0], node.ops[0]
            zero = isinstance(right, ast.Constant) and right.value == 0 and isinstance(sign, (ast.Eq, ast.NotEq))
            listed = isinstance(sign, ast.In) and isinstance(right, (ast.List, ast.Tuple))
            if not (zero or (listed and "0" in self._source(right))):
                continue
            inside = self._is_inside(node, entry, start)
            if not local.is_in(node.left) and not (
                inside and isinstance(node.left, ast.Call) and rank.is_in(node.left)
            ):
                continue
            negated = isinstance(sign, ast.NotEq)
            if inside:
                self._edits.replace(node, f"not {self._run}.is_leader" if negated else f"{self._run}.is_leader")
            else:
                self._edits.replace(node, f"{self._asked('RANK', instead_of=node)} {'!=' if negated else '=='} 0")

    def _place_alone(self, node: ast.Subscript) -> None:
        """A script that is started without torchrun is its only worker."""
        name = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(name, str) and name in _ALONE and self._source(node.value) in ("os.environ", "environ"):
            said = self._source(node.slice)
            self._edits.replace(node, f"{self._source(node.value)}.get({said}, {said.replace(name, _ALONE[name])})")

    def _name_seeds(self) -> None:
        rank = Derived(self._file, ("RANK", "LOCAL_RANK"))
        for call in self._calls:
            if called(call) in _SEEDS and any(map(rank.is_in, call.args)):
                self._remarks.append(
                    f"Line {call.lineno} seeds by the worker's number: data and splits that are drawn with that seed "
                    "are others on each worker, and a session needs them alike."
                )

    def _rescale(self) -> None:
        """What follows the number of workers stays as it is for all: the batch they share, and its learning rate."""
        size = Derived(self._file, ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        for node in ast.walk(self._file.tree):
            if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mult)):
                what = _SCALED.search(self._source(node.target))
                if what and size.is_in(node.value):
                    self._remove(node)
                    self._remarks.append(_RESCALED.format(line=node.lineno, what=_scaled(what[0])))
            elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)):
                said, divided = self._source(node.right), self._source(node.left) + self._given_to(node)
                if "batch" in divided and (size.is_in(node.right) or re.search(r"gpus|world", said)):
                    self._edits.replace(node, node.left)
                    self._remarks.append(_RESCALED.format(line=node.lineno, what=_scaled("batch")))
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                sizes = [one for one in (node.left, node.right) if size.is_in(one)]
                if len(sizes) != 1:
                    continue
                other = node.left if sizes[0] is node.right else node.right
                what = _SCALED.search(self._source(other)) or _SCALED.search(self._given_to(node))
                if what:
                    self._edits.replace(node, other)
                    self._remarks.append(_RESCALED.format(line=node.lineno, what=_scaled(what[0])))

    def _given_to(self, value: ast.expr) -> str:
        """The name or the option that an expression is the value of."""
        outer = self._file.parents[value]
        if isinstance(outer, ast.keyword):
            return outer.arg or ""
        return self._source(outer.targets[0]) if isinstance(outer, ast.Assign) else ""

    def _remove(self, statement: ast.stmt) -> None:
        """With its lines; a block that is left empty goes as well, or passes."""
        parent, block = self._block(statement)
        self._removed.add(statement)
        if all(one in self._removed for one in block) and not isinstance(parent, ast.Module):
            if isinstance(parent, ast.If) and not parent.orelse and self._file.source(parent).startswith("if"):
                self._remove(parent)
                return
            self._edits.insert(block[-1].lineno, f"{self._edits.margin(statement.lineno)}pass\n", around=0)
        self._edits.drop(statement)

    def _block(self, statement: ast.stmt) -> tuple[ast.AST, list[ast.stmt]]:
        """What a statement is in, and the list of statements there that it is one of."""
        parent = self._file.parents[statement]
        blocks = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody", "handlers")]
        return parent, next(one for one in blocks if isinstance(one, list) and statement in one)

    # What is written in

    def _write_session(self, ways: Sequence[_Way], entry: _Frame, start: ast.stmt) -> None:
        _, block = self._block(start)
        margin = self._edits.margin(start.lineno)
        accumulate = self._accumulation(start, str(entry.optimizer))
        options = "" if accumulate is None else f", accumulate={accumulate}"
        options += "" if self._batch_norm == "own" else f', batch_norm="{self._batch_norm}"'
        self._edits.insert(
            start.lineno, f"{margin}with session({entry.model}, {entry.optimizer}{options}) as {self._run}:\n"
        )
        self._edits.insert(
            start.lineno, f"{margin}{self._edits.unit}{entry.loader} = {self._run}.loader({entry.loader})\n"
        )
        self._edits.indent(start.lineno, block[-1].end_lineno or start.lineno)
        for way in ways:
            self._say_backward(way, entry)
        self._declare(entry, str(entry.loader), only_if_of_file=True)
        self._guard_files(entry, start)
        self._judge_together(entry, start)
        self._import()

    def _say_backward(self, way: _Way, entry: _Frame) -> None:
        call = way.backward.value
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Attribute)
        parts: list[str | ast.expr] = [f"{self._owner(way, entry)}.backward("]
        if self._source(call.func) == "torch.autograd.backward":
            parts += [call.args[0]]
        else:
            parts += [call.func.value]
        for one in call.keywords:
            parts += [f", {one.arg}=", one.value]
        self._edits.replace(call, *parts, ")")

    def _owner(self, way: _Way, entry: _Frame) -> str:
        """How the session is written where a backward pass is made."""
        home = way.frames[0].function
        if home is entry.function:
            return self._run
        for frame in way.frames:
            if frame.loader is None:
                continue
            root = frame.loader.partition(".")[0].partition("[")[0]
            made_here = () if home is None or frame.function is not home else assigned(home)
            if any(self._source(target) == frame.loader for target, _ in made_here):
                continue  # another thing of that name: loader = tqdm(loader)
            if frame.function is home:
                return f"{frame.loader}.run"
            of_class = self._class_of(home) is not None and self._class_of(home) is self._class_of(frame.function)
            if (root == "self" and of_class) or (root != "self" and self._is_of_file(root, home, frame.function)):
                return f"{frame.loader}.run"
        self._declare(entry, self._run)
        return self._run

    def _is_of_file(self, name: str, *functions: Function | None) -> bool:
        """Whether a name means the file's variable in all of these functions."""
        of_file = {self._source(target) for target, _ in self._pairs if self._function_of(target) is None}
        inner = [one for one in functions if one is not None]
        own = {one.arg for function in inner for one in parameters(function)}
        own |= {self._source(target) for function in inner for target, _ in assigned(function)}
        return name in of_file and name not in own

    def _declare(self, entry: _Frame, name: str, *, only_if_of_file: bool = False) -> None:
        """A variable that other functions see too is the file's."""
        if entry.function is None or not name.isidentifier():
            return
        if only_if_of_file and not self._is_of_file(name, entry.function):
            return
        first = entry.function.body[0]
        is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        first = entry.function.body[1] if is_docstring and len(entry.function.body) > 1 else first
        said = f"{self._edits.margin(first.lineno)}global {name}\n"
        if said not in self._declared:
            self._declared.add(said)
            self._edits.insert(first.lineno, said, first=True)

    def _accumulation(self, start: ast.AST, optimizer: str) -> str | None:
        """Backward passes of a step, as in ``if (i + 1) % k == 0: optimizer.step()``."""
        for node in ast.walk(self._file.tree):
            if not isinstance(node, ast.If):
                continue
            steps = any(
                isinstance(one, ast.Call)
                and isinstance(one.func, ast.Attribute)
                and one.func.attr == "step"
                and any(self._is_same(optimizer, self._source(its)) for its in (one.func.value, *one.args[:1]))
                for statement in node.body
                for one in ast.walk(statement)
            )
            every = [one for one in ast.walk(node.test) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod)]
            if steps and every:
                number = self._source(every[0].right)
                off = any(
                    isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.Not) and self._source(one.operand) == number
                    for one in ast.walk(node.test)
                )
                return f"{number} or 1" if off else number
        return None

    @staticmethod
    def _is_same(optimizer: str, name: str) -> bool:
        return optimizer.rpartition(".")[2] == name.rpartition(".")[2] or bool(_OPTIMIZER.search(name))

    def _guard_files(self, entry: _Frame, start: ast.stmt) -> None:
        """One worker writes what all have alike."""
        for call in shared_files(self._file):
            statement = next(one for one, _ in self._file.around(call) if isinstance(one, ast.stmt))
            simple = isinstance(statement, ast.Expr) or (
                isinstance(statement, ast.With) and not any(one is start for one in ast.walk(statement))
            )
            guarded = any(
                isinstance(one, ast.With) and one.lineno in self._guarded for one, _ in self._file.around(statement)
            )
            if guarded:
                continue
            if simple and self._is_inside(statement, entry, start) and statement.end_lineno is not None:
                margin = self._edits.margin(statement.lineno)
                self._edits.insert(statement.lineno, f"{margin}if {self._run}.is_leader:\n", around=1)
                self._edits.indent(statement.lineno, statement.end_lineno)
                self._guarded.add(statement.lineno)
            else:
                self._remarks.append(
                    f"Line {call.lineno} writes the same file on every worker: let one of them do it, under "
                    '`if run.is_leader:`, or where there is no session `if os.environ.get("RANK", "0") == "0":`.'
                )

    def _judge_together(self, entry: _Frame, start: ast.stmt) -> None:
        """A schedule that follows a figure follows the same one on all workers."""
        plateaus = {
            self._source(target)
            for target, value in self._pairs
            if isinstance(value, ast.Call) and called(value) == "ReduceLROnPlateau"
        }
        plateaus |= {name for name, value in given(self._file.tree) if self._source(value) in plateaus}
        for call in self._calls:
            if called(call) != "step" or not isinstance(call.func, ast.Attribute) or not call.args:
                continue
            if self._source(call.func.value) not in plateaus:
                continue
            if self._is_inside(call, entry, start):
                self._edits.replace(call.args[0], f"{self._run}.mean(", call.args[0], ")")
            else:
                self._remarks.append(
                    f"Line {call.lineno}: ReduceLROnPlateau must follow the same figure on all workers, "
                    "run.mean(value)."
                )

    def _import(self) -> None:
        tree = self._file.tree
        imports = [one for one in tree.body if isinstance(one, (ast.Import, ast.ImportFrom))]
        known = {ast.unparse(_with_names(node, [one])) for node in imports for one in node.names}
        last = imports[-1] if imports else None
        is_documented = ast.get_docstring(tree) is not None and len(tree.body) > 1
        line = tree.body[int(is_documented)].lineno if last is None else (last.end_lineno or last.lineno) + 1
        others = sorted(self._imports - {_IMPORT} - known)
        told = [*(f"{one}\n" for one in others), f"{'' if last is None else chr(10)}{_IMPORT}\n"]
        for one in reversed(told):
            self._edits.insert(line, one, first=True)


def _scaled(name: str) -> str:
    return "batch" if name.lower().startswith("batch") else "learning rate"


def _shuffles(sampler: ast.Call) -> str | ast.expr:
    """What a DistributedSampler is told of shuffling."""
    wanted = [one.value for one in sampler.keywords if one.arg == "shuffle"] + sampler.args[3:4]
    return wanted[0] if wanted else "True"


def _by_itself(sampler: ast.Call) -> tuple[str | ast.expr, ...]:
    """A sampler of all of its samples in the place of one of a worker's part."""
    told = [*sampler.args[:1], *(one.value for one in sampler.keywords if one.arg == "dataset")]
    shuffles = _shuffles(sampler)
    is_ordered = isinstance(shuffles, ast.Constant) and shuffles.value is False
    return f"torch.utils.data.{'Sequential' if is_ordered else 'Random'}Sampler(", *told[:1], ")"


def _whole(parts: list[str]) -> str:
    """The model that all of these are parts of; where there is none, all of them: ``(one, two)``."""
    steps = zip(*(one.split(".") for one in parts), strict=False)
    common = [step[0] for step in takewhile(lambda step: len(set(step)) == 1, steps)]
    if common and common != ["self"]:
        return ".".join(common)
    every = list(dict.fromkeys(parts))
    return f"({', '.join(every)})" if len(every) > 1 else every[0]


def _all_of(names: Iterable[str | None]) -> str:
    """Of one or several models or optimizers, each of one or several, all: ``(one, two)``."""
    every = list(dict.fromkeys(part for one in names for part in _parts(str(one))))
    return f"({', '.join(every)})" if len(every) > 1 else every[0]


def _parts(name: str) -> list[str]:
    """Of ``(one, two)``, or of one alone."""
    return name.strip("()").split(", ")


def _with_names(node: ast.Import | ast.ImportFrom, names: list[ast.alias]) -> ast.stmt:
    if isinstance(node, ast.Import):
        return ast.Import(names)
    return ast.ImportFrom(node.module, names, node.level)
