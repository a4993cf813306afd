"""Which build of torch is fetched: without CUDA where there is no GPU, and nobody waits long for an index."""

from __future__ import annotations

import importlib.util
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.shown import assert_shown


@pytest.fixture
def torch_index(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "requirements" / "torch_index.py"
    spec = importlib.util.spec_from_file_location("torch_index", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    return module


class Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/whl/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def index() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/whl/cpu"
        server.shutdown()


def test_a_machine_without_a_gpu_fetches_the_smaller_build(
    torch_index: ModuleType, index: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert torch_index.option(index) == f"--extra-index-url {index}"
    said = capsys.readouterr().err.replace(index, torch_index.INDEX)
    assert_shown("quickstart.md", "pip install", said)


def test_a_machine_with_a_gpu_fetches_what_it_needs(
    torch_index: ModuleType, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_index, "has_gpu", lambda: True)
    assert torch_index.option(index) == ""


def test_an_index_without_torch_or_that_is_not_there_is_left_out(
    torch_index: ModuleType, index: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert torch_index.option(index.replace("cpu", "moon")) == ""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert torch_index.option(f"http://127.0.0.1:{closed.getsockname()[1]}/whl/cpu") == ""
    assert "does not answer" in capsys.readouterr().err


def test_an_index_that_never_answers_is_not_waited_for(
    torch_index: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_index, "WITHIN_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        begun = time.monotonic()
        assert torch_index.option(f"http://127.0.0.1:{silent.getsockname()[1]}/whl/cpu") == ""
        assert time.monotonic() - begun < 60
