"""A session is written into a script as a person would write it, or the four lines are printed, and nothing is written.

The forms of scripts are run before and after, alone and on two workers.
"""

from __future__ import annotations

import io
import tokenize
from collections import Counter
from contextlib import chdir
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetopt.api.converting import convert, convert_text
from hetopt.api.exactness import _record, unequal
from hetopt.cli.main import app
from hetopt.core.errors import BadInput
from hetopt.core.run_folder import SPEC_VARIABLE
from hetopt.profiler.script import gradients
from tests.disturbance import PATIENCE_S
from tests.thinned import few

from .forms import BY_HAND, DIFFERS, FORMS

ROUNDING = 1e-5

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "script"


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_the_example_of_the_documentation_is_what_comes_out() -> None:
    converted = convert(EXAMPLES / "train.py")
    ours = lines(converted.text.replace("from hetopt import session", "from hetopt.trainer.session import session"))
    assert sorted(ours[1:]) == sorted(lines((EXAMPLES / "train_hetopt.py").read_text())[1:])
    assert converted.diff.startswith("--- a/train.py\n+++ b/train.py\n")


def _distances(folder: Path, before: str, after: str) -> list[list[float]]:
    """Return how far the new script is from the old one at each step, alone and on two workers."""
    for name, text in (("before", before), ("after", after)):
        (folder / f"{name}.py").write_text(text)
    (folder / "spec.json").write_text(unequal().model_dump_json())
    shares = {SPEC_VARIABLE: str(folder / "spec.json")}
    runs: tuple[tuple[str, str, dict[str, str], int], ...] = (
        ("before", "before", {}, 1),
        ("alone", "after", {}, 1),
        ("shared", "after", shares, 2),
    )
    for label, script, environment, workers in runs:
        path = folder / f"{script}.py"
        with chdir(folder):
            _record(folder, label, path, (), environment, workers=workers, patience_s=PATIENCE_S)
    right, told = gradients.recorded(folder, "before")
    found = []
    for name in ("alone", "shared"):
        other, told_other = gradients.recorded(folder, name)
        assert told_other.rates == told.rates
        found.append(gradients.distances(right, other))
    return found


@pytest.mark.parametrize("name", [*BY_HAND, *few(6, [name for name in FORMS if name not in BY_HAND][::-1])])
def test_a_form_of_script_computes_what_it_did_or_is_left_to_a_person(name: str, tmp_path: Path) -> None:
    if name in BY_HAND:
        with pytest.raises(BadInput) as raised:
            convert_text(FORMS[name])
        assert BY_HAND[name] in str(raised.value)
        return
    by_itself, shared = _distances(tmp_path, FORMS[name], convert_text(FORMS[name]).text)
    assert by_itself == [0.0] * gradients.STEPS
    assert (max(shared) <= ROUNDING) == (name not in DIFFERS)


def _tokens(text: str) -> Counter[str]:
    kinds = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return Counter(one.string for one in tokenize.generate_tokens(io.StringIO(text).readline) if one.type not in kinds)


@pytest.mark.parametrize("name", [name for name in FORMS if name not in BY_HAND])
def test_nothing_of_the_script_is_deleted(name: str) -> None:
    """Every token of it, strings and comments included, is in the new text as often at least."""
    assert not _tokens(FORMS[name]) - _tokens(convert_text(FORMS[name]).text)


def test_four_lines_are_printed_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(FORMS["two loops"])
    done = CliRunner().invoke(app, ["convert", str(path)])
    assert done.exit_code != 0
    assert "with session(model, optimizer) as run:" in done.stdout
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = = 1", "no Python"),
        ("from transformers import Trainer\n", "by transformers' Trainer: it runs as it is"),
        ("import accelerate\n", "by Accelerate: it runs as it is"),
        ("import hetopt\nhetopt.session(model, opt)\n", "has a session: it runs as it is"),
        ("from transformers import AutoModel\n", "calls `backward` nowhere"),
    ],
)
def test_what_needs_no_session_is_told_so(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        convert_text(text)


def test_training_elsewhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(FORMS["a training for each fold"])
    (tmp_path / "main.py").write_text("import loops\n")
    with pytest.raises(BadInput, match=r"main\.py calls `backward` nowhere; loops\.py does"):
        convert(tmp_path / "main.py")
