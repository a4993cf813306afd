"""Checkpoints of a run: their files, which one a run goes on from, and the thread that writes them while it trains.

    checkpoint/LATEST                      name of the newest, for whoever copies checkpoints elsewhere; written last
    checkpoint/step-120/manifest.json      the files below with their hashes; written when all of them are on disk
    checkpoint/step-120/state.safetensors  what all workers share: model, optimizer, cursor, controller, shares
    checkpoint/step-120/rank-0.safetensors what each worker has of its own: gradient residual, random generators
    checkpoint/step-140.partial/           one that is being written

Every file is tensors and plain values: loading a checkpoint runs no code. The newest one that is whole counts, whatever
LATEST says; one that is torn or altered, by its manifest, is passed over and named.

**Saving.** A copy is taken between two steps, for which training pauses, and a thread writes it. Each worker tells in
its control row how far its part is; once every row says that it is on disk, the workers tell each other its hash and
the leader makes it the newest checkpoint. A disk that refuses is told as an event, and the next checkpoint is tried
when it is due. Where it is full, an older checkpoint gives way.

**Format.** `pack` makes nested plain values and tensors one safetensors file, which is never unpickled: tensors are
numbered in the order in which they are met; one more, `_TREE`, holds the JSON of everything around them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, StringConstraints
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hetopt.core.artifact import Artifact, Record, write_atomically
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EventLog
from hetopt.core.paths import inside
from hetopt.core.run_folder import CHECKPOINT_FOLDER, LATEST_FILE, MANIFEST_FILE, MODEL_FILE, UNFINISHED_MODEL_FILE
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import LOG_ROOM_BYTES
from hetopt.trainer.agreement import gather_numbers, gather_texts
from hetopt.trainer.comm.compressor import State, redistribute
from hetopt.trainer.context import Generators, WorkerContext

_TREE = "tree"


def pack(value: Any) -> bytes:
    """Return nested dictionaries, lists, tuples, tensors, numbers, texts and None as the bytes of a safetensors file.

    A tensor that is one number expanded to a shape takes the room of that number.

    Raises:
        TypeError: a value of another type is among them.
    """
    return save(_separate(_flattened(value).items()))


def save_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write named tensors to a safetensors file that its owner alone can read; after an error a part may be left.

    Tied parameters are written under each of their names, so that the names are those of the state dictionary.

    Args:
        path: file to write; one that is there is overwritten.
        tensors: (name, tensor) pairs, each on any device.

    Raises:
        OSError: the disk refuses, or would have no room left for the lines of the run's log.
    """
    kept = _separate(tensors)
    if shutil.disk_usage(path.parent).free < sum(tensor.nbytes for tensor in kept.values()) + LOG_ROOM_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    try:
        # Not `save` and a write: that holds up all other threads (of training) for as long as it copies.
        save_file(kept, path)
        path.chmod(0o600)
    except SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        number = int(match[1]) if match else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from None


def unpack(data: bytes) -> Any:
    """Return the value that `pack` made these bytes of, with tensors on the CPU; no code is run.

    Raises:
        ValueError: the bytes are not what `pack` returned.
    """
    try:
        tensors = load(data)
        return _restored(json.loads(tensors[_TREE].numpy().tobytes()), tensors)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, RecursionError):
        raise ValueError("these bytes are not what was packed") from None


def _separate(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors as safetensors takes them: on the CPU, contiguous, and no two in the same memory.

    Tensors that shared memory are copied, so that each has its own.
    """
    separated: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors:
        kept = tensor.detach().cpu().contiguous()
        if kept.untyped_storage().data_ptr() in storages:
            kept = kept.clone()
        storages.add(kept.untyped_storage().data_ptr())
        separated[name] = kept
    return separated


def _flattened(value: Any) -> dict[str, Tensor]:
    """Return all tensors of a value by name, and the JSON of everything around them as one more."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_described(value, tensors)).encode()
    return {**tensors, _TREE: torch.frombuffer(bytearray(tree), dtype=torch.uint8)}


def _described(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return JSON for a value; move its tensors into ``tensors``, under numbers.

    Raises:
        TypeError: the value holds something else than tensors, mappings, lists, tuples, strings, numbers and None.
    """
    if isinstance(value, Tensor):
        name = str(len(tensors))
        expanded = value.numel() > 1 and not any(value.stride())
        tensors[name] = value[(0,) * value.dim()] if expanded else value
        return {"t": [name, list(value.shape)]}
    if isinstance(value, Mapping):
        return {"d": [[_described(key, tensors), _described(each, tensors)] for key, each in value.items()]}
    if isinstance(value, list):
        return {"l": [_described(each, tensors) for each in value]}
    if isinstance(value, tuple):
        return {"u": [_described(each, tensors) for each in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be packed")


def _restored(described: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `_described` made JSON of; KeyError, TypeError or ValueError: it is no such JSON."""
    if not isinstance(described, dict):
        return described
    ((kind, inner),) = described.items()
    if kind == "t":
        name, shape = inner
        return tensors[name].expand(shape)
    if kind == "d":
        return {_restored(key, tensors): _restored(each, tensors) for key, each in inner}
    return {"l": list, "u": tuple}[kind](_restored(each, tensors) for each in inner)


@dataclass(frozen=True, kw_only=True)
class SharedState:
    """Part of the training state that is the same on every rank: model, optimizer, data position and policies.

    Attributes:
        digest: SHA-256 that tells which run the state belongs to, see `run_digest`.
        step: steps done.
        training_s: seconds trained so far, over all attempts.
        shares: local batch sizes, in rank order.
        model: its state dictionary.
        optimizer: its state dictionary.
        cursor: position in the data, see `Cursor.state`.
        policy: name of the batch policy.
        controller: what the batch policy remembers, as plain JSON.
        steering: what the choice of the exchange remembers, as plain JSON; None: the exchange is fixed.
        loss_scale: loss scale of fp16, as `LossScale` is made from it; None: no fp16.
        memory_bounds: samples of the largest micro-batch that each worker learned to fit, in rank order; 0: not
            bounded.
        target_reached: whether the target metric was reached.
        script: state of a script's further objects; None: the run is not a script's.
    """

    digest: str
    step: int
    training_s: float
    shares: tuple[int, ...]
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    cursor: Mapping[str, int]
    policy: str
    controller: Mapping[str, object]
    steering: Mapping[str, object] | None
    loss_scale: Mapping[str, Any] | None
    memory_bounds: tuple[int, ...]
    target_reached: bool
    script: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class RankState(Generators):
    """Training state of one worker alone: random generators, residual, local SGD's model, and a script's state.

    Attributes:
        memory: what error feedback holds back, by name.
        local: this worker's own model and optimizer under local SGD; None: all workers hold one model.
        script: state of this worker's script; None: the run is not a script's.
    """

    memory: State
    local: Mapping[str, Any] | None = None
    script: Mapping[str, Any] | None = None


StateT = TypeVar("StateT", SharedState, RankState)


def snapshot(state: StateT) -> StateT:
    """Return a copy of training state with all tensors on the CPU, to be written while training goes on."""
    return replace(state, **copied(vars(state)))


def run_digest(spec: RunSpec) -> str:
    """Return the SHA-256 (hex) of what must stay when a run resumes: task, seed, compression, precision, data split.

    Included are the spec's task, seed, compression, precision, partition and injection. Workers, shares and the stop
    rule may change: that is what resuming on another cluster, or for longer, is.
    """
    identity = spec.model_dump_json(include={"task", "seed", "compression", "precision", "partition", "injection"})
    return hashlib.sha256(identity.encode()).hexdigest()


def copied(value: Any) -> Any:
    """Return a copy of nested dictionaries, lists and tuples, with every tensor copied onto the CPU, detached."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)


def parameters_sha256(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of named parameters, in order of name: equal only when all are bit-identical."""
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters, key=itemgetter(0)):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


T = TypeVar("T")

SUFFIX = ".safetensors"
"""Suffix of the names of a checkpoint's files."""

STATE_FILE = f"state{SUFFIX}"

CheckpointFile = Annotated[str, StringConstraints(pattern=r"^(state|rank-[0-9]{1,6})\.safetensors$")]
"""Name of a file that a checkpoint may have; a manifest may come from a bucket, and names no others."""


class FileRecord(Record):
    """Size in bytes and SHA-256 of a checkpoint's file as it was written."""

    size_bytes: NonNegativeInt
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @classmethod
    def of(cls, data: bytes | memoryview) -> Self:
        """Return the record of a file whose content is ``data``."""
        return cls(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def fault(self, data: bytes) -> str | None:
        """Return how a file's content differs from the record, in a few words ('was altered'); None: it is the same."""
        if len(data) != self.size_bytes:
            return f"has {len(data)} bytes instead of {self.size_bytes}"
        return None if hashlib.sha256(data).hexdigest() == self.sha256 else "was altered"


class Manifest(Artifact):
    """Record of a checkpoint's files, written last, so that a checkpoint that has one was once whole.

    Attributes:
        step: steps done when the checkpoint was begun.
        digest: digest of the run, see `run_digest`.
        workers: workers that wrote it, each a file of its own.
        files: size and hash of every file, by name.
    """

    KIND: ClassVar[str] = "checkpoint"
    VERSION: ClassVar[int] = 6
    MADE_BY: ClassVar[str] = "hetopt launch"

    step: NonNegativeInt
    digest: str = Field(description="of the run, see run_digest")
    workers: PositiveInt
    files: Mapping[CheckpointFile, FileRecord]

    def fault(self, folder: Path) -> str | None:
        """Return the name of the first bad file in ``folder`` and its fault, in a few words; None: all are as recorded.

        All of every file is read. A file that cannot be read is bad.
        """
        for name, record in sorted(self.files.items()):
            try:
                fault = record.fault((folder / name).read_bytes())
            except OSError as error:
                fault = f"cannot be read ({error.strerror})"
            if fault is not None:
                return f"{name} {fault}"
        return None


def rank_file(rank: int) -> str:
    """Return the name of the checkpoint file with the state of worker ``rank`` alone."""
    return f"rank-{rank}{SUFFIX}"


_KEPT = 2
_PARTIAL = ".partial"


class CheckpointFolder:
    """The checkpoints in a run's folder: files are written one by one, published together, found, and loaded.

    Of the published checkpoints the newest two stay.

    Args:
        run_dir: folder of the run; its checkpoints lie in ``checkpoint/`` there, which need not exist.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / CHECKPOINT_FOLDER

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step, whether it exists or not."""
        return self._folder / f"step-{step}"

    def partial(self, step: int) -> Path:
        """Return the folder in which the checkpoint of a step is being written."""
        return self._folder / f"step-{step}{_PARTIAL}"

    def newest(self, digest: str) -> tuple[int | None, tuple[tuple[int, str], ...]]:
        """Return the step of the newest whole checkpoint (None: there are none), and the damaged ones that are newer.

        Damaged ones come newest first, each as its step and what is wrong with it. All of every file is read.

        Raises:
            BadInput: a checkpoint belongs to another run (another ``digest``), or there are checkpoints and none is
                whole.
        """
        torn: list[tuple[int, str]] = []
        for step in reversed(self._steps()):
            manifest = self._manifest(step)
            reason = manifest if isinstance(manifest, str) else manifest.fault(self.path(step))
            if isinstance(manifest, Manifest) and manifest.digest != digest:
                raise BadInput(
                    f"The checkpoint in {self._folder} belongs to a run with another task, seed, compression or "
                    "precision.",
                    hint=_start_over(self._folder),
                )
            if reason is None:
                return step, tuple(torn)
            torn.append((step, reason))
        if torn:
            raise BadInput(
                f"No checkpoint in {self._folder} is whole: in that of step {torn[0][0]}, {torn[0][1]}.",
                hint=_start_over(self._folder),
            )
        return None, ()

    def write(self, step: int, name: str, state: SharedState | RankState, *, keeps: int = 1) -> FileRecord:
        """Write shared or one worker's state as a file of the unpublished checkpoint of ``step``; return its record.

        Args:
            step: step of the checkpoint.
            name: name of the file, as `rank_file` gives it, or `STATE_FILE`.
            state: state to write.
            keeps: published checkpoints that stay; on a full disk older ones are deleted to make room, down to so many.

        Raises:
            OSError: the disk refuses, and no older checkpoint could give way.
        """
        path = self.partial(step) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write_whole(path, _flattened(vars(state)), keeps=keeps)
        return FileRecord.of(path.read_bytes())

    def write_whole(self, path: Path, tensors: Mapping[str, Tensor], *, keeps: int) -> None:
        """Write named tensors to a file, whole or not at all; on a full disk, delete old checkpoints down to ``keeps``.

        Raises:
            OSError: the disk refuses, and no older checkpoint could give way; nothing of the file is left.
        """
        partial = path.with_name(f".{path.name}.partial")
        while True:
            try:
                save_tensors(partial, tensors.items())
                _wait_for_disk(partial)
                os.replace(partial, path)
                return
            except OSError as error:
                partial.unlink(missing_ok=True)
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # the disk, or a user's part of it
                if not (is_full and self._delete_oldest(keeps=keeps)):
                    raise

    def publish(self, manifest: Manifest) -> None:
        """Make a manifest's checkpoint, whose files are all on disk, the newest; delete all but the newest two.

        Also deleted are unpublished checkpoints of this step or an earlier one. One of the same step is replaced.

        Raises:
            OSError: the disk refuses.
            BadInput: the manifest or `LATEST_FILE` cannot be written.
        """
        partial, final = self.partial(manifest.step), self.path(manifest.step)
        write_atomically(partial / MANIFEST_FILE, manifest.to_json())
        shutil.rmtree(final, ignore_errors=True)  # torn, or an attempt that resumed from before it came here again
        partial.rename(final)
        _wait_for_disk(self._folder)
        write_atomically(self._folder / LATEST_FILE, final.name + "\n")
        # The one before the newest is kept in case the newest turns out damaged.
        old = [self.path(step) for step in self._steps()[:-_KEPT]]
        given_up = [
            self.partial(step) for step in _steps_of(self._folder.glob(f"step-*{_PARTIAL}")) if step <= manifest.step
        ]
        for path in (*old, *given_up):
            shutil.rmtree(path, ignore_errors=True)

    def _delete_oldest(self, *, keeps: int) -> bool:
        """Delete the oldest published checkpoint if there are more than ``keeps``; return whether that was done."""
        steps = self._steps()
        if len(steps) <= keeps:
            return False
        shutil.rmtree(self.path(steps[0]), ignore_errors=True)
        return not self.path(steps[0]).exists()

    def load_newest(
        self, digest: str, rank: int, workers: int, events: EventLog, *, in_parts: bool = False
    ) -> tuple[SharedState, RankState] | None:
        """Load shared and own state of the newest checkpoint that rank 0 finds whole; all workers must call it.

        Args:
            digest: digest of the run, see `run_digest`; rank 0's counts.
            rank: rank of this worker.
            workers: number of workers of the run now; it may differ from the number that wrote the checkpoint.
            events: log that is told, on rank 0, which newer checkpoints were passed over as damaged.
            in_parts: whether workers share a model now, each holding a part of it.

        Returns:
            Shared state, and this worker's own; None: there is no checkpoint.

        Raises:
            BadInput: no checkpoint is whole, or it belongs to another run (both on rank 0 alone), a file is damaged, or
                what compression held back is in parts of a sharded model and the number of workers has changed.
        """
        newest, damaged = self.newest(digest) if rank == 0 else (None, ())
        for torn, reason in damaged:
            events.write("checkpoint_skipped", step=torn, reason=reason)
        step = int(gather_numbers([-1 if newest is None else newest], workers)[0][0])
        if step < 0:
            return None
        shared = self.load_shared(step)
        then = len(shared.shares)
        return shared, self.load_own(step, rank, workers_then=then, workers_now=workers, in_parts=in_parts)

    def load_shared(self, step: int) -> SharedState:
        """Load the state that all workers share from the checkpoint of a step.

        Raises:
            BadInput: the checkpoint is missing or damaged.
        """
        return self._read(step, STATE_FILE, SharedState)

    def load_own(
        self, step: int, rank: int, *, workers_then: int, workers_now: int, in_parts: bool = False
    ) -> RankState:
        """Load worker ``rank``'s state of a step; residuals are shared out anew if the number of workers changed.

        When the number of workers has changed, the residuals of all old workers are handed on so that their sum stays,
        and a worker that is new starts with the random generators of an old one.

        Args:
            step: step of the checkpoint.
            rank: rank of this worker now, among ``workers_now``.
            workers_then: workers that wrote the checkpoint.
            workers_now: workers of the run now.
            in_parts: whether workers share a model now, each holding a part of it.

        Raises:
            BadInput: a file is missing or damaged, or the number of workers has changed and what compression held back
                is in parts of a sharded model.
        """
        if workers_then == workers_now:
            return self._read(step, rank_file(rank), RankState)
        states = [self._read(step, rank_file(old), RankState) for old in range(workers_then)]
        memory = redistribute([state.memory for state in states], workers_now, in_parts=in_parts)[rank]
        return replace(states[rank % workers_then], memory=memory)

    def _steps(self) -> list[int]:
        """Return the steps of all checkpoints that were ever whole, oldest first."""
        return _steps_of(path for path in self._folder.glob("step-*") if path.suffix != _PARTIAL)

    def _manifest(self, step: int) -> Manifest | str:
        """Return the manifest of a published checkpoint, or a text on what is wrong with the manifest."""
        try:
            return Manifest.load(self.path(step) / MANIFEST_FILE)
        except BadInput as error:
            return error.message.removesuffix(".")

    def _read(self, step: int, name: str, kind: Callable[..., T]) -> T:
        """Read a file of a published checkpoint, checked against its manifest, as a ``kind``.

        Raises:
            BadInput: the file, or the manifest, is missing or damaged.
        """
        manifest, path = self._manifest(step), self.path(step) / name
        try:
            content = path.read_bytes()
            if isinstance(manifest, str) or manifest.files[name].fault(content) is not None:
                raise ValueError("this is not what was written")
            return kind(**unpack(content))
        except (OSError, KeyError, ValueError, TypeError):
            raise BadInput(f"{path} is damaged.", hint=_start_over(self._folder)) from None


def _steps_of(folders: Iterable[Path]) -> list[int]:
    """Return the steps that folders are named after, in ascending order."""
    names = [path.name.removeprefix("step-").removesuffix(_PARTIAL) for path in folders if path.is_dir()]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def begin_from(given: str, model: nn.Module, optimizer: Optimizer) -> tuple[int, int]:
    """Load model and optimizer, in place, from a checkpoint of a task or a session; return its steps and samples seen.

    After an error the model may be overwritten already.

    Args:
        given: path of a checkpoint's folder, or of a run's folder, whose newest checkpoint is taken.
        model: whole module, not sharded; overwritten.
        optimizer: optimizer of the model; overwritten.

    Raises:
        BadInput: there is no checkpoint, it is damaged, or it is of another model or optimizer.
    """
    path = Path(given)
    is_one = (path / MANIFEST_FILE).is_file()
    folder = CheckpointFolder(path.parent.parent if is_one else path)
    steps = _steps_of([path]) if is_one else folder._steps()
    if not steps:
        raise BadInput(f"there is no checkpoint in {path}.", hint="give the folder of a run, or of a checkpoint in it")
    shared = folder.load_shared(steps[-1])
    try:
        model.load_state_dict(shared.model)
        optimizer.load_state_dict(shared.optimizer["0"] if "0" in shared.optimizer else dict(shared.optimizer))
    except (RuntimeError, ValueError, KeyError):
        raise BadInput(
            f"the checkpoint in {path} is of another model or optimizer.", hint="give one of a run of this task"
        ) from None
    return shared.step, shared.cursor["samples_seen" if "samples_seen" in shared.cursor else "position"]


def write_model(run_dir: Path, state: Mapping[str, Any], *, stopped: bool, number: int = 1) -> None:
    """Write the trained model's tensors to the run's folder; if ``stopped``, to the file of an unfinished model.

    The file of the other kind is removed.

    `safetensors.torch.load_file` reads what ``model.load_state_dict`` takes. What a module keeps beside its tensors
    (``get_extra_state``) is in checkpoints alone: a file of safetensors has no room for it.

    Where the disk is full, older checkpoints give way: the model is in each, so its room is enough. The trained model
    is worth more than all of them; that of a stopped run less than the newest.

    Args:
        run_dir: folder of the run.
        state: state dictionary of the model; values that are no tensors are left out.
        stopped: whether the run stopped before its planned end.
        number: place among several models, from 1 on; the first has the name that everybody looks for.

    Raises:
        RunFailed: the disk is full or cannot be written.
    """
    done, so_far = (
        inside(run_dir, name if number == 1 else f"{Path(name).stem}-{number}{SUFFIX}")
        for name in (MODEL_FILE, UNFINISHED_MODEL_FILE)
    )
    path = so_far if stopped else done
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    try:
        CheckpointFolder(run_dir).write_whole(path, tensors, keeps=int(stopped))
    except OSError as error:
        raise RunFailed(
            f"the model cannot be written to {path}: {error.strerror}.",
            hint="make room on the disk, then launch the run again: it resumes from its last checkpoint",
        ) from None
    (done if stopped else so_far).unlink(missing_ok=True)


def _wait_for_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's names (so that renames in it last), are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _start_over(folder: Path) -> str:
    return f"bring an older checkpoint back to {folder}, or remove it to start over"


WRITTEN, REFUSED = 1.0, -1.0
"""Value of a control row for the checkpoint under way: this worker's part is on disk, or the disk refused it. The value
0 means that none is under way, or that the part is still being written."""


def is_due(since_s: float, *, period_s: float, every_s: float) -> bool:
    """Return whether to begin a checkpoint now, so that a loss undoes at most ``max(every_s, 2 period_s)`` seconds.

    What workers tell of a period is up to a period old, and a checkpoint that begins at the end of the next would count
    at the end of the one after: ``since_s + 3 period_s`` could be lost by then (more, where writing takes longer than a
    period).

    Args:
        since_s: seconds since the last checkpoint began, as the workers told.
        period_s: seconds that a control period takes.
        every_s: interval that is wished for, in seconds.
    """
    return since_s + 3 * period_s >= every_s


def unsaved(problem: str) -> RunFailed:
    """Return the error of a stopped run whose last checkpoint could not be written.

    ``problem``: why, without full stop.
    """
    return RunFailed(
        f"the last checkpoint cannot be written: {problem}.",
        hint="make room on the disk, then launch the run again: it resumes from the checkpoint before",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnderWay:
    """A checkpoint that is being written.

    Attributes:
        digest: digest of the run.
        parts: this worker's files, by name.
        pause_s: how long training waited for the copy.
        begun_s: time by the context's clock when training was paused for the copy.
    """

    step: int
    digest: str
    parts: Future[dict[str, FileRecord]]
    pause_s: float
    begun_s: float


class CheckpointSaver:
    """One worker's side of saving checkpoints in a thread; all ranks must call its methods alike, but `progress`.

    Its attribute ``saved_step`` is the step of the newest checkpoint that it published; None: none yet.

    Args:
        context: context of this worker.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._folder = CheckpointFolder(context.run_dir)
        self._who = f"worker {context.rank} on {context.worker.host}"
        self._thread = ThreadPoolExecutor(1, "writes-checkpoints")
        self._under_way: _UnderWay | None = None
        self.saved_step: int | None = None

    @property
    def begun_step(self) -> int | None:
        """Step of the newest checkpoint, published or under way; None: no checkpoint was begun."""
        return self.saved_step if self._under_way is None else self._under_way.step

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._under_way is not None

    @property
    def progress(self) -> float:
        """`WRITTEN` or `REFUSED` once this worker's files of the checkpoint under way are; 0: not yet, or none is."""
        if self._under_way is None or not self._under_way.parts.done():
            return 0.0
        return WRITTEN if self._under_way.parts.exception() is None else REFUSED

    def begin(self, shared: SharedState, rank_state: RankState, *, begun_s: float, keeps: int = 1) -> None:
        """Copy this worker's state (rank 0: the shared, too) and write it in a thread; none may be under way.

        Args:
            shared: state of all workers.
            rank_state: state of this worker.
            begun_s: time by the context's clock when training was paused for the copy.
            keeps: published checkpoints that stay where the disk is full; older ones give way.
        """
        assert self._under_way is None
        step, of_all, of_mine = shared.step, snapshot(shared) if self._context.rank == 0 else None, snapshot(rank_state)

        def write() -> dict[str, FileRecord]:
            states = ((rank_file(self._context.rank), of_mine), (STATE_FILE, of_all))
            return {
                name: self._folder.write(step, name, state, keeps=keeps) for name, state in states if state is not None
            }

        parts = self._thread.submit(write)
        pause_s = self._context.clock() - begun_s
        self._under_way = _UnderWay(step=step, digest=shared.digest, parts=parts, pause_s=pause_s, begun_s=begun_s)

    def conclude(self, progress_by_rank: Sequence[float]) -> str | None:
        """Publish or give up the checkpoint under way, once no worker's progress is 0; all must call it.

        Args:
            progress_by_rank: `progress` of every worker, in rank order, as the last control rows had it.

        Returns:
            Why it was given up, which is also written to the log; None: it was published, it is not done yet, or none
            is under way.
        """
        if self._under_way is None or 0.0 in progress_by_rank:
            return None
        problem = self._publish_or_give_up(self._under_way, progress_by_rank)
        if problem is not None:
            self._context.events.write("checkpoint_failed", step=self._under_way.step, reason=problem)
        self._under_way = None
        return problem

    def finish(self) -> str | None:
        """Wait for the checkpoint under way, then publish or give it up; all must call it.

        Returns:
            Why it was given up; None: it was published, or none is under way.
        """
        if self._under_way is None:
            return None
        wait([self._under_way.parts])
        return self.conclude([row[0] for row in gather_numbers([self.progress], self._context.world_size)])

    def close(self) -> None:
        """End the thread that writes checkpoints, once it has written what it was at.

        A checkpoint that was not concluded stays unpublished.
        """
        self._thread.shutdown()

    def _publish_or_give_up(self, under_way: _UnderWay, progress_by_rank: Sequence[float]) -> str | None:
        """Publish or give up the checkpoint, all workers alike; return why it was given up; None: it was published."""
        texts = gather_texts(self._record_or_reason(under_way), self._context.world_size)
        problem = "; ".join(text for text, progress in zip(texts, progress_by_rank, strict=True) if progress < 0)
        if self._context.rank == 0:
            problem = problem or self._publish(under_way, texts) or ""
            if problem:
                shutil.rmtree(self._folder.partial(under_way.step), ignore_errors=True)
        problem = gather_texts(problem, self._context.world_size)[0]
        if not problem:
            self.saved_step = under_way.step
        return problem or None

    def _record_or_reason(self, under_way: _UnderWay) -> str:
        """Return the `FileRecord` of this worker's file as JSON, or, if it was not written, a text on why."""
        error = under_way.parts.exception()
        if error is None:
            return under_way.parts.result()[rank_file(self._context.rank)].model_dump_json()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        return f"{self._who}: {reason}"

    def _publish(self, under_way: _UnderWay, texts: Sequence[str]) -> str | None:
        """Publish and log the checkpoint of the files recorded in ``texts``, by rank; return why not; None: done."""
        files = {rank_file(rank): FileRecord.model_validate_json(text) for rank, text in enumerate(texts)}
        files[STATE_FILE] = under_way.parts.result()[STATE_FILE]
        manifest = Manifest(step=under_way.step, digest=under_way.digest, workers=self._context.world_size, files=files)
        try:
            self._folder.publish(manifest)
        except OSError as error:
            return f"{self._who}: {error.strerror}"
        except BadInput as error:
            return f"{self._who}: {error.message.removesuffix('.')}"
        self._context.events.write(
            "checkpoint_saved",
            step=under_way.step,
            path=str(self._folder.path(under_way.step).relative_to(self._context.run_dir)),
            save_s=round(under_way.pause_s, 6),
            written_s=round(self._context.clock() - under_way.begun_s, 6),
            size_bytes=sum(record.size_bytes for record in files.values()),
        )
        return None
