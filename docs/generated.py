"""Writes the pages of the documentation that are made from the code: ``python docs/generated.py``.

Commands from their own help, measurements from the committed results, and the difference between the two forms of the
example script. A test compares them with what is committed.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
SCRIPT = DOCS.parent / "examples" / "script"
WIDTH = 100


def commands() -> str:
    """The page of all commands, by their own help."""
    os.environ["COLUMNS"] = str(WIDTH)
    import click
    import typer.main

    from hetopt.optimizer.cli.main import app

    parts = ["# Commands", "", "Made from `hetopt COMMAND --help`. Options may stand before or behind arguments.", ""]

    def add(command: click.Command, path: list[str], parent: click.Context | None) -> None:
        context = click.Context(
            command, info_name=path[-1], parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
        )
        if len(path) > 1:
            parts.extend([f"{'#' * len(path)} {' '.join(path)}", ""])
        text = command.get_help(context)
        parts.extend(["```text", "\n".join(line.rstrip() for line in text.splitlines()), "```", ""])
        for name, below in getattr(command, "commands", {}).items():
            if not below.hidden:
                add(below, [*path, name], context)

    add(typer.main.get_command(app), ["hetopt"], None)
    return "\n".join(parts)


def measured() -> str:
    """The page of all committed results."""
    parts = [
        "# Measured",
        "",
        "Made from `benchmarks/results/`, which holds the last full run of each benchmark. A goal is what it is to",
        "reach; a baseline ran in the same call. Figures are seconds, bytes, dollars or ratios, as their names say.",
        "",
        "**Never measured:** anything on machines that were really rented. The cloud is a local process that answers",
        "as AWS does (moto), links are those of network namespaces on one machine, and no GPU was used unless the",
        "name of a benchmark or figure says so.",
        "",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        goals, baselines = told.get("goals", {}), told.get("baselines", {})
        verdict = "all goals met" if told["met"] else "not all goals met"
        figures = told["figures"].items()
        parts += [
            f"## {told['benchmark']}",
            "",
            f"`python -m benchmarks.{told['benchmark']}`, {told['date']}, commit {told['commit']}: {verdict}.",
            "",
            "| figure | value | goal |",
            "|---|---:|---|",
            *(f"| {name} | {_number(value)} | {_goal(goals.get(name, {}))} |" for name, value in figures),
            *(f"| baseline: {name} | {_number(value)} | |" for name, value in baselines.items()),
            "",
        ]
    return "\n".join(parts)


def conversion() -> str:
    """The difference between the script and its converted form, changed indentation aside."""
    before, after = ((SCRIPT / name).read_text(encoding="utf-8").splitlines()[1:] for name in ("before.py", "after.py"))
    matcher = difflib.SequenceMatcher(None, [line.strip() for line in before], [line.strip() for line in after], False)
    lines = []
    for group in matcher.get_grouped_opcodes(2):
        if lines:
            lines.append(" ...")
        for kind, first, last, start, end in group:
            if kind == "equal":
                lines += [f" {line}" for line in after[start:end]]
            else:
                lines += [f"-{line}" for line in before[first:last]] + [f"+{line}" for line in after[start:end]]
    count = sum(line[0] == "+" and bool(line[1:].strip()) for line in lines)
    return "\n".join(
        [
            f"A whole script, `examples/script/before.py`, and the {count} lines that `after.py` adds or changes",
            "(those that only move to the right aside):",
            "",
            "```diff",
            *(line.rstrip() for line in lines),
            "```",
        ]
    )


def pages() -> dict[Path, str]:
    """The text of every page that is made, or partly made, by its file."""
    own = DOCS / "your-own-code.md"
    text = own.read_text(encoding="utf-8")
    begin, end = "<!-- conversion: begin -->\n", "<!-- conversion: end -->"
    before, _, rest = text.partition(begin)
    return {
        DOCS / "commands.md": commands(),
        DOCS / "measured.md": measured(),
        own: before + begin + conversion() + "\n" + end + rest.partition(end)[2],
    }


def _number(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.3e}"


def _goal(goal: dict[str, float]) -> str:
    return ", ".join(f"{kind.replace('_', ' ')} {_number(bound)}" for kind, bound in goal.items())


if __name__ == "__main__":
    for page, words in pages().items():
        page.write_text(words, encoding="utf-8")
