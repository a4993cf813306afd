"""`hetopt config`: which options have another value than their default, and who says so."""

from __future__ import annotations

import typer


def config(
    context: typer.Context,
    json_: bool = typer.Option(False, "--json", help="Print them as JSON."),
) -> None:
    """Show every option that a file or the environment gives, with its value and where it comes from.

    Read are ~/.config/hetopt/config.toml, the nearest hetopt.toml upward from here, and HETOPT_OPTION in the
    environment, the later before the earlier; what is typed goes before them all. Options that spend, overwrite or
    remove (--yes, --force, --accept-risk, --unprobed and their like) are only ever typed.

    \b
      hetopt config
    """
    import os
    from pathlib import Path

    from hetopt.cli import render
    from hetopt.cli.configuration import settings
    from hetopt.reports.document import Table, columns

    given = settings(context.find_root().command, os.environ, Path.cwd())
    found = [one for one in given if not one.is_default]
    if json_:
        render.print_json(
            [{"command": one.command, "option": one.option, "value": one.value, "from": one.source} for one in found]
        )
        return
    if not found:
        render.line("Every option has its default: no hetopt.toml here or above, no file of yours, no HETOPT_OPTION.")
        return
    rows = [(one.command, one.option, _shown(one.value), one.source) for one in found]
    render.show([Table(name="options", columns=columns("command, option, value, from"), rows=rows)])


def _shown(value: str | bool | tuple[str, ...]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else ", ".join(value)
