"""The code that a person brings travels with what it imports, or is refused before anything is rented."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from hetopt.backends.ec2.renter.bundle import MOST_BYTES, carried, distributions, make_bundle, user_code
from hetopt.core.errors import BadInput

PROVIDED = frozenset({"numpy", "torch", "scikit-learn"})


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder / "train.py"


def names(script: Path) -> list[str]:
    return [name for name, _ in user_code(script, provided=PROVIDED).files]


def test_modules_and_packages_of_its_folder_travel(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        train="import os, torch, layers, hetopt\nfrom net.blocks import Block\nfrom sklearn import datasets\n",
        layers="import sizes\n",
        sizes="N = 1\n",
        net__blocks="from . import parts\n",
        net__parts="import numpy\n",
        unused="import tensorflow\n",
    )
    assert names(script) == ["layers.py", "net/blocks.py", "net/parts.py", "sizes.py", "train.py"]


def test_what_machines_do_not_install_is_named_with_its_line(tmp_path: Path) -> None:
    script = write(tmp_path, train="import helper\n", helper="import torch\n\nimport made_up_package.sub\n")
    with pytest.raises(BadInput, match=r"helper\.py, line 3, imports made_up_package"):
        names(script)


def test_what_a_script_can_do_without_is_not_asked_for(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        train="from typing import TYPE_CHECKING\ntry:\n    import made_up\nexcept ImportError:\n    made_up = None\n"
        "if TYPE_CHECKING:\n    import other\n",
    )
    assert names(script) == ["train.py"]


def test_requirements_with_hashes_are_installed_and_others_do_not_count(tmp_path: Path) -> None:
    script = write(tmp_path, train="import made_up\n")
    (tmp_path / "requirements.txt").write_text("made-up==1.0 \\\n    --hash=sha256:00\n# a comment\n")
    assert names(script) == ["requirements.txt", "train.py"]
    (tmp_path / "requirements.txt").write_text("made-up==1.0\n")
    with pytest.raises(BadInput, match="imports made_up") as refused:
        names(script)
    assert "by version and hash" in (refused.value.hint or "")


def test_locks_are_read() -> None:
    assert distributions("numpy==2.1 \\\n  --hash=sha256:1\nScikit_Learn==1.5\n# torch==2\n") == {
        "numpy",
        "scikit-learn",
    }


def test_a_script_is_called_by_its_place_in_the_bundle(tmp_path: Path) -> None:
    script = write(
        tmp_path, train="import layers\nfrom hetopt import session\n", layers="import torch, numpy, sklearn\n"
    )
    bundle = make_bundle("train.py", [str(script), "--lr", "0.1"])
    assert bundle.script == ("task/train.py", "--lr", "0.1")
    with tarfile.open(fileobj=io.BytesIO(bundle.data)) as archive:
        assert {"task/train.py", "task/layers.py"} <= set(archive.getnames())


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    script = write(tmp_path / "code", train="import layers\n")
    (tmp_path / "layers.py").write_text("")
    (tmp_path / "code" / "layers.py").symlink_to(tmp_path / "layers.py")
    assert names(script) == ["layers.py", "train.py"], "what the link shows travels, under its own name"


def test_files_among_its_arguments_travel_and_folders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the script is given must be on the machine too: named before anything is rented, with what to do instead."""
    (tmp_path / "work" / "train").mkdir(parents=True)
    script = write(tmp_path / "work", train="import torch\n")
    (tmp_path / "work" / "small.yaml").write_text("lr: 1\n")
    (tmp_path / "other.yaml").write_text("lr: 2\n")
    monkeypatch.chdir(tmp_path)
    kept = ["--lr", "0.1", "--mode", "train", "--out=new/folder", "s3://bucket/x", "{data}", "~nobody/x", "x" * 5000]
    told = carried(script, [*kept, "--config=work/small.yaml", "--base", "other.yaml"])
    assert told.arguments == (*kept, "--config=small.yaml", "--base", "given-11/other.yaml")
    assert dict(told.files) == {"small.yaml": b"lr: 1\n", "given-11/other.yaml": b"lr: 2\n"}
    (tmp_path / "large.bin").write_bytes(bytes(MOST_BYTES + 1))
    for arguments, named in (
        (["--data", "work"], "the folder work"),
        (["work"], "the folder work"),
        (["--mode=./work"], r"the folder \./work"),
        (["--weights=large.bin"], "the file large.bin of 1,000,001 bytes"),
    ):
        with pytest.raises(BadInput, match=f"given {named}, which rented machines do not have") as refused:
            carried(script, arguments)
        assert "aws s3 sync" in (refused.value.hint or "")
        assert "{data}" in (refused.value.hint or "")
    bundle = make_bundle("train.py", [str(script), "--config", "work/small.yaml"])
    assert bundle.script == ("task/train.py", "--config", "small.yaml")
    with tarfile.open(fileobj=io.BytesIO(bundle.data)) as archive:
        assert "task/small.yaml" in archive.getnames()
