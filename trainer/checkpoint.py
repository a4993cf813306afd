"""What a run needs to go on after an interruption, and how it lies on disk, whole or not at all.

    checkpoint/LATEST            name of the newest complete checkpoint; written last
    checkpoint/step-120/state.pt what all workers share: model, optimizer, cursor, controller, shares
    checkpoint/step-120/rank-0.pt what each worker has of its own: gradient residual, random generators

Every file is tensors and plain values, and is read with ``weights_only=True``: loading a checkpoint runs no code.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetopt.profiler.artifact import write_atomically
from hetopt.profiler.errors import BadInput, RunFailed
from hetopt.trainer.exchange.memory import MemoryState, redistribute
from hetopt.trainer.run_folder import CHECKPOINT_FOLDER
from hetopt.trainer.spec import RunSpec

_SCHEMA = 3
_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class SharedState:
    """The part of a checkpoint that is the same on every rank.

    Attributes:
        digest: which run it belongs to, see `run_digest`.
        step: steps done.
        training_s: seconds trained so far, over all attempts.
        shares: local batch sizes, in rank order.
        model: its state dictionary.
        optimizer: its state dictionary.
        cursor: where the data stands.
        policy: name of the batch policy.
        controller: what the batch policy remembers, as plain JSON.
        steering: what steers the exchange remembers, likewise; None: nothing does.
        loss_scale: of fp16.
        learning_rate: the scale that follows the gradient noise, where it does.
        memory_bounds: samples of the largest micro-batch that each worker learned to fit, in rank order; 0: none.
        target_reached: nothing is left to do for a run that ends at its target.
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
    loss_scale: Mapping[str, float] | None
    learning_rate: Mapping[str, float] | None
    memory_bounds: tuple[int, ...]
    target_reached: bool


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The part of a checkpoint that is each worker's own."""

    memory: MemoryState
    cpu_generator: Tensor
    cuda_generator: Tensor | None

    @classmethod
    def now(cls, memory: MemoryState, device: torch.device) -> RankState:
        """The state of this worker at this moment."""
        return cls(
            memory=memory,
            cpu_generator=torch.get_rng_state(),
            cuda_generator=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def restore_generators(self, device: torch.device) -> None:
        """Continue the random sequences; a device that the checkpoint does not know keeps its own."""
        torch.set_rng_state(self.cpu_generator)
        if device.type == "cuda" and self.cuda_generator is not None:
            torch.cuda.set_rng_state(self.cuda_generator, device)


def run_digest(spec: RunSpec) -> str:
    """Names the training that a checkpoint belongs to: what must not change between its attempts.

    Workers, shares and the stop rule may: that is what resuming on another cluster, or for longer, is.
    """
    identity = spec.model_dump_json(include={"task", "seed", "compression", "precision"})
    return hashlib.sha256(identity.encode()).hexdigest()


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / CHECKPOINT_FOLDER
        self._latest = self._folder / "LATEST"

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, if there is one.

        Raises:
            BadInput: LATEST names none.
        """
        try:
            name = self._latest.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        prefix, _, step = name.partition("-")
        if prefix != "step" or not step.isdigit() or not (self._folder / name).is_dir():
            raise BadInput(
                f"{self._latest} names {name[:40]!r}, which is no checkpoint.",
                hint=f"write the name of one that is there into it, or remove {self._folder} to start over",
            )
        return int(step)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self._folder / f"step-{step}"

    def save(
        self, *, shared: SharedState | None, rank: int, own: RankState, step: int, barrier: Callable[[], None]
    ) -> None:
        """Save one checkpoint together: called by every rank, with ``shared`` on the one that writes it (the leader).

        ``barrier`` returns when every rank has called it. It is passed twice: the checkpoint becomes the latest only
        when all of it is on disk, and no rank goes on before it is.

        Raises:
            RunFailed: the disk is full or cannot be written.
        """
        partial = self._folder / f"step-{step}.partial"
        try:
            partial.mkdir(parents=True, exist_ok=True)
            if shared is not None:
                _write(partial / "state.pt", {"schema": _SCHEMA, **vars(shared)})
            _write(partial / f"rank-{rank}.pt", vars(own))
            barrier()
            if shared is not None:
                final = self.path(step)
                shutil.rmtree(final, ignore_errors=True)  # left by an attempt that died before it became the latest
                partial.rename(final)
                write_atomically(self._latest, final.name + "\n")
                self._forget_old()
        except OSError as error:
            raise RunFailed(
                f"the checkpoint of step {step} cannot be written to {self._folder}: {error.strerror}.",
                hint="make room on the disk, then launch the run again: it resumes from the checkpoint before",
            ) from None
        barrier()

    def load_shared(self, step: int, digest: str) -> SharedState:
        """What all workers share at ``step``.

        Raises:
            BadInput: damaged, or of another run.
        """
        path = self.path(step) / "state.pt"
        data = _read(path)
        try:
            if data.pop("schema") != _SCHEMA:
                raise BadInput(f"{path} was written by another version of hetopt.", hint=_start_over(self._folder))
            shared = SharedState(**data)
        except (KeyError, TypeError):
            raise BadInput(f"{path} is not a checkpoint of hetopt.", hint=_start_over(self._folder)) from None
        if shared.digest != digest:
            raise BadInput(
                f"The checkpoint in {self._folder} belongs to a run with another task, seed, compression or precision.",
                hint=_start_over(self._folder),
            )
        return shared

    def load_own(self, step: int, rank: int, *, workers_then: int, workers_now: int) -> RankState:
        """What is the own of worker ``rank`` (of ``workers_now``) at ``step``, when there were ``workers_then``.

        When the number of workers has changed, the residuals of all old workers are handed on so that their sum stays,
        and a worker that is new starts with the random generators of an old one.

        Raises:
            BadInput: damaged.
        """
        if workers_then == workers_now:
            return self._load_rank(step, rank)
        states = [self._load_rank(step, old) for old in range(workers_then)]
        memory = redistribute([state.memory for state in states], workers_now)[rank]
        like = states[rank % workers_then]
        return RankState(memory=memory, cpu_generator=like.cpu_generator, cuda_generator=like.cuda_generator)

    def _load_rank(self, step: int, rank: int) -> RankState:
        path = self.path(step) / f"rank-{rank}.pt"
        try:
            return RankState(**_read(path))
        except TypeError:
            raise BadInput(f"{path} is not a checkpoint of hetopt.", hint=_start_over(self._folder)) from None

    def _forget_old(self) -> None:
        """Keep the newest two: the one before the latest is the way out if the latest turns out damaged."""
        done = [path for path in self._folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
        done.sort(key=lambda path: int(path.name.removeprefix("step-")))
        for path in [*done[:-_KEPT], *self._folder.glob("step-*.partial")]:
            shutil.rmtree(path, ignore_errors=True)


def save_model(path: Path, model: nn.Module) -> None:
    """Write the model's state dictionary, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    _write(partial, dict(model.state_dict()))
    os.replace(partial, path)


def parameters_sha256(model: nn.Module) -> str:
    """A fingerprint of all parameters: equal only when they are bit-identical."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _write(path: Path, data: Mapping[str, Any]) -> None:
    # Through memory: torch reports a full disk as an internal error, the operating system as what it is.
    buffer = io.BytesIO()
    torch.save(dict(data), buffer)
    with path.open("wb") as stream:
        stream.write(buffer.getbuffer())
        stream.flush()
        os.fsync(stream.fileno())


def _read(path: Path) -> dict[str, Any]:
    try:
        data = torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.", hint=_start_over(path.parent.parent)) from None
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError):
        raise BadInput(f"{path} is damaged.", hint=_start_over(path.parent.parent)) from None
    if not isinstance(data, dict):
        raise BadInput(f"{path} is not a checkpoint of hetopt.", hint=_start_over(path.parent.parent))
    return data


def _start_over(folder: Path) -> str:
    return f"name an older checkpoint in {folder / 'LATEST'}, or remove {folder} to start over"
