"""Installs wheels that are known by their hashes: ``python -m hetopt.backends.ec2.node.unpack WHEELS LOCK...``.

What pip would put into the environment that runs this, without what takes pip its time: it reads and hashes each file
once, and uses every processor. It needs nothing but the standard library, as it is run before there is more. It knows
the locks that hetopt makes, and people's own in the same form; of anything else it says so and leaves it to pip.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from hetopt.core.paths import inside

_PIECE_BYTES = 2**20
_REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+((?: -{2}hash=sha256:[0-9a-f]{64})+)")
_DATA = re.compile(r"[^/]+\.data/(purelib|platlib|scripts|data)/(.+)")


def requirements(text: str) -> Iterator[frozenset[str]]:
    """Yield, for each requirement in the text of a lock file, the set of SHA-256 digests (hex) that it accepts.

    Raises:
        ValueError: a line is no requirement by version and hash.
    """
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _REQUIREMENT.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"{line.strip()[:80]!r} is no requirement by version and hash")
        yield frozenset(re.findall(r"[0-9a-f]{64}", match[1]))


def unpack(wheels: Sequence[Path], locks: Iterable[str], site: Path, prefix: Path) -> None:
    """Install wheels into an environment, in parallel, if their hashes are exactly what the locks' requirements accept.

    Args:
        wheels: that there are.
        locks: texts of lock files.
        site: where packages are imported from.
        prefix: of the environment, whose scripts and other data some wheels bring.

    Raises:
        ValueError: a wheel is missing, or not one of the locks.
        BadInput: a wheel has a file that would be elsewhere.
        OSError, zipfile.BadZipFile: a wheel cannot be read, or a file not be written.
    """
    wanted = [accepted for text in locks for accepted in requirements(text)]
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers) as pool:
        hashes = dict(zip(pool.map(_sha256, wheels), wheels, strict=True))
        missing = [accepted for accepted in wanted if not accepted & set(hashes)]
        strange = [path.name for digest, path in hashes.items() if not any(digest in accepted for accepted in wanted)]
        if missing or strange:
            raise ValueError(f"{len(missing)} of {len(wanted)} wheels are missing, and {len(strange)} are of no lock")
        parts = [(path, site, prefix, part, workers) for path in wheels for part in range(workers)]
        for _ in pool.map(_unpack_part, parts):
            pass


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unpack_part(job: tuple[Path, Path, Path, int, int]) -> None:
    """Unpack every n-th file of a wheel."""
    path, site, prefix, part, parts = job
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist()[part::parts]:
            place = None if entry.is_dir() else _place(entry.filename, site, prefix)
            if place is None:
                continue
            target = inside(*place, what="file of a wheel", any_text=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as source, target.open("wb") as stream:
                shutil.copyfileobj(source, stream, _PIECE_BYTES)
            if (entry.external_attr >> 16) & 0o111:
                target.chmod(0o755)


def _place(name: str, site: Path, prefix: Path) -> tuple[Path, str] | None:
    """Return a wheel file's root and path (binary distribution format of packaging.python.org); None: not needed."""
    if name.startswith("/"):
        raise ValueError(f"{name!r} is no place inside a wheel")
    data = _DATA.fullmatch(name)
    if data is None:
        return None if re.match(r"[^/]+\.data/", name) else (site, name)
    return {"scripts": prefix / "bin", "data": prefix}.get(data[1], site), data[2]


def main(arguments: Sequence[str]) -> int:
    """Install the wheels of a folder by lock files into this environment; return 1 to leave that to pip, else 0."""
    folder, *locks = map(Path, arguments)
    texts = [path.read_text(encoding="utf-8") for path in locks]
    try:
        unpack(
            sorted(folder.glob("*.whl")), texts, Path(sysconfig.get_path("platlib")), Path(sysconfig.get_path("data"))
        )
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        print(f"the wheels are left to pip: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
