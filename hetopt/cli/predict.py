"""`hetopt predict`: step times of configurations that were never run, JSON Lines in and out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hetopt.cli.completion import one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hetopt.cli.lines import Query
    from hetopt.core.step_samples import Configuration, StepSample
    from hetopt.optimizer.market.catalog import Catalog, Market
    from hetopt.optimizer.step_time.choice import PeerModel
    from hetopt.optimizer.step_time.model import StepTime, StepTimeModel
    from hetopt.optimizer.step_time.observed import Observed
    from hetopt.optimizer.step_time.priors import Normal

    Predictor = StepTimeModel | PeerModel

CHUNK = 1000
"""Queries of a file that are predicted together; from a pipe each is answered at once."""

SETUP_S = 180.0
PROBE_STEPS = 25
"""What measuring a layout takes: starting machines, a few steps to warm up, and twenty that count."""


def predict(
    profile: Path = typer.Argument(..., help="Profile made by `hetopt profile`, with or without --from-samples."),
    queries: Path = typer.Argument(Path("-"), help="Configurations, JSON Lines. Default: standard input."),
    suggest_probes: int = typer.Option(
        0, "--suggest-probes", min=0, help="Mark the N configurations whose measurement would help most, and say why."
    ),
    explain: str | None = typer.Option(
        None, "--explain", help='Only the breakdown of one query: its "id", or the number of its line.'
    ),
    model: str = typer.Option(
        "hetopt",
        "--model",
        autocompletion=one_of("hetopt", "auto", "scavenger", "ernest", "goodput"),
        help="hetopt's own, a published one (scavenger, ernest, goodput), or auto: the best on layouts held out.",
    ),
    market: str = typer.Option(
        "spot",
        "--market",
        autocompletion=one_of("spot", "on-demand"),
        help="Prices for --suggest-probes: spot or on-demand.",
    ),
    region: str = typer.Option("us-east-1", "--region", help="AWS region of the prices."),
    catalog_dir: Path | None = typer.Option(None, "--catalog", help="Another catalogue folder than the bundled one."),
    json_: bool = typer.Option(False, "--json", help="Breakdown as JSON. Predictions always are."),
) -> None:
    """Predict step times, with 90 % intervals, for configurations that were never run.

    Every line of QUERIES comes back in its place with step_time_s, step_time_low_s and step_time_high_s added.
    """
    from functools import partial

    from hetopt.cli import lines
    from hetopt.core.errors import BadInput
    from hetopt.optimizer.market.catalog import load_catalog
    from hetopt.optimizer.step_time.model import StepTimeModel

    if market not in ("spot", "on-demand"):
        raise BadInput(f"--market must be spot or on-demand, not {market!r}.", hint="for example --market spot")
    if model != "hetopt" and (explain is not None or suggest_probes):
        raise BadInput("--explain and --suggest-probes need hetopt's own model.", hint="leave --model out")
    observed, samples, priors = _observed(profile)
    catalog = load_catalog(region, catalog_dir)
    own = StepTimeModel.fit(observed, catalog.instance_types, priors)
    with lines.opened(queries, "QUERIES") as (rows, is_whole):
        if explain is not None:
            _explain(own, lines.queries(rows), explain, as_json=json_)
        elif suggest_probes:
            prices = partial(_probe_usd, catalog, "spot" if market == "spot" else "on-demand")
            _suggest(own, list(lines.queries(rows)), suggest_probes, prices)
        else:
            at_once = CHUNK if is_whole else 1
            _answer(_chosen(model, own, samples), lines.chunks(lines.queries(rows), at_once))


def _observed(path: Path) -> tuple[Observed, tuple[StepSample, ...], Mapping[str, Normal]]:
    """What was measured, from either kind of profile, whole steps where there are any, and what else is believed."""
    from hetopt.core.artifact import kind_in
    from hetopt.core.profile import Profile
    from hetopt.core.step_samples import StepSamples
    from hetopt.optimizer.fit import fit
    from hetopt.optimizer.step_time.observed import observe
    from hetopt.optimizer.step_time.priors import PRIORS
    from hetopt.optimizer.step_time.profiled import observe_profile, profile_priors

    if kind_in(path) == StepSamples.KIND:
        samples = StepSamples.load(path).samples
        return observe(samples), samples, PRIORS
    profile = Profile.load(path)
    if profile.samples:
        return observe(profile.samples), profile.samples, PRIORS
    return observe_profile(profile), (), profile_priors(fit(profile).reference)


def _chosen(wanted: str, own: StepTimeModel, samples: tuple[StepSample, ...]) -> Predictor:
    """The model that was asked for, or the best."""
    from hetopt.cli import render
    from hetopt.core import formatting
    from hetopt.core.errors import BadInput
    from hetopt.optimizer.step_time.choice import PEERS, PeerModel, choose, held_out_errors

    if wanted == "hetopt":
        return own
    if wanted != "auto" and wanted not in PEERS:
        raise BadInput(f"there is no model {wanted!r}.", hint=f"choose hetopt, {', '.join(PEERS)} or auto")
    if not samples:
        raise BadInput("published models need whole steps, which only imported samples have.", hint="leave --model out")
    if wanted == "auto":
        errors = held_out_errors(own.posterior, samples)
        wanted = choose(errors)
        seen = ", ".join(
            f"{name} {formatting.share(error)}" for name, error in sorted(errors.items(), key=lambda e: e[1])
        )
        render.note(f"Using {wanted}. Errors on layouts held out: {seen or 'too few layouts to tell'}.")
    return next((PeerModel.fit(name, samples) for name in PEERS if name == wanted), own)


def _answer(model: Predictor, chunks: Iterable[list[Query]]) -> None:
    """One line out for each line in. Lines that cannot be predicted carry the reason, and are counted at the end."""
    from hetopt.cli import terminal

    total, refused = 0, list[str]()
    for chunk in chunks:
        total += len(chunk)
        for query, answer in _answered(model, chunk):
            if isinstance(answer, str):
                refused.append(f"line {query.number}: {answer}")
                query.write(error=answer)
            else:
                query.write(**asdict(answer))
        if len(chunk) == 1:
            terminal.flush()
    _report(total, refused)


def _answered(model: Predictor, asked: list[Query]) -> list[tuple[Query, StepTime | str]]:
    """Every query with its prediction, or with why there is none."""
    from hetopt.core.errors import BadInput

    good = [(query, query.configuration) for query in asked if query.configuration is not None]
    try:
        found = iter(model.predict([configuration for _, configuration in good]) if good else ())
    except BadInput as error:
        if len(asked) == 1:
            return [(asked[0], error.message)]
        return [pair for query in asked for pair in _answered(model, [query])]
    return [(query, next(found) if query.configuration is not None else query.reason) for query in asked]


def _report(total: int, refused: list[str]) -> None:
    """Refuse at the end what could not be predicted, or an input without queries."""
    from hetopt.core.errors import BadInput
    from hetopt.core.step_samples import HINT

    if not total:
        raise BadInput("there are no queries.", hint=HINT)
    if refused:
        what = "The only query" if total == 1 else f"{len(refused)} of {total} queries"
        raise BadInput(f"{what} could not be predicted; {refused[0]}", hint="their lines of the output say why")


def _suggest(
    model: StepTimeModel,
    asked: list[Query],
    count: int,
    prices: Callable[[Configuration, float], float | None],
) -> None:
    """All predictions; the lines that are worth measuring say in which order, and why."""
    from hetopt.core import formatting

    answers = _answered(model, asked)
    good = [
        (place, query.configuration, answer.step_time_s)
        for place, (query, answer) in enumerate(answers)
        if query.configuration is not None and not isinstance(answer, str)
    ]
    configurations = [configuration for _, configuration, _ in good]
    usd = [prices(configuration, step_s) for _, configuration, step_s in good]
    probes = model.suggest(configurations, count, usd) if good else ()
    marks: dict[int, dict[str, object]] = {}
    for number, probe in enumerate(probes, start=1):
        place, configuration, _ = good[probe.row]
        layout = f"{configuration.workers} workers on {len(configuration.nodes)} nodes"
        reason = (
            f"{layout}: expected to remove {formatting.share(probe.removed)} of the remaining uncertainty, "
            f"mostly about {probe.about}; measure further batch sizes in the same launch"
        )
        marks[place] = {"suggested_probe": number, "reason": reason}
        if probe.usd is not None:
            marks[place]["probe_cost_usd"] = probe.usd
    refused = list[str]()
    for place, (query, answer) in enumerate(answers):
        if isinstance(answer, str):
            refused.append(f"line {query.number}: {answer}")
            query.write(error=answer)
        else:
            query.write(**asdict(answer), **marks.get(place, {}))
    _report(len(asked), refused)


def _probe_usd(catalog: Catalog, market: Market, configuration: Configuration, step_time_s: float) -> float | None:
    """What renting the configuration for a measurement costs; absent where a price is not known."""
    hourly = 0.0
    for node in configuration.nodes:
        price = catalog.price(node.type, market) if node.type in catalog.instance_types else None
        if price is None:
            return None
        hourly += price.usd_per_hour
    return hourly * (SETUP_S + PROBE_STEPS * step_time_s) / 3600


def _explain(model: StepTimeModel, asked: Iterable[Query], wanted: str, *, as_json: bool) -> None:
    """The breakdown of one query."""
    from hetopt.cli import predict_view, render
    from hetopt.core.errors import BadInput

    for query in asked:
        if str(query.fields.get("id", query.number)) == wanted:
            if query.configuration is None:
                raise BadInput(f"line {query.number}: {query.reason}", hint="correct that line")
            explanation = model.explain(query.configuration)
            if as_json:
                render.print_json({**query.fields, "explanation": asdict(explanation)})
            else:
                predict_view.show(query.configuration, explanation)
            return
    raise BadInput(f"no query has the id {wanted!r}.", hint="without ids, name the number of a line, from 1")
