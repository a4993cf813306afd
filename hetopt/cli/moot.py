"""Options that others leave without effect: what is typed is done, or refused before anything begins.

A row says of a command when it has no use for some of its options. Only what was typed is refused: a file of options
serves every use of its command. Options without which the same would happen (--yes where nothing is asked, --force
where nothing is written) disappoint nobody, and are in no row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetopt.core.errors import BadInput

if TYPE_CHECKING:
    from typer._click import Context

Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Moot:
    """A use of a command, and what has no effect in it.

    Attributes:
        when: whether the command is used so, by the values of its parameters.
        use: the same in words, behind 'no effect'.
        options: without effect then, by their parameters' names; with ``reads`` all the others.
        hint: what to do instead of leaving them out.
    """

    when: Callable[[Values], bool]
    use: str
    options: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    hint: str | None = None

    def includes(self, name: str) -> bool:
        """Whether a parameter has no effect in this use."""
        return name not in self.reads if self.reads else name in self.options


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOOT: Mapping[str, tuple[Moot, ...]] = {
    "profile": (
        Moot(
            when=lambda values: values["from_samples"] is not None and values["task"] is None,
            use="with --from-samples alone",
            reads=_names("from_samples output force as_json"),
            hint="name the TASK that the steps are of, or leave it out",
        ),
        Moot(
            when=lambda values: values["explore_on"] != "ec2", use="without --on ec2", options=_names("region ec2_data")
        ),
    ),
    "predict": (
        Moot(
            when=lambda values: values["explain"] is not None,
            use="with --explain, which is of one query",
            options=_names("suggest_probes"),
        ),
        Moot(
            when=lambda values: not values["suggest_probes"], use="without --suggest-probes", options=_names("market")
        ),
    ),
    "recommend": (
        Moot(
            when=lambda values: values["rank"],
            use="with --rank, which only compares clusters",
            options=_names(
                "budget_usd deadline target epochs steps objective time_weight confidence accept_risk data data_region "
                "provisioning trials observed inventory seed journal report explain output"
            ),
            hint="leave --rank out, and give the run's length with --epochs or --steps, for a plan",
        ),
        Moot(
            when=lambda values: values["trials"] == 0,
            use="with --trials 0, which is no study",
            options=_names("journal"),
        ),
    ),
    "estimate": (
        Moot(
            when=lambda values: values["flops"] is not None,
            use="with --flops, which counts them",
            options=_names("tokens"),
        ),
    ),
    "convert": (Moot(when=lambda values: not values["compare"], use="with --no-compare", options=_names("arguments")),),
    "status": (Moot(when=lambda values: values["all_"], use="with --all", options=_names("run")),),
    "logs": (Moot(when=lambda values: values["events"], use="with --events", options=_names("worker")),),
    "setup": (
        Moot(
            when=lambda values: not values["print_policy"], use="without --print-policy", options=_names("role types")
        ),
    ),
    "gc": (Moot(when=lambda values: values["run"] is not None, use="with --run", options=_names("everything")),),
    "catalog refresh": (
        Moot(when=lambda values: not values["account"], use="with --no-account", options=_names("profile")),
        Moot(
            when=lambda values: values["region"] == "all",
            use="with --region all, which asks no account",
            options=_names("profile"),
        ),
    ),
}
"""By command. What a place to launch or to explore takes is the library's to say (`hetopt.api.backends.TAKES`)."""


def refuse(command: str, context: Context) -> None:
    """Refuse what was typed and would have no effect.

    Args:
        command: without ``hetopt``, such as 'catalog refresh'.
        context: of it, with all values.

    Raises:
        BadInput: names all such options of the first use that has any.
    """
    for moot in MOOT.get(command, ()):
        if moot.when(context.params):
            typed = [
                one.opts[0] if one.param_type_name == "option" else str(one.name).upper()
                for one in context.command.params
                if one.name is not None and moot.includes(one.name) and _is_typed(context, one.name)
            ]
            if typed:
                have = "has" if len(typed) == 1 else "have"
                raise BadInput(
                    f"{', '.join(typed)} {have} no effect {moot.use}.", hint=moot.hint or "leave one of them out"
                )


def _is_typed(context: Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
