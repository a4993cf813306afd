"""Writes what rented machines install: `python requirements/machines.py` (`make locks`) makes the files in
hetopt/backends/ec2/node/locks/.

Every package that training needs, in the version of constraints.txt, with the hashes of its wheels: for x86-64 and for
64-bit Arm, for machines with and without a GPU. uv resolves them for Python 3.12 as PyPI has them now.

torch for machines without a GPU is in an index of its own, and in a file of its own. Its hashes are read from that
index; where it cannot be reached, those in the file stay as they are, and that is said.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from hetopt.backends.ec2.bootstrap import CPU_TORCH_INDEX
from hetopt.backends.host.bundle import NEEDED

HERE = Path(__file__).resolve().parent
PINS = HERE / "constraints.txt"
LOCKS = HERE.parent / "hetopt" / "backends" / "ec2" / "node" / "locks"
PYTHON = "3.12"
PLATFORMS = {"x86_64": "x86_64-manylinux_2_28", "aarch64": "aarch64-manylinux_2_28"}
CUDA = re.compile(r"^(torch|triton|nvidia-|cuda-)")
"""What a machine without a GPU does not need."""


def resolved(platform: str) -> list[str]:
    """Return the packages of a platform with their hashes, as requirements of several lines each."""
    with tempfile.NamedTemporaryFile("w", suffix=".in") as asked:
        asked.write("\n".join(NEEDED))
        asked.flush()
        compiled = subprocess.run(
            [
                *("uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"),
                *("--no-emit-index-url", "--no-emit-find-links", "--only-binary", ":all:"),
                *("--python-version", PYTHON, "--python-platform", platform, "--constraints", str(PINS), asked.name),
            ],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    return re.findall(r"^\S.*(?:\n    .*)*", compiled, re.MULTILINE)


def torch_on_cpus(version: str, machine: str, before: Path) -> str:
    """Return the requirement of torch without CUDA, with the hash from its index, or the file's if that is offline."""
    wheel = f"torch-{version}%2Bcpu-cp312-cp312-manylinux_2_28_{machine}.whl"
    try:
        with urllib.request.urlopen(f"{CPU_TORCH_INDEX}/torch/", timeout=30) as answer:
            page = answer.read().decode()
    except (urllib.error.URLError, OSError) as error:
        kept = before.read_text(encoding="utf-8")
        if f"torch=={version}+cpu" not in kept:
            sys.exit(f"{CPU_TORCH_INDEX} cannot be reached ({error}), and {before} is of another version")
        print(f"{CPU_TORCH_INDEX} cannot be reached: {before.name} stays as it is", file=sys.stderr)
        return kept.partition("\n\n")[2]
    match = re.search(rf"{re.escape(wheel)}#sha256=([0-9a-f]{{64}})", page)
    if match is None:
        sys.exit(f"{CPU_TORCH_INDEX} has no {wheel} with a hash")
    return f"torch=={version}+cpu \\\n    --hash=sha256:{match[1]}\n"


def header(what: str) -> str:
    """Return the comment that opens a requirements file."""
    return f"# What a rented machine installs: {what}. Made by `make locks`.\n\n"


def lines(requirements: Iterable[str]) -> str:
    """Return requirements as the lines of a file."""
    return "\n".join(requirements) + "\n"


def main() -> None:
    """Write the requirements file of every kind of rented machine."""
    LOCKS.mkdir(exist_ok=True)
    for machine, platform in PLATFORMS.items():
        packages = resolved(platform)
        (torch,) = [package for package in packages if package.startswith("torch==")]
        version = torch.split("==")[1].split()[0]
        (LOCKS / f"{machine}-gpu.txt").write_text(header(f"{machine} with a GPU") + lines(packages), encoding="utf-8")
        light = [package for package in packages if not CUDA.match(package)]
        (LOCKS / f"{machine}-cpu.txt").write_text(header(f"{machine} without a GPU") + lines(light), encoding="utf-8")
        path = LOCKS / f"{machine}-cpu-torch.txt"
        torch = torch_on_cpus(version, machine, path)
        path.write_text(header(f"torch for {machine} without a GPU, from {CPU_TORCH_INDEX}") + torch, encoding="utf-8")


if __name__ == "__main__":
    main()
