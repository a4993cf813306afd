"""Writes the pages of the documentation that are made from the code: ``python docs/generated.py``.

Commands from their own help, claims (here and in the README) from the committed results, methods from their registries,
public names from their docstrings, and the difference between the two forms of the example script. A test compares them
with what is committed.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.claims import CLAIMS, figures
from docs.recording import COLUMNS, COMMANDS, PICTURE, SAID, SCREEN, draw

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
SCRIPT = DOCS.parent / "examples" / "script"
MODELS = DOCS.parent / "examples" / "models"
WIDTH = 100


def commands() -> str:
    """Return the page of all commands, made of their help."""
    os.environ["COLUMNS"] = str(WIDTH)
    import click
    import typer.main

    from hetopt.cli.main import app

    parts: list[str] = []
    without_json: list[str] = []

    def add(command: click.Command, path: list[str], parent: click.Context | None) -> None:
        context = click.Context(
            command, info_name=path[-1], parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
        )
        text = command.get_help(context)
        if not hasattr(command, "commands") and not any("--json" in each.opts for each in command.params):
            without_json.append(" ".join(path[1:]))
        text = SAID_ONCE.sub("", text).replace("Usage: ", "", 1).replace(" [OPTIONS]", "", 1)
        text = re.sub(r"^(Arguments|Options):\n+(?! )", "", TYPE.sub(_blank, text) + "\n", flags=re.MULTILINE)
        text = re.sub(r" +$", "", text, flags=re.MULTILINE)
        if parent is not None:
            text = re.sub(r"\n{3,}", "\n\n", text).rstrip()
            usage, _, text = text.partition("\n")
            parts.extend([f"{'#' * len(path)} {usage}", "", "```text", text.strip("\n"), "```", ""])
        for name, below in getattr(command, "commands", {}).items():
            if not below.hidden:
                add(below, [*path, name], context)

    add(typer.main.get_command(app), ["hetopt"], None)
    about = ABOUT_COMMANDS.format(without=", ".join(f"`{name}`" for name in sorted(without_json)))
    return "\n".join(["# Commands", "", _wrapped(about), "", *parts])


ABOUT_COMMANDS = (
    "Made from `hetopt COMMAND --help`, which has examples; `--help-all` shows every option. Every command but "
    "{without} prints JSON with `--json`. RUN is a run's name, or a part of it that no other run has; left out, it is "
    "the newest run."
)
SAID_ONCE = re.compile(
    r"^(    hetopt .*|  --help .*|  --help-all .*|  --json .*(\n {10,}.*)*|  run <str> .*Default: the newest\."
    r"|Commands:\n( .*\n*)*)\n?",
    re.MULTILINE,
)
"""Lines of help that many commands share, and examples, which the pages show."""

TYPE = re.compile(r"(?<=[\w.]) <[\w \[\]]+>")


def _blank(match: re.Match[str]) -> str:
    """Return as many blanks as a match has letters, so that columns stay."""
    return " " * len(match[0])


ABOUT_CLAIMS = (
    "What hetopt promises in numbers: each a sentence, a picture, and the command that measures it. `make claims` "
    "measures again whatever is not of today's code. A figure whose code was rewritten since (more than half of the "
    "lines that run) is taken off until then: a test refuses it. `benchmarks/results/` has raw figures, goals, "
    "baselines and machines.",
    "Predictions are held against public measurements. What trains here runs on two cores, with emulated links, and "
    "workers that wait until the machine they stand for would be done. **Nothing was ever rented:** boot times, "
    "capacity, links and GPUs of rented machines, and an invoice were never seen.",
)


def measured() -> str:
    """Return the page of claims, those without a result of today's code by their titles."""
    parts = ["# Measured", ""]
    parts += [line for paragraph in ABOUT_CLAIMS for line in (_wrapped(paragraph), "")]
    missing = []
    for claim in CLAIMS:
        result = claim.result()
        if result is None:
            missing.append(f"- {claim.title}: `{claim.command}`")
            continue
        verdict = f"{_count_missed(result)} of its {len(result['goals'])} goals are missed"
        source = f"`{_command(result)}`, {result['date']}, commit {result['commit']}"
        parts += [f"## {claim.title}", "", f"![{claim.plot.title}](images/{claim.benchmark}.svg)", ""]
        parts += [_wrapped(_filled_in(claim.sentence, result)), "", _wrapped(f"{source}; {verdict}."), ""]
    if missing:
        parts += ["## Not measured on today's code", "", *missing, ""]
    return "\n".join(parts)


def front() -> str:
    """Return README's sentences of the claims, with their plots."""
    shown = [(claim, result) for claim in CLAIMS if claim.front and (result := claim.result()) is not None]
    lines = [_wrapped(f"- {_filled_in(claim.front, result)} ({result['date']}).") for claim, result in shown]
    pictures = [f"![{claim.plot.title}](docs/images/{claim.benchmark}.svg)" for claim, _ in shown]
    return "\n".join([*lines, *(line for picture in pictures for line in ("", picture))])


def _filled_in(template: str, result: Mapping[str, Any]) -> str:
    return re.sub(r"(?<=\d)%", " %", template.format(**figures(result)))


def _count_missed(result: Mapping[str, Any]) -> int:
    """Return the number of goals that a result misses."""
    return sum(
        not goal.get("at_least", -math.inf) <= result["figures"][name] <= goal.get("at_most", math.inf)
        for name, goal in result["goals"].items()
    )


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 119, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _command(result: Mapping[str, Any]) -> str:
    """Return the command that measured a result."""
    form = "--quick" if result["quick"] else None
    return " ".join(filter(None, ("python -m", f"benchmarks.{result['benchmark']}", result.get("asked"), form)))


METHOD_PAGES = DOCS / "methods"
MARK = re.compile(r"^<!-- (registry|index): (\w+)(.*?) -->\n(?:.*?)^<!-- end -->", re.MULTILINE | re.DOTALL)
"""What is made from a registry: the methods of a page, or links to all pages."""


def registries() -> dict[str, Mapping[str, str]]:
    """Return half a sentence about each method, by kind and name."""
    from hetopt.core.comm.composition import COLLECTIVES, METHODS
    from hetopt.core.run_rules import CONTROLLERS
    from hetopt.core.run_spec import BATCH_POLICIES, POLICIES

    return {
        "batch": BATCH_POLICIES,
        "compressor": {name: method.about for name, method in METHODS.items()},
        "collective": COLLECTIVES,
        "ratio": CONTROLLERS,
        "sync": POLICIES,
    }


def method_pages() -> dict[str, list[tuple[str, str]]]:
    """Return the methods of each page in `METHOD_PAGES`, as kind and name."""
    return {
        page.name: [
            (kind, name)
            for what, kind, names in MARK.findall(page.read_text(encoding="utf-8"))
            if what == "registry"
            for name in names.split()
        ]
        for page in sorted(METHOD_PAGES.glob("*.md"))
    }


def methods(page: Path) -> str:
    """Return a page with its methods filled in from the registries."""
    pages = {method: name for name, named in method_pages().items() for method in named}

    def of_registry(mark: re.Match[str]) -> str:
        what, kind, names = mark.groups()
        if what == "registry":
            rows = _facts(kind, names.split())
        else:
            rows = ["| name | what it does |", "|---|---|"]
            for name, about in registries()[kind].items():
                rows.append(f"| [`{name}`](methods/{pages[kind, name]}) | {about} |")
        return "\n".join([mark[0].partition("\n")[0], *rows, "<!-- end -->"])

    return MARK.sub(of_registry, page.read_text(encoding="utf-8"))


def _facts(kind: str, names: Sequence[str]) -> list[str]:
    """Return the lines that describe methods of a kind: partners and bytes of compressors, settings of policies."""
    from hetopt.core.comm.composition import METHODS
    from hetopt.core.run_spec import BATCH_SETTINGS, RATIO_SETTINGS

    if kind == "compressor":
        return [f"- `{name}`: {_company(METHODS[name])}{_weight(name)}" for name in names]
    rows = [f"`--{OPTIONS[kind]}` " + ", ".join(f"`{name}`" for name in names) + "."]
    for name in names:
        if settings := {"batch": BATCH_SETTINGS, "ratio": RATIO_SETTINGS}.get(kind, {}).get(name):
            rows += ["", f"| setting of `{name}` | default | meaning |", "|---|---|---|"]
            meanings = _attributes(settings)
            for key, field in settings.model_fields.items():
                usual = "" if field.default is None else f"`{json.dumps(field.default).strip(chr(34))}`"
                rows.append(f"| `{key}` | {usual} | {meanings[key]} |")
    return rows


def _company(method: Any) -> str:
    """Return the collectives and residuals that a compressor combines with; the first of each is the default."""
    by, kept = (", ".join(f"`{name}`" for name in names) for names in (method.collectives, method.memories))
    return f"combined by {by}; residual {kept}. "


def _weight(name: str) -> str:
    """Return the megabytes that a worker of two sends for a million values, as a sentence."""
    from hetopt.core.comm.composition import METHODS
    from hetopt.core.comm.payload_bytes import wire_bytes

    size = wire_bytes(name, 1_000_000, 0.01, shapes=((1000, 1000),)) / 1e6
    return f"A million values: {size:.3g} MB{' at 1 %' * METHODS[name].by_ratio}."


OPTIONS = {"batch": "batch-policy", "collective": "collective", "ratio": "ratio-policy", "sync": "sync"}


def _attributes(record: type) -> dict[str, str]:
    """Return the sentence of each field in a record's docstring."""
    section = inspect.getdoc(record).partition("Attributes:\n")[2]
    section = re.sub(r"\n {8,}", " ", section)
    lines = [line.strip().partition(": ") for line in section.splitlines()]
    return {name.strip(): about.rstrip(".") for names, _, about in lines for name in names.split(",")}


ABOUT_LIBRARY = (
    "Made from signatures and the opening of each docstring; `help(hetopt.recommend)` shows all of it. "
    "[The library](library.md) shows how the parts go together, [Errors](errors.md) has what may be raised, and "
    "[options](commands.md) mean the same here. Plans, profiles and reports have `save` and `load`, `to_json` and "
    "`from_json`; their fields are in the [schemas](files.md)."
)
ARTIFACT = ("from_json", "load", "save", "to_json")
"""Methods that all records in files share."""

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$", re.MULTILINE)


def library() -> str:
    """Return the reference page of every public name."""
    import hetopt

    parts = ["# Library reference", "", _wrapped(ABOUT_LIBRARY), ""]
    for name in sorted(set(hetopt.__all__) - {"__version__"}, key=lambda public: (public.lower(), public)):
        parts += _described(f"hetopt.{name}", getattr(hetopt, name))
    return "\n".join(parts)


def _described(name: str, thing: Any) -> list[str]:
    """Return the section of a class with its public methods, or of a function.

    Records are read from files, and made by nobody's hand."""
    is_record = hasattr(thing, "model_fields")
    is_made = not is_record and not inspect.isabstract(thing)
    parts = [f"## {name}", "", *(["```python", _signature(name, thing), "```", ""] if is_made else [])]
    parts += [_opening(thing), ""]
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        methods = [
            " ".join(f"- `{method_name}`: {_opening(method).partition(chr(10) * 2)[0]}".split())
            for method_name, method in inspect.getmembers(thing, inspect.isroutine)
            if not method_name.startswith(("_", "model_"))
            and method_name not in ARTIFACT
            and method_name not in inspect.signature(thing).parameters
            and (called := getattr(method, "__func__", method)).__module__.startswith("hetopt")
            and called.__doc__
        ]
        parts += [*methods, *([""] if methods else [])]
    return parts


def _opening(thing: Any) -> str:
    """Return a docstring up to its sections."""
    return SECTION.split(inspect.getdoc(thing) or "")[0].strip().replace("``", "`")


def _signature(name: str, thing: Any) -> str:
    """Return the call of a function, with names and defaults."""
    shown = []
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = "" if parameter.default is parameter.empty else f"={_named(parameter.default)}"
        if parameter.name != "self":
            shown.append(f"{parameter.name}{default}")
    return textwrap.fill(f"{name}({', '.join(shown)})", WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _named(default: Any) -> str:
    """Return a default value as it is typed; a function by its name alone."""
    return default.__name__ if inspect.isfunction(default) else repr(default)


def conversion() -> str:
    """Return the diff between a script and its converted form, changed indentation aside."""
    names = ("train.py", "train_hetopt.py")
    before, after = ((SCRIPT / name).read_text(encoding="utf-8").splitlines()[1:] for name in names)
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
            f"A whole script, `examples/script/{names[0]}`, and the {count} lines that `{names[1]}` adds or changes",
            "(lines that only move to the right aside):",
            "",
            "```diff",
            *(line.rstrip() for line in lines),
            "```",
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Known:
    """A training that people know, described as `hetopt estimate` is told.

    Attributes:
        name: the model, as people call it.
        training: what it is trained on, in words.
        config: its file in ``examples/models``.
        samples: trained on, epochs included.
        tokens: of a sample; None: images.
        method: ``full`` or ``lora``.
    """

    name: str
    training: str
    config: str
    samples: str
    tokens: int | None = None
    method: str = "full"


KNOWN = (
    Known(name="BERT-base", training="3 epochs of MNLI", config="bert-base", samples="1.2M", tokens=128),
    Known(name="ViT-B/16", training="300 epochs of ImageNet", config="vit-base", samples="384M"),
    Known(name="ResNet-50, as in detectors", training="90 epochs of ImageNet", config="resnet-50", samples="115M"),
    Known(
        name="Llama 7 B, LoRA", training="50,000 texts", config="llama-7b", samples="50k", tokens=2048, method="lora"
    ),
    Known(name="GPT-2, as nanoGPT", training="9 billion tokens", config="gpt2", samples="9M", tokens=1024),
)


def gallery() -> dict[Path, str]:
    """Return the page of GPUs with a table of known models and the commands that ask, and each model's plan as a page.

    What an account may rent, and prices that were refreshed, are those of nobody.
    """
    from hetopt.reports import html, plan_document

    rows = ["| model | trained on | cheapest | balanced | on one A10G | plan |", "|---|---|---|---|---|---|"]
    commands, plans = [], {}
    with tempfile.TemporaryDirectory() as home, patch.dict(os.environ, {"HETOPT_HOME": home}):
        for known in KNOWN:
            made, alone = _estimated(known), _estimated(known, gpus="A10G", max_workers=1)
            ways = [_way(made, "cheapest"), _way(made, "balanced"), _way(alone, "cheapest")]
            page = f"gallery/{known.config}.html"
            rows.append(f"| {known.name} | {known.training} | {' | '.join(ways)} | [page]({page}) |")
            made_today = f", {made.plan.created[:10]}. Searched"
            drawn = html.page(plan_document.page(made.plan)).replace(made_today, ". Searched")
            # The last digits of a sum depend on how many processors add it up.
            plans[DOCS / page] = re.sub(
                r'data-value="([^"]+)"', lambda found: f'data-value="{float(found[1]):.6g}"', drawn
            )
            words = [f"--config examples/models/{known.config}.json --samples {known.samples}"]
            words += [f"--tokens {known.tokens}"] * (known.tokens is not None)
            words += [f"--method {known.method}"] * (known.method != "full")
            commands.append(f"$ hetopt estimate {' '.join(words)}")
    gpus = DOCS / "which-gpu.md"
    return {**plans, gpus: _filled(gpus, "gallery", "\n".join([*rows, "", "```console", *commands, "```"]))}


def _estimated(known: Known, **narrowed: Any) -> Any:
    """Return the estimate of a known model's training."""
    import hetopt

    return hetopt.estimate(
        config=MODELS / f"{known.config}.json",
        samples=known.samples,
        tokens=known.tokens,
        method=known.method,
        **narrowed,
    )


def _way(made: Any, name: str) -> str:
    """Return GPUs, median time and cost of the way that has a name, else of the last."""
    from hetopt.core import formatting

    way = next((choice for choice in made.plan.choices if name in choice.names), made.plan.choices[-1])
    (group,) = way.candidate.groups
    gpus = f"{group.hardware.gpus * group.machines:g} × {group.hardware.gpu}, {group.market}"
    took = f"{formatting.duration(way.total_s.value)}, {formatting.usd(way.cost_usd.value)}"
    return f"{gpus}: {took}".replace(" ", "\u00a0").replace(":\u00a0", ": ")


def picture() -> dict[Path, str]:
    """Return the front page's picture and its text, with today's answer of its first command, the same anywhere."""
    _, _, rest = SAID.read_text(encoding="utf-8").partition(SCREEN)
    with tempfile.TemporaryDirectory() as home:
        answer = subprocess.run(
            [sys.executable, "-m", "hetopt.cli.main", *COMMANDS[0].split()[1:]],
            env={**os.environ, "HETOPT_HOME": home, "COLUMNS": str(COLUMNS), "NO_COLOR": "1"},
            cwd=DOCS.parent,
            capture_output=True,
            text=True,
            check=True,
        )
    rows = [line.rstrip() for line in answer.stdout.strip("\n").splitlines()]
    said = "\n".join([f"$ {COMMANDS[0]}", *rows, SCREEN]) + rest
    return {SAID: said, PICTURE: draw(said)}


def pages() -> dict[Path, str]:
    """Return the text of every page that is wholly or partly generated, by path."""
    your_code = DOCS / "your-own-code.md"
    return {
        DOCS / "commands.md": commands(),
        DOCS / "reference.md": library(),
        DOCS / "measured.md": measured(),
        **{page: methods(page) for page in (DOCS / "methods.md", *METHOD_PAGES.glob("*.md"))},
        **picture(),
        **gallery(),
        your_code: _filled(your_code, "conversion", conversion()),
        README: _filled(README, "measured", front()),
    }


def _filled(page: Path, name: str, words: str) -> str:
    """Return a page with the text between the marks of a name replaced."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    return before + begin + words + "\n" + end + rest.partition(end)[2]


if __name__ == "__main__":
    (DOCS / "gallery").mkdir(exist_ok=True)
    for page, words in pages().items():
        page.write_text(words, encoding="utf-8")
