"""What every test stands on: no network, no real credentials, one thread a process, shared data, golden files."""

from __future__ import annotations

import fcntl
import gc
import ipaddress
import os
import pickle
import signal
import socket
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.disturbance import MOST_STOLEN, CoreTime
from tests.forked_hosts import forked_hosts

REPOSITORY = Path(__file__).resolve().parent.parent
DATA_VARIABLE = "HETOPT_SHARED_DATA"

# Files that take longest. They go first: where tests run side by side, none is left for the end, alone.
LONGEST = (
    "test_training_laws.py",
    "test_launcher.py",
    "test_backend.py",
    "test_unchanged_scripts.py",
    "test_strangers.py",
    "test_script_corpus.py",
    "test_script_worlds.py",
    "test_agent.py",
    "test_runs.py",
    "test_rehearsal.py",
    "test_signals.py",
    "test_own_code.py",
    "test_readme.py",
)

# Nobody looks for cycles among what is imported and collected: it stays.
gc.disable()

# Set before any test imports numpy or torch: their thread pools read it once. Worker processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

# A busy machine is slow, not wrong: examples have no deadline of their own (tests have one, see pyproject.toml).
# New examples are tried in every run, so that few of them a run are many in a week; `--slow` tries many at once.
settings.register_profile("hetopt", deadline=None, max_examples=10)
settings.register_profile("slow", deadline=None, max_examples=200)
settings.load_profile("hetopt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="rewrite golden and recorded files instead of comparing")
    parser.addoption("--slow", action="store_true", help="also run the long form of checks that have a quick one")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slow"):
        settings.load_profile("slow")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("long form; runs with --slow")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of rented machines go to one process of tests: each would start a server of its own, for seconds."""
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/ec2" if nodeid.startswith("tests/ec2/") else super()._split_scope(nodeid)

    return ByServer(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture
def own_leftovers() -> Iterator[None]:
    """What killed rehearsals leave behind is the machine's: no other test leaves any, or sweeps, meanwhile."""
    with (Path(tempfile.gettempdir()) / "hetopt-tests-leftovers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A time that is not what it should be says nothing where others had this machine's cores meanwhile."""
    if pyfuncitem.get_closest_marker("timed") is None:
        return (yield)
    begun = CoreTime.now()
    try:
        return (yield)
    except AssertionError as error:
        stolen = CoreTime.now().stolen_since(begun)
        if stolen > MOST_STOLEN:
            pytest.skip(f"others had {stolen:.0%} of the cores' time while this was measured: {str(error)[:200]}")
        raise


@pytest.fixture(scope="session", autouse=True)
def _hermetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs go to a temporary home, AWS sees credentials that open nothing, and only this machine is reachable."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("AWS_", "HETOPT_")) and name != DATA_VARIABLE]:
            patch.delenv(name)
        patch.setenv("HETOPT_HOME", str(tmp_path_factory.mktemp("hetopt-home")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_SESSION_TOKEN", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        # Processes that tests start have no guarded sockets: what they say to AWS goes to a port where nobody listens.
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        patch.setenv("HETOPT_PRICE_MIRROR", "http://127.0.0.1:9")
        patch.setattr(socket.socket, "connect", _guarded(socket.socket.connect))
        patch.setattr(socket.socket, "connect_ex", _guarded(socket.socket.connect_ex))
        yield


@pytest.fixture(scope="session", autouse=True)
def _heard_interrupts() -> Iterator[None]:
    """Processes that tests start hear Ctrl-C and SIGHUP, even where a shell or nohup runs the tests without either."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [number for number in defaults if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, defaults[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session", autouse=True)
def _fitted_once() -> Iterator[None]:
    """Steps of one profile, which most plans of tests are of, are fitted once; who tests the fit calls it itself."""
    from hetopt.optimizer.step_time import model

    plain, fitted = model.fit, dict[bytes, Any]()

    def fit(*samples: object, **priors: object) -> object:
        key = pickle.dumps(samples) + repr(priors).encode()
        return fitted[key] if key in fitted else fitted.setdefault(key, plain(*samples, **priors))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "fit", fit)
        yield


@pytest.fixture(scope="session", autouse=True)
def _hosts_are_forks(_hermetic: None) -> Iterator[None]:
    with forked_hosts():
        yield


def _guarded(connect: Callable[[socket.socket, Any], Any]) -> Callable[[socket.socket, Any], Any]:
    """``connect`` for addresses of this machine; any other is a failed test."""

    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
            pytest.fail(f"a test tried to reach {address[0]}:{address[1]} over the network", pytrace=True)
        return connect(self, address)

    return guarded


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets and published figures; tests that need it are skipped where it is absent."""
    path = Path(os.environ.get(DATA_VARIABLE) or REPOSITORY.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip(f"no data at {path}; set {DATA_VARIABLE} to its folder")
    return path


@pytest.fixture(scope="session")
def recording(pytestconfig: pytest.Config) -> bool:
    """Whether golden and recorded files are to be rewritten (`--record`)."""
    return bool(pytestconfig.getoption("--record"))


@pytest.fixture
def golden(request: pytest.FixtureRequest, recording: bool) -> Callable[[str, str], None]:
    """``golden(name, text)`` compares ``text`` with the file ``golden/<name>`` beside the test, or rewrites it."""
    folder = request.path.parent / "golden"

    def compare(name: str, text: str) -> None:
        path = folder / name
        if recording:
            folder.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing; write it with --record"
        assert text == path.read_text(encoding="utf-8"), f"differs from {path}; --record accepts the new text"

    return compare
