"""Options of the library's verbs, a record each; those of places where a plan runs are in `hetopt.backends.options`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from hetopt.backends.options import Ec2, Local, Rehearsal, Sky, Slurm, Ssh, ids, pairs, path
from hetopt.core.errors import BadInput
from hetopt.core.grammar import COUNT, DURATION, FRACTION, NUMBER, SIZE, WHOLE, Unit, arguments, fields, quantity
from hetopt.core.option import Option, Options, duration_s, names, options, positive, within, zone

if TYPE_CHECKING:
    import optuna

    from hetopt.core.memory import Precision, Sharding
    from hetopt.core.run_spec import Compression, Injection, Partition, Settings, Stream, Synchronization
    from hetopt.optimizer.model_counts import Method, Optimizer

    Policy = tuple[str, Settings]

__all__ = [
    "Changes",
    "Described",
    "Ec2",
    "Gpus",
    "Listed",
    "Local",
    "Measurement",
    "Rehearsal",
    "Search",
    "Sky",
    "Slurm",
    "Sought",
    "Ssh",
]

MOST_STEPS = 10**12
"""Most steps of one training; at 20 microseconds each, the shortest that a step takes, they are most of a year."""
MOST_EPOCHS = 10**9
LARGEST_SEED = 2**63 - 1
"""Largest seed: every generator of random numbers and every file takes it."""


def read_by(parser: str) -> Callable[[Any, str], Any]:
    """Return an option reader that parses texts by a parser, imported when first needed, and leaves other values as is.

    Args:
        parser: function of a text, as ``module:function``; its errors go through.
    """

    def read(given: Any, name: str) -> Any:
        module, _, function = parser.partition(":")
        return getattr(import_module(module), function)(given.strip()) if isinstance(given, str) else given

    return read


def compressors(given: Sequence[str] | str, name: str) -> tuple[str, ...]:
    """Return the registry's names of the compressors that an option names; empty for ``auto`` alone, which means all.

    Args:
        given: names as a sequence, or as a text with commas; ``none`` and ``dense`` mean ``identity``.
        name: of the option, for errors.

    Raises:
        BadInput: there is no such compressor, or ``auto`` stands beside others.
    """
    from hetopt.core.comm.compression_text import compressor

    each = [given] if isinstance(given, str) else given
    asked = tuple(part for item in each for part in names(item, name))
    return () if asked == ("auto",) else tuple(dict.fromkeys(compressor(part) for part in asked))


def share(given: float | str | None, name: str) -> float | None:
    """Return a fraction between 0 and 1 from ``0.01`` or ``"1%"``; None where nothing was given.

    Args:
        given: the option's value.
        name: of the option, for errors.

    Raises:
        BadInput: the value is no number, or not above 0 and below 1.
    """
    return None if given is None else ratios(given, name)[0]


def ratios(given: Sequence[float | str] | float | str, name: str) -> tuple[float, ...]:
    """Return fractions of a gradient, each above 0 and below 1, from ``0.01``, ``"1%"`` or ``"100x"`` (0.01).

    Args:
        given: one value or a sequence of them.
        name: of the option, for errors.

    Raises:
        BadInput: a value is no number, or not above 0 and below 1.
    """
    each = [given] if isinstance(given, int | float | str) else given
    parts = [quantity(part, FRACTION, f"`{name}`") for item in each for part in names(str(item), name)]
    for part in parts:
        if not 0 < part < 1:
            raise BadInput(f"`{name}` must be above 0 and below 1, got {part:g}.", hint=f"for example `{name}=0.01`")
    return tuple(dict.fromkeys(parts))


def time_weight(given: float | str, name: str) -> float:
    """Return the weight of time against cost, 0 to 1: of ``time=2,cost=1`` it is 2/3; a number is returned as it is.

    Args:
        given: the option's value.
        name: of the option, for errors.

    Raises:
        BadInput: a text is not ``time=W,cost=W``, a weight is negative or both are 0, or a number is not from 0 to 1.
    """
    if not isinstance(given, str):
        return float(within(given, name, 0.0, 1.0, example="0.67"))
    parts = fields(arguments(given, f"`{name}`"), {"time": "time", "cost": "cost"})
    weights = {part: quantity(value, NUMBER, f"`{name}`: {part}") for part, value in parts.items()}
    if len(weights) != 2 or min(weights.values()) < 0 or not sum(weights.values()):
        raise BadInput(
            f"`{name}` must be time=W,cost=W with numbers of 0 or more, one of them above 0, got {given!r}.",
            hint=f"for example `{name}=time=2,cost=1`",
        )
    return weights["time"] / sum(weights.values())


def study(given: Path | str | optuna.Study, name: str) -> Path | optuna.Study:
    """Return an Optuna study as it is, or the path of its journal file after checking that it can be used.

    Args:
        given: a study, or the file of its journal, which need not exist.
        name: of the option, for errors.

    Raises:
        BadInput: the file is a folder or in no folder, cannot be read, or is no journal of Optuna.
    """
    from hetopt.core.paths import opened_file

    if not isinstance(given, Path | str):
        return given
    file, hint = Path(given), f"name another file as `{name}`, one that it made or that is not there yet"
    if file.is_dir() or not file.parent.is_dir():
        raise BadInput(f"{file} cannot be the journal of a search.", hint=f"name a file in a folder as `{name}`")
    if file.exists():
        with opened_file(file, hint=hint) as stream:
            first = stream.readline(100_000)
        # Optuna's journal is JSON Lines, each with the code of what was done.
        if first and not (first.startswith(b"{") and b'"op_code"' in first):
            raise BadInput(f"{file} is not the journal of a search.", hint=hint)
    return file


def quotas(given: Sequence[str] | str, name: str) -> tuple[str, ...]:
    """Return vCPU quotas such as ``g=8`` as they were written, once they are known to parse.

    Args:
        given: the option's texts, ``FAMILY=VCPUS``, or one of them.
        name: name of the option; not used.

    Raises:
        BadInput: a text names no family of machines, or has no number of vCPUs.
    """
    from hetopt.optimizer.market.quota import read_quotas

    read_quotas(ids(given, name))
    return ids(given, name)


def prices(given: Mapping[str, float | str] | Sequence[str] | str, name: str) -> dict[str, float]:
    """Return USD an hour by instance type, from a mapping or from texts ``TYPE=USD``.

    Args:
        given: the option's value.
        name: of the option, for errors.

    Raises:
        BadInput: a text is not ``TYPE=USD``, or a price is not above 0.
    """
    if not isinstance(given, Mapping):
        read = pairs(given, name, "TYPE=USD", "p4d.24xlarge=9.5")
        given = {machine: ",".join(amount) for machine, amount in read.items()}  # a comma is no decimal point
    return {machine: positive(usd, name, unit="USD an hour") for machine, usd in given.items()}


def region(given: str, name: str) -> str:
    """Return a region's name as given, with 'all' replaced by 'any', which means every region; nothing is checked.

    Args:
        given: the option's value.
        name: of the option; not used.
    """
    return "any" if given == "all" else given


at_least_one = partial(within, least=1, most=10_000_000, example="128")
SAMPLES_OR_AUTO = replace(WHOLE, what="a number of samples, auto or adaptive")


def batch_size(given: Any, name: str) -> int | str:
    """Return a batch size in samples, from 1 to 10 million, or 'auto' or 'adaptive'.

    Args:
        given: the option's value, a number or its text.
        name: of the option, for errors.

    Raises:
        BadInput: the value is neither a whole number in that range nor 'auto' or 'adaptive'.
    """
    number: int | str = given if given in ("auto", "adaptive") else at_least_one(given, name, written=SAMPLES_OR_AUTO)
    return number


epochs = partial(within, least=1e-9, most=MOST_EPOCHS, example="5", written=replace(COUNT, example="5, 0.5 or 10k"))


@options
class Changes(Options):
    """The changes that a launch makes to its plan. Default: as it was planned."""

    script: Annotated[
        Sequence[str],
        Option(help="A training script and its arguments. Default: the one that was profiled.", read=ids),
    ] = ()
    batch_policy: Annotated[
        Policy | None,
        Option(
            help="How the batch is shared: uniform, static, proportional, dynamic, omnilearn, allocation, model, "
            "critical, whose batch follows the gradient noise, or rate with `stream`; with settings as in "
            "'allocation(micro=4)'. Default: the plan's.",
            names=("hetopt.core.run_spec:BATCH_POLICIES",),
            read=read_by("hetopt.core.run_rules:parse_batch_policy"),
        ),
    ] = None
    compression: Annotated[
        Compression | str | None,
        Option(
            help="What is sent of gradients: 'auto', which decides while training goes on, bf16, dense, or "
            "'NAME(RATIO, key=value)' such as 'topk(0.01)', 'dgc(1000x, momentum=0.9)' or 'powersgd(rank=2)'; "
            "topk:0.01 needs no quotes. Default: the plan's.",
            names=("auto", "dense", "hetopt.core.comm.composition:METHODS"),
            read=read_by("hetopt.core.comm.compression_text:parse_wish"),
        ),
    ] = None
    ratio_policy: Annotated[
        Policy | None,
        Option(
            help="Who decides how much is sent: fixed, warm_up, accordion, gravac, threshold, scan or auto; with "
            "settings as in 'gravac(window=50, eps=0.7)'. Default: the plan's, or fixed with a named compression.",
            names=("hetopt.core.run_rules:CONTROLLERS",),
            read=read_by("hetopt.core.run_rules:parse_ratio_policy"),
        ),
    ] = None
    collective: Annotated[
        str | None,
        Option(
            help="How payloads meet: 'auto', the cheapest on the network as it is, or all_reduce, all_gather, ar_topk, "
            "ar_topk_star, ar_topk_var. Default: the plan's.",
            names=("auto", "hetopt.core.comm.composition:COLLECTIVES"),
        ),
    ] = None
    sync: Annotated[
        Synchronization | None,
        Option(
            help="When workers synchronize: bsp (in every step), 'selsync(0.3)', 'selsync(auto, share=0.2)', "
            "'local-sgd(8)' or 'fedavg(1, 0.25)'. With compression auto, local-sgd is done where it takes less time "
            "to the target than sums of gradients. Default: the plan's.",
            names=("hetopt.core.run_spec:SyncName",),
            read=read_by("hetopt.core.run_spec:parse_sync"),
        ),
    ] = None
    partition: Annotated[
        Partition | None,
        Option(
            help="Which samples a worker sees: global, shards, seldp or 'labels(1)'. Default: the plan's.",
            names=("hetopt.core.run_spec:PartitionName",),
            read=read_by("hetopt.core.run_spec:parse_partition"),
        ),
    ] = None
    inject: Annotated[
        Injection | None,
        Option(
            help="Data injection: which share of the workers sends which share of its samples, such as 0.25,0.25.",
            flag="data-injection",
            read=read_by("hetopt.core.run_spec:parse_injection"),
        ),
    ] = None
    stream: Annotated[
        Stream | None,
        Option(
            help="Local, rehearsal: train on samples as they arrive, with batches that follow the rates: "
            "'replay(40/80)' or 'replay(40/80, buffer=truncation)'.",
            read=read_by("hetopt.api.changes:parse_stream"),
        ),
    ] = None
    shard: Annotated[
        Sharding | None,
        Option(
            help="What devices of a machine share of the model: none, grads (gradients and optimizer state), full "
            "(weights as well) or auto (full where one device cannot hold it). Default: the plan's, or the job's.",
            names=("hetopt.core.memory:Sharding",),
        ),
    ] = None
    steps: Annotated[
        int | None,
        Option(
            help="Stop after so many steps.",
            read=partial(within, least=1, most=MOST_STEPS, example="500"),
        ),
    ] = None


REGION = "us-east-1"
MOST_MEASURED = 64
"""Most workers of a measurement."""

CATALOG = Option(help="Folder of another catalogue, in the format of the bundled one.", metavar="DIR", read=path)


CLOUD = Option(
    help="Who rents the machines out: aws, do, hyperstack, lambda, nebius, oci, scaleway, verda, one that was "
    "imported, or any. What is not of aws hetopt plans for, and does not rent."
)


@options
class Rentable(Options):
    """The filters on machines that may be rented."""

    market: Annotated[
        str,
        Option(
            help="How to rent: spot, on-demand or any.", names=("hetopt.optimizer.market.catalog_filter:AnyMarket",)
        ),
    ] = "any"
    region: Annotated[str, Option(help="Region of the cloud.", short="r")] = REGION
    cloud: Annotated[str, CLOUD] = "aws"
    types: Annotated[
        Sequence[str],
        Option(help="Only these instance types, with commas between; patterns in quotes: 'g5.*,c7a.*'.", read=names),
    ] = ()
    exclude: Annotated[Sequence[str], Option(help="Leave these instance types or patterns out.", read=names)] = ()
    gpus: Annotated[
        Sequence[str],
        Option(
            help="Only machines with these GPUs: A10G, L4:4 (so many each), L4:4+ (or more), any, none.", read=names
        ),
    ] = ()
    architecture: Annotated[
        str | None,
        Option(help="x86_64 or arm64.", flag="arch", names=("hetopt.optimizer.market.instance_type:Architecture",)),
    ] = None
    max_hourly_usd: Annotated[
        float | None,
        Option(
            help="Most USD an hour, of all machines of a plan together.",
            flag="max-hourly",
            read=partial(positive, unit="USD an hour"),
        ),
    ] = None
    catalog: Annotated[Path | None, CATALOG] = None


MOST_WORKERS = 4096
"""Most workers of a plan. The models were held against 16; docs/models.md says what they leave out of larger clusters.
"""
LARGEST_DISK_GB = 16_384
"""Largest gp3 volume in GB, by the EBS user guide of 2025; larger ones are new and not in every region."""
workers = partial(within, least=1, most=MOST_WORKERS, example="16")
GIGABYTES = Unit(what="a size in GB", example="100 or 100GB", scales={"": 1.0, "gb": 1.0, "tb": 1000.0})


@options
class Sought(Rentable):
    """The requirements on a cluster, whatever is known of the job."""

    market: Annotated[
        str,
        Option(
            help="spot, on-demand or any (default); own: only machines of `inventory`.",
            names=("hetopt.optimizer.market.catalog_filter:AnyMarket", "own"),
        ),
    ] = "any"
    region: Annotated[
        str,
        Option(help="Region of the cloud; any: the best of all, with the data set's transfer.", short="r", read=region),
    ] = REGION
    budget_usd: Annotated[
        float | None,
        Option(
            help="Total USD, a hard cap on the whole bill.",
            flag="budget",
            metavar="USD",
            read=partial(positive, unit="USD"),
        ),
    ] = None
    deadline: Annotated[
        float | None, Option(help="Longest total time, such as 6h.", metavar="TIME", read=duration_s)
    ] = None
    objective: Annotated[
        str,
        Option(
            help="fastest, cheapest or balanced. Within the limits; balanced stops paying where 10 % less time costs "
            "over 20 % more.",
            names=("hetopt.optimizer.plan:Objective",),
        ),
    ] = "balanced"
    quotas: Annotated[
        Sequence[str],
        Option(
            help="vCPUs that may run at once: g=8, spot:standard=32. The word default: what a new account has; none: "
            "no limit. May be repeated. Left out: what `hetopt doctor` read of your account, or no limit.",
            flag="quota",
            metavar="FAMILY=VCPUS",
            repeats=True,
            read=quotas,
        ),
    ] = ()
    prices: Annotated[
        Mapping[str, float],
        Option(
            help="What you pay for a machine on demand, reserved or by contract: p4d.24xlarge=9.5. May be repeated.",
            flag="price",
            metavar="TYPE=USD",
            repeats=True,
            read=prices,
        ),
    ] = field(default_factory=dict)
    inventory: Annotated[
        Path | None,
        Option(
            help="Machines of your own, see `hetopt hosts check`: the better of a plan for them and one that rents.",
            metavar="FILE",
            read=path,
        ),
    ] = None
    max_workers: Annotated[int, Option(help="Most workers in a cluster, up to 4,096.", read=workers)] = 64
    accept_risk: Annotated[
        bool, Option(help="Take a plan that keeps the limits with less than the probability asked for (0.9).")
    ] = False


@options
class Search(Sought):
    """The options of a search for the best cluster of a profiled job."""

    target: Annotated[
        float | str | None, Option(help="METRIC=VALUE. Default: the task's own target (or its usual epochs).")
    ] = None
    epochs: Annotated[
        float | None,
        Option(help="Train this many epochs instead of to a target.", read=epochs),
    ] = None
    steps: Annotated[
        int | None,
        Option(
            help="Train this many steps instead of to a target.",
            read=partial(within, least=1, most=MOST_STEPS, example="10000"),
        ),
    ] = None
    time_weight: Annotated[
        float | None,
        Option(
            help="Weigh time and cost instead: time=2,cost=1.",
            flag="weights",
            metavar="time=W,cost=W",
            read=time_weight,
        ),
    ] = None
    confidence: Annotated[
        float | None,
        Option(
            help="Keep the limits with this probability, by simulated runs: 0.9.",
            read=partial(within, least=0.0001, most=0.9999, example="0.9", written=FRACTION),
        ),
    ] = None
    zone: Annotated[str | None, Option(help="Availability zone of all machines, such as us-east-1a.", read=zone)] = None
    max_machines: Annotated[int | None, Option(help="Most machines in a cluster.", read=workers)] = None
    mixed_types: Annotated[
        int,
        Option(help="Most instance types in a cluster: 1, 2 or 3.", read=partial(within, least=1, most=3, example="2")),
    ] = 3
    data: Annotated[
        float | None,
        Option(
            help="Of the data set, which each machine reads first: 150GB.",
            metavar="SIZE",
            read=partial(within, least=0.0, most=LARGEST_DISK_GB * 1e9, example="150GB", written=SIZE),
        ),
    ] = None
    data_region: Annotated[str | None, Option(help="Where the data set is. Default: where the machines are.")] = None
    disk_gb: Annotated[
        int | None,
        Option(
            help="Of each machine. Default: what it needs.",
            flag="disk",
            metavar="GB",
            read=partial(within, least=1, most=LARGEST_DISK_GB, example="100", written=GIGABYTES),
        ),
    ] = None
    provisioning: Annotated[
        float | None,
        Option(help="From the request to the first step. Default: by machine.", metavar="TIME", read=duration_s),
    ] = None
    batch_size: Annotated[
        int | str | None,
        Option(
            help="Global batch size, samples; auto: the best at equal progress, with the steps that it needs; "
            "adaptive: begins where that surely pays, then follows the gradient noise. Default: the job's own, but to "
            "a target.",
            names=("auto", "adaptive"),
            read=batch_size,
        ),
    ] = None
    learning_rate_rule: Annotated[
        str | None,
        Option(
            help="How the learning rate follows the batch size: none, linear or sqrt. Default: the task's.",
            flag="lr-rule",
            names=("hetopt.optimizer.plan:ScalingRule",),
        ),
    ] = None
    sync: Annotated[
        Synchronization | None,
        Option(
            help="When the workers of the plan synchronize, as of `hetopt launch`: 'selsync(auto)', 'local-sgd(8)', "
            "bsp, ... Default: the best of bsp and what the profile measured (`hetopt profile --sync`).",
            names=("hetopt.core.run_spec:SyncName",),
            read=read_by("hetopt.core.run_spec:parse_sync"),
        ),
    ] = None
    precision: Annotated[
        str,
        Option(
            help="What workers compute in: fp32, tf32, bf16, fp16, or auto: the best that the profile has steps of.",
            names=("auto", "hetopt.core.memory:Precision"),
        ),
    ] = "auto"
    compression: Annotated[
        Sequence[str],
        Option(
            help="Only these ways to send gradients: topk, powersgd, none, ... May be repeated. Default: all.",
            metavar="NAME",
            repeats=True,
            read=compressors,
        ),
    ] = ()
    ratio: Annotated[
        Sequence[float],
        Option(
            help="Part of the gradient that those send which send a part: 0.01, 1% or 100x. May be repeated.",
            metavar="R",
            repeats=True,
            read=ratios,
        ),
    ] = ()
    trials: Annotated[
        int,
        Option(
            help="Add so many trials of Optuna's NSGA-II to those that exact search has weighed.",
            read=partial(within, least=0, most=1_000_000, example="400"),
        ),
    ] = 0
    observed: Annotated[
        Path | str | None,
        Option(
            help="What was seen of spot pools: hours and losses. Default: what your launches have seen; none: nothing.",
            metavar="FILE",
        ),
    ] = None
    seed: Annotated[
        int,
        Option(
            help="Seed of the search: the same seed gives the same plan.",
            read=partial(within, least=0, most=LARGEST_SEED, example="1"),
        ),
    ] = 0
    study: Annotated[
        Any,
        Option(
            help="Keep what was weighed as trials of an Optuna study in this file; optuna-dashboard FILE shows them.",
            metavar="FILE",
            read=study,
        ),
    ] = None


@options
class Described(Sought):
    """The facts of a job that was described, not measured, and the requirements on its cluster."""

    params: Annotated[
        float | None,
        Option(
            help="Parameters of a transformer, such as 110M.", metavar="N", read=partial(positive, unit="parameters")
        ),
    ] = None
    config: Annotated[Path | None, Option(help="A Hugging Face config.json instead.", metavar="FILE", read=path)] = None
    flops: Annotated[
        float | None,
        Option(
            help="FLOPs of the whole training, instead of `samples`.", metavar="N", read=partial(positive, unit="FLOPs")
        ),
    ] = None
    samples: Annotated[
        float | None,
        Option(help="Samples trained on, epochs included.", metavar="N", read=partial(positive, unit="samples")),
    ] = None
    tokens: Annotated[int | None, Option(help="Tokens of a sample.", metavar="N", read=at_least_one)] = None
    batch_size: Annotated[
        int | None, Option(help="Samples of a step. Default: 256.", metavar="N", read=at_least_one)
    ] = None
    precision: Annotated[
        Literal["auto", "bf16", "fp16", "tf32", "fp32"],
        Option(
            help="auto (bf16, fp16 where a GPU that is named has no units for it), bf16, fp16, tf32 or fp32.",
            names=("auto", "bf16", "fp16", "tf32", "fp32"),
        ),
    ] = "auto"
    took: Annotated[
        float | None,
        Option(help="What this training took, such as 3d, on the GPUs of `on`.", metavar="TIME", read=duration_s),
    ] = None
    on: Annotated[str | None, Option(help="Where it took that: '1 x A10G', '8 x H100'.", metavar="GPUS")] = None
    method: Annotated[
        Method,
        Option(
            help="full; lora: adapters beside frozen weights; qlora: beside weights in 4 bits.",
            names=("hetopt.optimizer.model_counts:Method",),
        ),
    ] = "full"
    trainable: Annotated[
        float | str | None,
        Option(help="Share of the parameters that adapters train. Default: 1%.", metavar="SHARE", read=share),
    ] = None
    optimizer: Annotated[
        Optimizer,
        Option(help="What its state takes of memory.", names=("hetopt.optimizer.model_counts:Optimizer",)),
    ] = "adamw"


@options
class Measurement(Options):
    """The options of measuring a job."""

    epoch_samples: Annotated[
        int | None,
        Option(
            help="Samples of a script's epoch, if its loader does not tell.",
            read=partial(within, least=1, most=MOST_STEPS, example="50000"),
        ),
    ] = None
    data: Annotated[Path | None, Option(help="Folder of the task's data, for tasks that read files.", read=path)] = None
    workers: Annotated[
        int | None,
        Option(
            help="Worker processes to measure together. Default: the GPUs, else two or one a processor.",
            read=partial(within, least=1, most=MOST_MEASURED, example="2"),
        ),
    ] = None
    time_budget_s: Annotated[
        float,
        Option(
            help="Time that measuring may take, about; starting up comes on top.",
            flag="time-budget",
            read=partial(within, least=5.0, most=86_400.0, example="40s", written=DURATION),
        ),
    ] = 40.0
    seed: Annotated[
        int,
        Option(help="Seed of weights and sample order.", read=partial(within, least=0, most=LARGEST_SEED, example="1")),
    ] = 0
    from_checkpoint: Annotated[
        Path | None,
        Option(
            help="Folder of a task's run, or of a checkpoint in it: gradient noise and what compressors keep are "
            "measured from there on, not from new weights. Nothing is trained to the target.",
            flag="from",
            metavar="CHECKPOINT",
            read=path,
        ),
    ] = None
    machine_type: Annotated[
        str, Option(help="What this machine is: an instance type of the catalogue.", flag="type")
    ] = "local"
    probe_budget_usd: Annotated[
        float | None,
        Option(
            help="USD that exploring may cost, at the prices of the machines it stands for: whole steps of more "
            "workers are measured as long as that is worth its price.",
            flag="probe-budget",
            read=partial(positive, unit="USD"),
        ),
    ] = None
    explore_on: Annotated[
        str,
        Option(
            help="Where to explore: local, ssh (hosts of your own) or ec2, which rents.",
            flag="on",
            names=("hetopt.api.backends:BACKENDS",),
            read=lambda given, name: str(given).strip(),
        ),
    ] = "local"
    inventory: Annotated[
        Path | None, Option(help="ssh: the file of hosts to explore, see `hetopt hosts check`.", read=path)
    ] = None
    types: Annotated[
        Sequence[str], Option(help="ec2: the machine types to explore, with commas between.", read=names)
    ] = ()
    region: Annotated[str, Option(help="ec2: where to rent.")] = REGION
    ec2_data: Annotated[
        str | None, Option(help="ec2: where the task's data is for rented machines: s3://BUCKET/PREFIX.")
    ] = None
    sync: Annotated[
        Sequence[str],
        Option(
            help="Also measure how many steps the target takes when workers average parameters now and then: "
            "'local-sgd(8, stretch=1.5)', 'selsync(auto)'. May be repeated.",
            names=("hetopt.core.run_spec:SyncName",),
            repeats=True,
            read=ids,
        ),
    ] = ()
    precision: Annotated[
        Literal["auto"] | Precision | None,
        Option(
            help="Of a task, also measure tf32, bf16 or fp16 beside fp32, or 'auto': all that the machine has. "
            "Default: auto on GPUs, fp32 alone on CPUs.",
            names=("auto", "hetopt.core.memory:Precision"),
        ),
    ] = None


@options
class Listed(Rentable):
    """The filters and the order of a list of the catalogue's instance types."""

    sort: Annotated[
        str,
        Option(
            help="Smallest first, the unknown last: price, price-per-vcpu, price-per-gpu, price-per-coremark, "
            "spot-saving, interruption, gpus, vcpus, memory, network, coremark, name.",
            metavar="KEY",
            names=(
                *("price", "price-per-vcpu", "price-per-gpu", "price-per-coremark", "spot-saving", "interruption"),
                *("gpus", "vcpus", "memory", "network", "coremark", "name"),
            ),
        ),
    ] = "price"
    reverse: Annotated[bool, Option(help="Largest first.")] = False


@options
class Gpus(Options):
    """The filters and the order of a list of GPUs that can be rented."""

    region: Annotated[str, Option(help="Region of the cloud; any: all.", short="r", read=region)] = REGION
    cloud: Annotated[str, CLOUD] = "aws"
    market: Annotated[
        str,
        Option(
            help="Where the cheapest machine is sought: spot, on-demand or any.",
            names=("hetopt.optimizer.market.catalog_filter:AnyMarket",),
        ),
    ] = "any"
    sort: Annotated[
        str,
        Option(
            help="Smallest first: price (of the machine), price-per-gpu, rate-per-usd (16 bits), memory, fp32, tf32, "
            "bf16, fp16, bandwidth, name.",
            metavar="KEY",
            names=("hetopt.optimizer.market.catalog_filter:GpuSort",),
        ),
    ] = "price"
    reverse: Annotated[bool, Option(help="Largest first.")] = False
    catalog: Annotated[Path | None, CATALOG] = None


RECORDS = (Changes, Search, Described, Measurement, Listed, Gpus, Local, Rehearsal, Ssh, Slurm, Sky, Ec2)
"""All option records: command lines, signatures and docs are derived from them."""
