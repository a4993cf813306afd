"""`hetopt hosts`: machines of one's own, and what would keep them from training together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetopt.cli.help_screen import OneScreen, OneScreenGroup
from hetopt.cli.options import Json

if TYPE_CHECKING:
    from hetopt.api.hosts import HostFound

MARKS = {"good": "✓", "bad": "✗", "unknown": "?"}

app = typer.Typer(
    name="hosts",
    cls=OneScreenGroup,
    help="""Machines of your own, reached by ssh.

    \b
      hetopt hosts check hosts.toml
      hetopt hosts check --hosts alice@box1,bob@box2
    """,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _group() -> None:
    pass


@app.command("check", cls=OneScreen)
def check(
    inventory: Annotated[
        Path | None,
        typer.Argument(help="File of hosts, see examples/hosts.toml. Default: hosts.toml here.", show_default=False),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option("--hosts", help="Hosts instead of a file: alice@box1,bob@box2:2222.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Look for what keeps your machines from training together. Nothing is changed.

    \b
      hetopt hosts check
      hetopt hosts check --hosts alice@box1,bob@box2
    \f
    A line for each, and what to do. All are asked at once, by the ssh of this machine with your own configuration,
    keys, agent and jump hosts. It is never asked for a password, and accepts no key that is not known. Looked at:
    whether each is reached, its Python and what training needs of it, disk, clock, GPUs and driver, whether two names
    are one machine, whether home folders are shared, whether each reaches all others, and the rate of the links in both
    directions.

    It exits with 6 if something would keep them from training.
    """
    from hetopt.api import hosts as owned
    from hetopt.cli import render

    found = owned.check(inventory, hosts)
    if as_json:
        render.print_json([_facts(one) for one in found])
    else:
        show(found, for_plans=inventory is not None or hosts is None)
    if any(one.verdict == "bad" for one in found):
        raise typer.Exit(6)


def show(found: Sequence[HostFound], *, for_plans: bool) -> None:
    """A line for each host or for each thing that is wrong, and, for a file of hosts, what plans need.

    What is said of several hosts in the same words is said once.
    """
    from hetopt.cli import render

    hosts: dict[tuple[str, str], list[str]] = {}
    for one in found:
        for line in _lines(one):
            hosts.setdefault(line, []).append(one.name)
    for (mark, said), names in hosts.items():
        render.bullet(f"{', '.join(names)}: {said}", mark=mark)
    for host in found if for_plans else ():
        if host.for_plans:
            render.note(f"for plans, add to [{host.name}]:")
        for wanted in host.for_plans:
            render.note(f"  {wanted.setting} = {wanted.value:g}  # {wanted.source}")


def _lines(found: HostFound) -> Iterator[tuple[str, str]]:
    """A mark and what is said of a host."""
    from hetopt.api.hosts import in_words

    worst = [one for one in found.troubles if one.verdict == found.verdict]
    if found.verdict != "bad":
        yield MARKS["good"], in_words(found)
        worst = list(found.troubles)
    for one in worst:
        yield MARKS[one.verdict], f"{one.said} → {one.hint}"


def _facts(found: HostFound) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "name": found.name,
        "verdict": found.verdict,
        "troubles": [asdict(one) for one in found.troubles],
        "for_plans": [asdict(one) for one in found.for_plans],
        "rates_bits_per_s": {name: {"to": to, "back": back} for name, (to, back) in found.rates.items()},
        "seen": None if found.seen is None else found.seen.model_dump(mode="json"),
    }
