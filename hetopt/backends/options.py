"""Options of the places where a plan can run, a record each: ``launch(plan, on=Ec2(zone="us-east-1a"))``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from hetopt.core.errors import BadInput, setting
from hetopt.core.option import Option, Options, duration_s, options, positive, within, zone

if TYPE_CHECKING:
    from hetopt.core.run_spec import RunSpec

MOST_SLOWDOWN = 1e6
"""Largest slowdown factor: a step of a microsecond would take a second."""
MOST_RESTARTS = 10**6
LEAST_JOB_S, MOST_JOB_S = 300.0, 366 * 86_400.0
"""Time limits of jobs of a cluster: workers start and save a checkpoint in the shortest."""
IMAGE_KINDS = ("x86_64-cpu", "arm64-cpu", "x86_64-gpu", "arm64-gpu")
"""Kinds of machines that EC2 rents: architecture and accelerator."""


def slowdowns(given: Sequence[float] | str, name: str) -> tuple[float, ...]:
    """Return a slowdown factor of 1 to 1e6 for each worker, from numbers or a text such as '1, 2 x2'.

    Args:
        given: the option's value.
        name: name of the option, for errors.

    Raises:
        BadInput: there is no factor or a single number, or a factor is out of range.
    """
    from hetopt.core.grammar import numbers
    from hetopt.core.paths import shortened

    if isinstance(given, Real):
        raise BadInput(
            f"`{name}` must be a factor for each worker, got {given}.", hint="for example `slowdowns=[1, 2]`"
        )
    factors = numbers(given, f"`{name}`") if isinstance(given, str) else tuple(given)
    if not (factors and all(isinstance(factor, Real) and 1 <= float(factor) <= MOST_SLOWDOWN for factor in factors)):
        raise BadInput(
            f"`{name}` must be numbers from 1 to {MOST_SLOWDOWN:,.0f}, got "
            f"{shortened(', '.join(map(str, factors)) or 'none')}.",
            hint="for example `slowdowns=[1, 1, 2, 4]`",
        )
    return factors


def pairs(
    given: Mapping[str, Sequence[str] | str] | Sequence[str] | str, name: str, form: str, example: str
) -> dict[str, tuple[str, ...]]:
    """Return an option's values by key, from a mapping or from one or more texts ``KEY=VALUE[,VALUE]``.

    Args:
        given: the option's value.
        name: name of the option, for errors.
        form: form of a text, for errors, such as ``KIND=AMI``.
        example: example of a text, for the hint.

    Raises:
        BadInput: a text is not of that form.
    """
    from hetopt.core.grammar import arguments

    if isinstance(given, Mapping):
        return {key: ids(values, name) for key, values in given.items()}
    pairs: dict[str, tuple[str, ...]] = {}
    for text in [given] if isinstance(given, str) else given:
        written = arguments(text, f"`{name}`")
        if len(written.pairs) != 1:
            raise BadInput(f"`{name}` must be {form}, got {text!r}.", hint=f"for example {setting(name, example)}")
        [(key, first)] = written.pairs.items()
        pairs[key] = (first, *written.values)
    return pairs


def images(given: Mapping[str, str] | Sequence[str], name: str) -> dict[str, str]:
    """Return an AMI id for each kind of machine that is named, from a mapping or texts ``KIND=AMI``.

    Args:
        given: the option's value.
        name: name of the option, for errors.

    Raises:
        BadInput: a text is not ``KIND=AMI``, there is no such kind, or an id does not begin with ``ami-``.
    """
    by_kind = {kind: ",".join(amis) for kind, amis in pairs(given, name, "KIND=AMI", _IMAGE).items()}
    for kind, ami in by_kind.items():
        if kind not in IMAGE_KINDS or not re.fullmatch("ami-[0-9a-z]+", ami):
            raise BadInput(
                f"`{name}` must name an AMI for a kind of {', '.join(IMAGE_KINDS)}, got {kind}={ami}.",
                hint=f"for example {_IMAGE}",
            )
    return by_kind


_IMAGE = "x86_64-gpu=ami-0123456789abcdef0"


def ids(given: Sequence[str] | str, name: str) -> tuple[str, ...]:
    """Return an option's text, or several texts, as a tuple; nothing is checked, and ``name`` is not used."""
    return (given,) if isinstance(given, str) else tuple(given)


def proxy(given: str, name: str) -> str:
    """Return a proxy's address http://HOST:PORT as given, once it is of that form.

    Args:
        given: the option's value.
        name: name of the option, for errors.

    Raises:
        BadInput: it is not, or has a user or password.
    """
    from hetopt.core.paths import PROXY_PATTERN, is_name, shown

    if not is_name(PROXY_PATTERN, given):
        raise BadInput(
            f"`{name}` must be http://HOST:PORT, without a password, got {shown(given)}.",
            hint="what machines are told when they boot is no secret: let the proxy know them by their network",
        )
    return given


def text_of(given: Path | str, name: str) -> str:
    """Return an option's text as it is, or the contents of the text file if a `Path` is given.

    Args:
        given: a text, or a `Path` of a file.
        name: name of the option, for errors.

    Raises:
        BadInput: the file cannot be read or is not UTF-8.
    """
    from hetopt.core.paths import read_text

    return given if isinstance(given, str) else read_text(given, hint=f"name a text file as `{name}`")


def path(given: Path | str, name: str) -> Path:
    """Return an option's path, unchecked; text becomes a `Path`, and ``name`` is not used."""
    return Path(given)


@options
class Machines(Options):
    """Launch options that every backend has."""

    PLACE: ClassVar[str] = ""

    data: Annotated[
        str | None,
        Option(
            help="Folder of the task's data, where it is not where the profile found it. On ec2: s3://BUCKET/PREFIX. A "
            "script is told it where its arguments say {data}.",
            read=lambda given, name: str(given),
            is_fixed=True,
        ),
    ] = None


@options
class OnThisMachine(Machines):
    """Launch options of both backends on this machine: real processes, and rehearsals."""

    restarts: Annotated[
        int | None,
        Option(
            help="How often a worker that is killed is replaced, while the others go on from memory; after that, how "
            "often all start again from a checkpoint. In a rehearsal hosts may die then, and return. Default: the "
            "plan's.",
            flag="max-restarts",
            read=partial(within, least=0, most=MOST_RESTARTS, example="1"),
        ),
    ] = None


@options
class Local(OnThisMachine):
    """Launch options of real processes on this machine: as many as the plan's workers, or one for each slowdown."""

    PLACE: ClassVar[str] = "local"

    slowdowns: Annotated[
        tuple[float, ...] | None,
        Option(
            help="One factor a worker, such as 1,1,2,4: its compute takes so many times as long.",
            flag="slowdown",
            read=slowdowns,
            is_fixed=True,
        ),
    ] = None


@options
class Rehearsal(OnThisMachine):
    """Launch options of a scaled emulation of the plan's cluster on this machine, network included. It needs root."""

    PLACE: ClassVar[str] = "rehearsal"

    hosts: Annotated[
        str | None,
        Option(
            help="These hosts instead of the plan's machines, such as 'speed=1, rate=100mbit x2; speed=0.25, "
            "rate=25mbit'. Also workers=.",
            is_fixed=True,
        ),
    ] = None
    schedule: Annotated[
        str | None,
        Option(
            help="What happens on the way, a change a line: '30s h2 speed=0.25 rate=10mbit', 'step 40 h3 dies'; with "
            "`restarts` also '26s h3 notice', '90s h3 returns', '20s h1 cut' and '25s h1 heals'.",
            read=text_of,
            is_file=True,
            is_fixed=True,
        ),
    ] = None
    stand_in: Annotated[
        bool,
        Option(
            help="Do not train the job, only compute as long and exchange as much: for jobs that this machine cannot "
            "train. Estimates are always rehearsed so.",
            is_fixed=True,
        ),
    ] = False


@options
class OnHosts(Machines):
    """Launch options of both backends on machines of an inventory: ssh hosts, and Slurm nodes."""

    inventory: Annotated[
        Path | None,
        Option(
            help="The file that describes your hosts or nodes, see `hetopt hosts check` and `hetopt hosts slurm`.",
            read=path,
            is_fixed=True,
        ),
    ] = None


@options
class Ssh(OnHosts):
    """Launch options of your own hosts, reached by ssh."""

    PLACE: ClassVar[str] = "ssh"

    hosts: Annotated[str | None, Option(help="Those to run on, such as alice@box1,bob@box2.", is_fixed=True)] = None


def time_limit(given: str | float, name: str) -> float | None:
    """Return a Slurm job's time limit in seconds, from 5 minutes to 366 days, from a text such as '4h' or from seconds.

    Args:
        given: the option's value; it always gives a limit, never None.
        name: name of the option, for errors.

    Raises:
        BadInput: the value is no length of time, a text without a unit, or out of range.
    """
    limit_s: float | None = within(duration_s(given, name), name, LEAST_JOB_S, MOST_JOB_S, example="4h")
    return limit_s


@options
class Slurm(OnHosts):
    """Launch options of nodes of a Slurm cluster, each asked for by a separate job.

    ``time_limit`` is in seconds, of each job; a run goes on in another job after it.
    """

    PLACE: ClassVar[str] = "slurm"

    slurm_partition: Annotated[str | None, Option(help="Partition of the jobs. Default: Slurm's.")] = None
    account: Annotated[str | None, Option(help="Account of the jobs. Default: Slurm's.")] = None
    qos: Annotated[str | None, Option(help="Quality of service of the jobs. Default: Slurm's.")] = None
    constraint: Annotated[str | None, Option(help="Features that the nodes must have.")] = None
    time_limit: Annotated[
        float | None,
        Option(
            help="Time limit of each job, such as 4h: a run saves a checkpoint before, asks for another job, and goes "
            "on. Default: the partition's.",
            read=time_limit,
        ),
    ] = None


@options
class Rented(Machines):
    """Launch options of both backends that rent the plan's machines: on EC2, and by SkyPilot."""

    budget_usd: Annotated[
        float | None,
        Option(
            help="Total USD, a hard cap on the whole bill. Default: the plan's.",
            flag="budget",
            read=partial(positive, unit="USD"),
        ),
    ] = None


@options
class Sky(Rented):
    """Launch options of the plan's machines, rented by SkyPilot on any of its clouds, within a budget."""

    PLACE: ClassVar[str] = "sky"


@options
class Ec2(Rented):
    """Launch options of the plan's machines, rented on EC2 in one zone within a budget that is a hard stop."""

    PLACE: ClassVar[str] = "ec2"

    bucket: Annotated[
        str | None, Option(help="Where code, checkpoints and state go. Default: hetopt-ACCOUNT-REGION.")
    ] = None
    zone: Annotated[str | None, Option(help="Only this availability zone, by name or id.", read=zone)] = None
    instance_profile: Annotated[
        str | None, Option(help="The machines' role. Default: hetopt-node, see `hetopt setup`.")
    ] = None
    images: Annotated[
        Mapping[str, str],
        Option(
            help="KIND=AMI: the image of x86_64-cpu, arm64-cpu, x86_64-gpu or arm64-gpu machines.",
            flag="image",
            repeats=True,
            read=images,
        ),
    ] = field(default_factory=dict)
    subnets: Annotated[
        Sequence[str],
        Option(
            help="A subnet that machines may be in, all of one network. May be repeated. Default: default subnets.",
            flag="subnet",
            repeats=True,
            read=ids,
        ),
    ] = ()
    security_group: Annotated[
        str | None, Option(help="The machines' group by its id, instead of one that is made for the run.")
    ] = None
    public_address: Annotated[
        bool,
        Option(
            help="Whether machines have a public address; without, their subnet needs another way out, such as a NAT "
            "gateway.",
            flag="public-ip",
        ),
    ] = True
    proxy: Annotated[
        str | None,
        Option(help="http://HOST:PORT by which machines reach S3 and packages. Default: by themselves.", read=proxy),
    ] = None
    unprobed: Annotated[bool, Option(help="Rent types although no step was ever measured on them or a relative.")] = (
        False
    )
    accept_risk: Annotated[
        bool, Option(help="Rent a plan that is less sure to keep its limits than was asked for.")
    ] = False
    accept_fewer: Annotated[
        Callable[[RunSpec], bool] | None,
        Option(help="Asked whether the run may begin on fewer machines. Default: all or none.", flag="allow-partial"),
    ] = None
