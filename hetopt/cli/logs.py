"""`hetopt logs`: what the workers of a run printed, and its events, while it runs or after."""

from __future__ import annotations

import typer

from hetopt.cli.options import NewestRun


def logs(
    run: NewestRun = None,
    follow: bool = typer.Option(False, "--follow", "-f", help="Keep printing until the run is over."),
    events: bool = typer.Option(False, "--events", "--json", help="The event log (JSON Lines) instead of the output."),
    worker: int | None = typer.Option(None, "--worker", "-w", min=0, help="Only this worker's output."),
) -> None:
    """Print what the workers of a run wrote, each line behind its file's name; -f follows."""
    import time

    from hetopt.api.backends import backend_of, read_launch
    from hetopt.backends.backend import RunHandle
    from hetopt.backends.runs import RunFolders, runs_home
    from hetopt.cli import terminal
    from hetopt.core.errors import BadInput
    from hetopt.core.events.decisions import DECISIONS_FILE
    from hetopt.core.events.log import EVENTS_FILE
    from hetopt.core.worker_logs import log_files, read_from

    folder = RunFolders(home=runs_home()).find(run)
    launcher = backend_of(read_launch(folder), folder)
    offsets: dict[str, int] = {}
    while True:
        over = launcher.poll(RunHandle(run_dir=folder)).state.is_over
        told = {"events": folder / EVENTS_FILE, "decisions": folder / DECISIONS_FILE}
        files = told if events else log_files(folder, worker)
        if worker is not None and not files and over:
            raise BadInput(f"{folder.name} has no output of worker {worker}.", hint="`hetopt status` shows the workers")
        for label, path in files.items():
            text, offsets[label] = read_from(path, offsets.get(label, 0))
            for line in text.splitlines():
                terminal.write(f"{line}\n" if events else f"[{label}] {line}\n")
        terminal.flush()
        if over or not follow:
            return
        time.sleep(0.3)
