"""The batches that a script was given, and which of them a loss is of: its part weighs the gradient.

Most scripts compute a batch before they ask for the next. Some ask early (to hide the reading, or to know which batch
is the last one), so the newest batch need not be the loss's. Its tensors tell: what backward needs of a batch (its
labels, its inputs) is held by the loss's graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from hetopt.core.errors import BadInput
from hetopt.trainer.loss_reading import Beside
from hetopt.trainer.session.batches import Part
from hetopt.trainer.session.graph import operators

_MOST_NODES = 5_000
_MOST_KEPT = 64


@dataclass(frozen=True, kw_only=True)
class Handed:
    """A batch as a script was given it.

    Attributes:
        part: what it is of the whole batch.
        source: number of the loader.
        origins: data sets and samplers of the loader.
        singles: tensors of one sample each, of a batch that lists them, and the sample's place.
        storages: where its tensors lie; held weakly, so that no other storage gets the place of one that is gone.
    """

    part: Part
    source: int = 0
    storages: frozenset[StorageWeakRef] = frozenset()
    origins: tuple[object, ...] = ()
    singles: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)


@dataclass
class _Group:
    """Batches of several loaders that were given together, in most scripts one."""

    batches: list[Handed]
    used: bool = False


class HandedOut:
    """Batches since the one that was computed last.

    Args:
        weigh: whether a part may be less than its batch: a worker that is alone need not tell batches apart.

    Attributes:
        beside: by their rows, the newest batches of other loaders than the last loss's.
    """

    def __init__(self, *, weigh: bool = True) -> None:
        self._weigh = weigh
        self._groups: list[_Group] = []
        self._newest: dict[int, Part] = {}  # of each loader
        self.beside: Mapping[int, Beside] = {}
        self._is_ahead = False  # whether the script asks for batches before it needs them

    @property
    def newest(self) -> Part | None:
        """Of the last batch that the script was given."""
        return self._groups[-1].batches[-1].part if self._groups else None

    @property
    def present(self) -> Part | None:
        """Of the batch that the script is at, as far as one can tell without a loss."""
        used = [group for group in self._groups if group.used]
        return used[-1].batches[-1].part if used and self._is_ahead else self.newest

    @property
    def are_computed(self) -> bool:
        """Whether all had a backward pass."""
        return all(group.used for group in self._groups)

    def give(self, handed: Handed) -> None:
        """Remember a batch that was handed out, in the group of those that no backward pass used yet."""
        self._newest[handed.source] = handed.part
        last = self._groups[-1] if self._groups else None
        if last is not None and not last.used and all(one.source != handed.source for one in last.batches):
            last.batches.append(handed)
        else:
            self._groups.append(_Group([handed]))
        del self._groups[:-_MOST_KEPT]

    def of(self, loss: Tensor) -> Part | None:
        """Of the batch that a loss is of; None: none was given.

        Raises:
            BadInput: several may be meant, and they weigh differently.
        """
        if not self._groups:
            return None
        waiting = sum(not group.used for group in self._groups)
        choices = {(one.part.weight, one.part.is_last) for group in self._groups for one in group.batches}
        group = self._groups[-1]
        found = group.batches[-1]
        if self._weigh and (waiting > 1 or len(choices) > 1):
            hits = self._in_graph(loss)
            if hits:
                group, found = hits[0]
                self._is_ahead = self._is_ahead or group is not self._groups[-1]
                if len({one.part.weight for its, one in hits if its is group}) > 1:
                    raise BadInput(
                        "A loss is of batches of two loaders, of which this worker has different proportions.",
                        hint="give the loaders batch sizes that divide alike, or call run.backward for each loss",
                    )
            elif (
                waiting > 1 and len(choices) == 1 and not any(one.storages for at in self._groups for one in at.batches)
            ):
                # The script drew them itself (`run.split`): graphs do not tell, and in their order they weigh alike.
                group = next(one for one in self._groups if not one.used)
                found = group.batches[-1]
                self._is_ahead = True
            elif waiting > 1 or len({one.part.weight for one in group.batches}) > 1:
                raise BadInput(
                    f"The script was given {waiting} batches before this loss, and it cannot be told which is the "
                    "loss's, as backward needs no tensor of any of them.",
                    hint="ask for a batch after the backward pass of the one before",
                )
        group.used = True
        new = {one.source for one in group.batches}
        self.beside = {
            part.rows: Beside(weighs_alike=part.weight == found.part.weight, is_new=source in new)
            for source, part in sorted(self._newest.items(), key=lambda item: item[0] in new)
            if source != found.source and part.rows > 0
        }
        del self._groups[: self._groups.index(group)]
        return found.part

    def of_all(self) -> Part | None:
        """Of all batches since the last that was computed, for gradients that the script computed by itself.

        Raises:
            BadInput: they weigh differently.
        """
        waiting = [group for group in self._groups if not group.used] or self._groups[-1:]
        if len({one.part.weight for group in waiting for one in group.batches}) > 1:
            raise BadInput(
                f"The gradients are of {len(waiting)} batches of which this worker has different proportions.",
                hint="call run.backward(loss) for each of them, in place of loss.backward()",
            )
        for group in self._groups:
            group.used = True
        del self._groups[:-1]
        return self.newest

    def _in_graph(self, loss: Tensor) -> list[tuple[_Group, Handed]]:
        """Batches whose tensors backward needs."""
        owners = {at.cdata: (group, one) for group in self._groups for one in group.batches for at in one.storages}
        several = any(len(group.batches) > 1 for group in self._groups)
        hits: list[tuple[_Group, Handed]] = []
        for tensor in _saved(loss):
            owner = owners.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
            if owner is not None and owner not in hits:
                hits.append(owner)
                if not several:
                    break
        return hits


def storages(batch: Any, rows: int) -> frozenset[StorageWeakRef]:
    """Where the tensors of a batch lie, but for edges of graphs, which are two rows however many samples there are."""
    has_edges = rows == _ENDS and any(one.shape[:1] != (rows,) and one.dim() > 1 for one in _tensors(batch))
    strided = (one for one in _tensors(batch) if one.layout == torch.strided and not (has_edges and _are_edges(one)))
    return frozenset(StorageWeakRef(one.untyped_storage()) for one in strided)  # type: ignore[no-untyped-call]  # torch's gap


_ENDS = 2


def _are_edges(one: Tensor) -> bool:
    return one.dtype == torch.int64 and one.dim() == _ENDS and len(one) == _ENDS


def lengths(batch: Any, rows: int) -> tuple[int, ...]:
    """Of what a batch has other than samples, put one after the other, perhaps as a single row."""
    alone = [one.shape for one in _tensors(batch) if rows not in one.shape[:2]]
    shapes = [shape[1:] if shape[:1] == (1,) else shape for shape in alone]
    return tuple(sorted({shape[0] for shape in shapes if shape and shape[0] > rows}))


def singles(batch: Any, rows: int) -> WeakTensorKeyDictionary:
    """The tensors of one sample each, and its place, of a batch that has lists of them: images, boxes of each.

    Args:
        batch: of the loader.
        rows: samples in it.
    """
    found = WeakTensorKeyDictionary()
    inside = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    for one in (batch, *inside):
        if not isinstance(one, (list, tuple)) or len(one) != rows or len({_kind(its) for its in one}) > 1:
            continue  # several kinds of things are columns (of a graph, or packed), by chance as many as samples
        if any(not isinstance(its, Tensor) or its.shape[:1] != (rows,) for its in one):  # else they are columns
            found.update({its: place for place, several in enumerate(one) for its in _tensors(several)})
    return found


def _kind(one: Any) -> object:
    return (one.dtype, one.dim()) if isinstance(one, Tensor) else type(one)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for one in batch.values():
            yield from _tensors(one)
    elif isinstance(batch, (list, tuple)):
        for one in batch:
            yield from _tensors(one)
    elif hasattr(batch, "__dict__"):
        for one in vars(batch).values():
            if one is not batch and isinstance(one, (Tensor, Mapping, list, tuple)):
                yield from _tensors(one)


_SAVED: dict[str, tuple[str, ...]] = {}
"""Names under which nodes of a graph keep tensors, by the kind of node."""


def _saved(loss: Tensor) -> Iterator[Tensor]:
    """Tensors that backward needs, those next to the loss first."""
    for node in islice(operators(loss.grad_fn), _MOST_NODES):
        kind = node.name()
        if kind not in _SAVED:
            names = (name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors")
            _SAVED[kind] = tuple(names)
        for name in _SAVED[kind]:
            try:
                kept = getattr(node, name)
            except RuntimeError:
                continue  # of a graph that was used already
            for one in kept if isinstance(kept, (tuple, list)) else (kept,):
                if isinstance(one, Tensor):
                    yield one
