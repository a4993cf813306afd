"""Step times of clusters whose local batch sizes are given, by the models that plans are made with."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hetopt.core.errors import BadInput
from hetopt.core.profile import Profile
from hetopt.core.run_spec import Compression
from hetopt.core.step_samples import Configuration, Node
from hetopt.optimizer.convergence.steps_law import Z90
from hetopt.optimizer.fit import FittedModel, fit
from hetopt.optimizer.market.catalog import Catalog, Offer, Price
from hetopt.optimizer.plan import Evidence
from hetopt.optimizer.search.cluster_rows import ClusterRows, Columns, given_table
from hetopt.optimizer.search.exchange_menu import exchange_of
from hetopt.optimizer.search.forecast import steps_of
from hetopt.optimizer.search.search_space import (
    MachineOption,
    SearchSpace,
    machine_options,
)
from hetopt.optimizer.step_time.model import TIERS, StepTime, learned_shape, sampled_machines
from hetopt.optimizer.step_time.posterior import Shape
from hetopt.optimizer.step_time.tiers import SampledMachines
from hetopt.optimizer.step_time.transfer import ReferenceHost, reference_host

NO_MATTER = Price(usd_per_hour=1.0, market="on-demand", region="any", date=datetime.date.min, source="none")
"""Price of a machine whose steps are predicted, as steps do not depend on it."""


@dataclass(frozen=True, kw_only=True)
class AskedSteps:
    """Predictor of a profiled job's step times on given machines and local batch sizes, as plans predict them.

    Attributes:
        model: fits of the profile.
        catalog: holds the machine types that configurations may name.
        host: the profiled machine as the catalogue rates it.
        shape: parameters that steps share on all machines, such as straggling and overlap.
        sampled: machines as step samples predict them; None: there are no samples.
    """

    model: FittedModel
    catalog: Catalog
    host: ReferenceHost
    shape: Shape
    sampled: SampledMachines | None
    _machines: dict[Node, tuple[tuple[MachineOption, ...], Mapping[str, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, profile: Profile, catalog: Catalog) -> AskedSteps:
        """Return the predictor of a profiled job's step times on a catalogue's machines; fits the models once.

        Raises:
            BadInput: step samples in the profile are of different jobs, or name a compressor or sync that cannot be
                predicted.
        """
        model = fit(profile)
        sampled = sampled_machines(profile, catalog.instance_types)
        return cls(
            model=model,
            catalog=catalog,
            host=reference_host(model, catalog.instance_types.values()),
            shape=learned_shape(model, sampled),
            sampled=sampled,
        )

    def answers(self, asked: Configuration) -> bool:
        """Return whether `step` can predict ``asked``: catalogue types, a worker per GPU, profiled precision, no sync.

        A machine without a GPU has one worker; a described job may leave some of a machine's GPUs idle.
        """
        types, described = self.catalog.instance_types, self.model.profile.is_counted
        profiled = self.model.reference.device.precision
        return (
            asked.precision in (None, profiled)
            and asked.sync is None
            and all(
                node.type in types
                and (
                    node.workers == max(1, types[node.type].cuda_devices)
                    or (described and node.workers < types[node.type].cuda_devices)
                )
                for node in asked.nodes
            )
        )

    def step(self, asked: Configuration) -> StepTime:
        """Return the predicted step time of a configuration, seconds, with the ends of its 90 % interval.

        The evidence is that of the least known machine. A compressor is taken by its usual collective.

        Args:
            asked: a configuration that `answers` accepts.

        Raises:
            BadInput: a type's speed cannot be predicted, or the profile does not say how long the compressor takes.
        """
        counts = Counter(asked.nodes)
        options = [self._machine(node) for node in counts]
        wanted = asked.compression
        compression = Compression() if wanted is None else Compression(name=wanted.name, ratio=wanted.ratio)
        space = SearchSpace(
            options=tuple(options),
            batch_sizes=(sum(asked.batch_sizes),),
            exchanges=(exchange_of(self.model, compression, asked.workers),),
            max_machines=len(asked.nodes),
            max_workers=asked.workers,
            offered=len(options),
            usable=len(options),
        )
        rows = ClusterRows(
            option=np.arange(len(options), dtype=np.intp)[None],
            count=np.array([list(counts.values())], dtype=np.intp),
            batch=np.zeros(1, dtype=np.intp),
            exchange=np.zeros(1, dtype=np.intp),
        )
        by_node = dict(zip(counts, options, strict=True))
        workers = (option for node in asked.nodes for option in node.workers * [by_node[node]])
        slowest = max(
            option.worker.time.time_s(batch) for option, batch in zip(workers, asked.batch_sizes, strict=True)
        )
        columns = steps_of(given_table(Columns(space), rows, np.array([slowest])), self.shape)
        step_s, reach = float(columns.time_s[0]), float(np.exp(Z90 * columns.log_sd[0]))
        worst: Evidence = max((option.worker.evidence for option in options), key=TIERS.index)
        return StepTime(
            step_time_s=step_s, step_time_low_s=step_s / reach, step_time_high_s=step_s * reach, evidence=worst
        )

    def _machine(self, node: Node) -> MachineOption:
        """Return a node's machine option, cached; where it has more GPUs than workers, the rest do not count.

        Raises:
            BadInput: the speed of the type cannot be predicted.
        """
        if node not in self._machines:
            instance = self.catalog.instance_types[node.type]
            if instance.accelerator is not None and node.workers < instance.cuda_devices:
                instance = replace(instance, accelerator=replace(instance.accelerator, count=node.workers))
            offer = Offer(instance_type=instance, price=NO_MATTER, band=None)
            self._machines[node] = machine_options(self.model, [offer], self.host, self.shape, self.sampled)
        options, excluded = self._machines[node]
        if not options:
            why = next(iter(excluded))
            raise BadInput(
                f"{node.type} cannot be planned with: {why}.", hint="measure a step on it, or name another type"
            )
        return options[0]
