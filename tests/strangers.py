"""A script whose folder holds files with the names of modules that hetopt needs: they are the script's, not ours."""

from __future__ import annotations

from pathlib import Path

STRANGERS = ("hetopt", "json", "numpy", "torch", "typing")
SAID = "was imported for ours"


def put_strangers(folder: Path) -> None:
    """Modules that end whatever imports them."""
    for name in STRANGERS:
        (folder / f"{name}.py").write_text(f"raise SystemExit('the stranger {name}.py {SAID}')\n")


def script_among_strangers(folder: Path) -> Path:
    """A script that saves and resumes, with a module of its own, which a program that it starts finds too.

    It names the strangers, so that they travel with it.
    """
    own = (
        "import json, sys, subprocess, typing, numpy, own\n"
        "assert own.WHOSE == 'the script', own\n"
        "subprocess.run([sys.executable, '-c', 'import own'], check=True)\n"
    )
    script = folder / "train.py"
    script.write_text(own + (Path(__file__).parent / "scripts" / "resumable.py").read_text())
    (folder / "own.py").write_text("WHOSE = 'the script'\n")
    put_strangers(folder)
    return script
