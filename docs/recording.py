"""Draws the README's picture from what commands printed: ``python docs/recording.py``; ``--record`` runs them first.

What was printed is kept in ``images/demo.txt``, as a terminal of 80 columns and 24 lines shows it. The picture shows it
line by line, a screen a command, again and again, beginning with the first; where somebody asks for less motion, it
stands still.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "images"
SAID = IMAGES / "demo.txt"
PICTURE = IMAGES / "demo.svg"
COMMANDS = (
    "hetopt estimate --params 7B --method lora --samples 50k --tokens 512 --budget 9",
    "hetopt recommend resnet20-cifar10 --epochs 200 --budget 50 --inventory old_gpus.toml",
    "hetopt profile digits -o profile.json",
    "hetopt recommend profile.json --budget 2 --epochs 100 --market spot -o plan.json",
    "hetopt launch plan.json --on rehearsal --hosts 'speed=1 x2; speed=0.5' --schedule preemption.txt --max-restarts 1",
    "hetopt report",
)
COLUMNS = 80
ROWS = 24
SCREEN = "\f"
"""Ends what one command printed."""

STILL = 0
"""The command that is shown where nothing moves."""

LINE_S = 0.12
PROMPT_S = 1.2
READ_S = 2.6
_ADVANCE, _HEIGHT, _MARGIN = 7.8, 18, 16  # of a letter and a line, in pixels


def record() -> str:
    """Run the commands in a folder of two files; return the output of each behind its prompt.

    The files are the inventory on the page about two old GPUs and the example of a preemption. It needs root, as every
    rehearsal does. Refused on a busy machine: what is shown there is how far others change the speed of a machine.
    """
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        sys.exit("this machine is busy: record when it has nothing else to do, as `hetopt profile` asks for, too")
    said = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HETOPT_HOME": folder, "COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        inventory = re.search(r"```toml\n(.*?)```", (DOCS / "two-old-gpus.md").read_text(encoding="utf-8"), re.DOTALL)
        assert inventory
        Path(folder, "old_gpus.toml").write_text(inventory[1], encoding="utf-8")
        shutil.copy(DOCS.parent / "examples" / "preemption.txt", folder)
        for command in COMMANDS:
            # What happens on the way is told beside the result; where the command works is not shown.
            said_to = subprocess.STDOUT if " launch " in command else subprocess.DEVNULL
            done = subprocess.run(
                shlex.split(command), cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=said_to, text=True
            )
            if done.returncode:
                sys.exit(f"{command} failed with exit code {done.returncode}:\n{done.stdout}")
            rows = list(itertools.chain.from_iterable(map(_wrapped, done.stdout.strip("\n").splitlines())))
            typed = _wrapped(f"$ {command}")
            room = ROWS - len(typed)
            shown = rows if len(rows) <= room else [*rows[: room // 2], "...", *rows[room // 2 + 1 - room :]]
            said += [*typed, *shown, SCREEN]
    return "\n".join(said)


def _wrapped(row: str) -> list[str]:
    """Return a line as a terminal's rows show it."""
    return [row[start : start + COLUMNS].rstrip() for start in range(0, len(row) or 1, COLUMNS)]


def draw(said: str) -> str:
    """Return an animated picture of the commands' output: an SVG file that needs nothing else."""
    screens = [part.strip("\n").splitlines() for part in said.split(SCREEN) if part.strip()]
    whole_s = sum(PROMPT_S + LINE_S * len(rows) + READ_S for rows in screens)
    width, height = 2 * _MARGIN + _ADVANCE * COLUMNS, 2 * _MARGIN + _HEIGHT * ROWS
    frames, shapes, begin_s, still_s = [], [], 0.0, 0.0
    for screen, rows in enumerate(screens):
        end_s = begin_s + PROMPT_S + LINE_S * len(rows) + READ_S
        frames.append(_shown(f"s{screen}", begin_s / whole_s, end_s / whole_s))
        still_s = end_s - READ_S if screen == STILL else still_s
        kind = ' class="still"' if screen == STILL else ""
        shapes.append(f'<g{kind} style="animation-name:s{screen}">')
        for place, row in enumerate(rows):
            typed = place == 0 or (place == 1 and len(rows[0]) == COLUMNS)
            at_s = begin_s if typed else begin_s + PROMPT_S + LINE_S * place
            frames.append(_shown(f"l{screen}-{place}", at_s / whole_s, 1.0))
            kind = ' class="typed"' if typed else ""
            shapes.append(
                f'<text{kind} style="animation-name:l{screen}-{place}" x="{_MARGIN}" '
                f'y="{_MARGIN + _HEIGHT * (place + 0.75):.1f}">{escape(row)}</text>'
            )
        shapes.append("</g>")
        begin_s = end_s
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
            f'height="{height}" role="img" aria-labelledby="title">',
            '<title id="title">What hetopt printed: an estimate, a plan for owned GPUs, a profile, a plan, a run that '
            "loses a machine, and its report</title>",
            "<style>",
            "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d6dde6;"
            "white-space:pre}",
            ".typed{fill:#7ee0a8;font-weight:600}",
            "g{opacity:0}.still{opacity:1}",
            f"@media (prefers-reduced-motion:no-preference){{g,text{{animation-duration:{whole_s:.1f}s;"
            f"animation-delay:-{still_s:.1f}s;animation-iteration-count:infinite}}}}",
            *frames,
            "</style>",
            '<rect width="100%" height="100%" rx="8" fill="#161b22"/>',
            *shapes,
            "</svg>",
            "",
        ]
    )


def _shown(name: str, begin: float, end: float) -> str:
    """Return the CSS animation that shows an element between two fractions of the loop."""
    first, last = 100 * begin, 100 * end
    after = "" if end >= 1 else f"{last:.2f}%,100%{{opacity:0}}"
    before = "" if begin <= 0 else f"0%,{first:.2f}%{{opacity:0}}"
    return f"@keyframes {name}{{{before}{first + 0.01:.2f}%,{min(last, 100) - 0.01:.2f}%{{opacity:1}}{after}}}"


def main() -> None:
    """Write the picture, of commands that are run now or of those that were."""
    IMAGES.mkdir(exist_ok=True)
    if "--record" in sys.argv[1:]:
        SAID.write_text(record(), encoding="utf-8")
    PICTURE.write_text(draw(SAID.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
