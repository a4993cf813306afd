"""A real Redis as the source: order, what is delivered again, what goes away, and everything that can be wrong."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks._ports import own_port
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.run_spec import Stream
from hetopt.trainer.data.fetch import TensorPairs
from hetopt.trainer.data.stream.redis_source import ReceivedSamples, RedisSource
from hetopt.trainer.data.stream.wire import header_of
from hetopt.trainer.data.stream.writer import StreamWriter
from tests.trainer.streams.redis_server import DURABLE, RedisServer

OWN = TensorPairs(torch.full((10,), -1), torch.zeros(10))


def numbers(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(first, last), torch.arange(first, last).float()


class Reader:
    """A source with its samples, closed at the end of a test."""

    def __init__(self, url: str, key: str, *, rank: int = 0, workers: int = 1, **fields: Any) -> None:
        self.samples = ReceivedSamples(OWN)
        self.told: list[str] = []
        self.source = RedisSource(
            Stream(source="redis", url=url, key=key, **fields),
            rank,
            workers,
            samples=self.samples,
            expected=header_of(OWN.gather([0])),
            tell=self.told.append,
        )

    def take(self, count: int) -> list[int]:
        batch = self.samples.gather(self.source.take(count).names)
        assert isinstance(batch, tuple)
        assert torch.equal(batch[0].float(), batch[1])
        return list(batch[0].tolist())

    def go_on(self, place: dict[str, int] | None = None) -> Reader:
        if place is not None:
            self.source.go_to(place)
        self.source.begin()
        return self


@pytest.fixture
def readers() -> Iterator[Callable[..., Reader]]:
    made: list[Reader] = []

    def make(*arguments: Any, **fields: Any) -> Reader:
        made.append(Reader(*arguments, **fields))
        return made[-1]

    yield make
    for reader in made:
        reader.source.close()


def client(url: str) -> Any:
    from hetopt.trainer.data.stream.redis_source import connect

    return connect(url)


def pending(url: str, stream: str) -> int:
    connection = client(url)
    count = int(connection.xpending(stream, "hetopt")["pending"])
    connection.close()
    return count


def write(url: str, stream: str, first: int, last: int, **bounds: Any) -> None:
    writer = StreamWriter(url, stream, **bounds)
    writer.write(numbers(first, last))
    writer.close()


def test_samples_come_in_order_and_once(server: RedisServer, key: str, readers: Callable[..., Reader]) -> None:
    write(server.url, f"{key}:0", 0, 1000)
    reader = readers(server.url, key).go_on()
    seen: list[int] = []
    for count in [1, 7, 250, 64, 3, 400, 275]:
        seen += reader.take(count)
    assert seen == list(range(1000))
    assert reader.source.flow().repeated == 0


def test_the_task_is_warmed_up_with_its_own_samples(
    server: RedisServer, key: str, readers: Callable[..., Reader]
) -> None:
    write(server.url, f"{key}:0", 0, 100)
    reader = readers(server.url, key).go_on()
    before = reader.samples.gather(range(3))
    assert isinstance(before, tuple)
    assert before[0].tolist() == [-1] * 3
    names = reader.source.take(10).names
    part = reader.samples.gather(names[np.array([3, 5, 6])])
    assert isinstance(part, tuple)
    assert part[0].tolist() == [3, 5, 6]


def test_a_crash_repeats_nothing_that_is_in_the_checkpoint_and_loses_nothing(
    server: RedisServer, key: str, readers: Callable[..., Reader]
) -> None:
    """Runs that crash anywhere; each goes on from the last checkpoint or, when that is damaged, the one before."""
    chance = random.Random(4)
    write(server.url, f"{key}:0", 0, 6000)
    checkpoints: list[tuple[dict[str, int], list[int]]] = [({}, [])]
    repeated = 0
    while len(checkpoints[-1][1]) < 5000:
        place, model = chance.choice(checkpoints)
        checkpoints = [kept for kept in checkpoints if len(kept[1]) <= len(model)]
        model = list(model)
        reader = readers(server.url, key).go_on(place or None)
        for _ in range(chance.randrange(8)):
            model += reader.take(chance.randrange(1, 200))
            if chance.random() < 0.5:
                saved = dict(reader.source.place())
                checkpoints = [*checkpoints[-1:], (saved, list(model))]
                if chance.random() < 0.8:
                    reader.source.committed(saved)
        assert model == list(range(len(model)))
        repeated += reader.source.flow().repeated
        reader.source._thread.shutdown(wait=True)  # a crash: nothing else of it goes on, nothing is said
        reader.source._client.close()
    assert repeated > 0


def test_it_is_acknowledged_when_two_checkpoints_hold_it_and_all_of_it_at_the_end(
    server: RedisServer, key: str, readers: Callable[..., Reader]
) -> None:
    write(server.url, f"{key}:0", 0, 300)
    reader = readers(server.url, key, delete_trained=True).go_on()
    reader.take(100)
    reader.source.committed(first := dict(reader.source.place()))
    reader.take(100)
    assert pending(server.url, f"{key}:0") >= 200
    reader.source.committed(dict(reader.source.place()))
    reader.source.close()
    assert first["time_ms_of_0"] > 0
    assert pending(server.url, f"{key}:0") <= 200
    again = readers(server.url, key, delete_trained=True).go_on(dict(reader.source.place()))
    assert again.take(100) == list(range(200, 300))
    again.source.committed(dict(again.source.place()), is_last=True)
    again.source.close()
    assert pending(server.url, f"{key}:0") == 0


def test_workers_share_streams_that_are_more_than_they(
    server: RedisServer, key: str, readers: Callable[..., Reader]
) -> None:
    for number in range(3):
        write(server.url, f"{key}:{number}", 1000 * number, 1000 * number + 50)
    first = readers(server.url, key, rank=0, workers=2, streams=3).go_on()
    second = readers(server.url, key, rank=1, workers=2, streams=3).go_on()
    own = first.take(100)
    assert sorted(own) == [*range(50), *range(2000, 2050)]
    assert second.take(50) == list(range(1000, 1050))
    # One worker is left: it reads all of them, and the place of both is its own.
    places = [first.source.place(), second.source.place()]
    together = {name: places[0][name] + places[1][name] for name in places[0]}
    for number in range(3):
        write(server.url, f"{key}:{number}", 1000 * number + 50, 1000 * number + 60)
    alone = readers(server.url, key, streams=3).go_on(together)
    expected = [1000 * number + place for number in range(3) for place in range(50, 60)]
    assert sorted(alone.take(30)) == expected
    with pytest.raises(BadInput, match="4 workers cannot share 3 streams: worker 3 would have no samples"):
        readers(server.url, key, workers=4, streams=3)


def test_a_bounded_stream_holds_the_newest(server: RedisServer, key: str, readers: Callable[..., Reader]) -> None:
    write(server.url, f"{key}:0", 0, 400, max_samples=100)
    assert readers(server.url, key).go_on().take(100) == list(range(300, 400))
    aged = StreamWriter(server.url, f"{key}-aged:0", max_age_s=0.2)
    aged.write(numbers(0, 50))
    time.sleep(0.3)
    aged.write(numbers(50, 60))
    aged.close()
    assert readers(server.url, f"{key}-aged").go_on().take(10) == list(range(50, 60))


def test_samples_that_were_dropped_after_delivery_are_counted(
    server: RedisServer, key: str, readers: Callable[..., Reader]
) -> None:
    write(server.url, f"{key}:0", 0, 100)
    first = readers(server.url, key).go_on()
    first.take(60)  # all 100 were delivered or are about to be
    first.source.close()
    write(server.url, f"{key}:0", 100, 130, max_samples=50)
    second = readers(server.url, key).go_on({"time_ms_of_0": 0, "sequence_of_0": 0})
    assert second.take(50) == list(range(80, 130))
    flow = second.source.flow()
    assert flow.dropped > 0
    assert flow.repeated >= flow.dropped


def test_a_broker_that_is_killed_loses_and_repeats_nothing(
    own_server: Callable[..., RedisServer], key: str, readers: Callable[..., Reader]
) -> None:
    server = own_server(*DURABLE)
    chance = random.Random(1)
    total = 4000
    stopped = threading.Event()

    def produce() -> None:
        writer = StreamWriter(server.url, f"{key}:0")
        for first in range(0, total, 40):
            writer.write(numbers(first, first + 40))
            time.sleep(0.005)
        writer.close()
        stopped.set()

    thread = threading.Thread(target=produce)
    thread.start()
    reader = readers(server.url, key).go_on()
    seen: list[int] = []
    kills = 0
    while len(seen) < total:
        seen += reader.take(min(chance.randrange(1, 150), total - len(seen)))
        if chance.random() < 0.3:
            reader.source.committed(dict(reader.source.place()))
        if kills < 4 and len(seen) > (kills + 1) * total // 6:
            server.kill()
            time.sleep(chance.uniform(0, 0.1))
            server.start()
            kills += 1
    thread.join()
    assert kills == 4
    assert seen == list(range(total))
    assert stopped.is_set()


def test_a_broker_that_is_away_is_waited_for_and_told_about(
    own_server: Callable[..., RedisServer], key: str, readers: Callable[..., Reader]
) -> None:
    server = own_server(*DURABLE)
    write(server.url, f"{key}:0", 0, 40)
    reader = readers(server.url, key, patience_s=5.0).go_on()
    assert reader.take(10) == list(range(10))
    server.kill()
    with pytest.raises(RunFailed, match="has not answered for 5 s"):
        reader.take(200)
    assert any(f"waits for the Redis at {server.address}" in told for told in reader.told)


def test_a_stream_that_stops_ends_the_run_with_its_name(
    server: RedisServer, key: str, readers: Callable[..., Reader]
) -> None:
    write(server.url, f"{key}:0", 0, 10)
    reader = readers(server.url, key, patience_s=4).go_on()
    with pytest.raises(
        RunFailed, match=f"for a batch of 11: 10 samples are here, and no more come from {key}:0"
    ) as caught:
        reader.take(11)
    assert "writer" in str(caught.value.hint)
    assert reader.source.flow().rate_per_s in (-1.0, 0.0)


def test_an_absent_broker_is_named_at_once(key: str, readers: Callable[..., Reader]) -> None:
    address, port = own_port()
    with pytest.raises(BadInput, match=f"no Redis answers at {address}:{port}"):
        readers(f"redis://{address}:{port}/0", key).go_on()


def test_passwords_are_asked_for_and_refused_in_words(
    own_server: Callable[..., RedisServer], key: str, readers: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = own_server("--requirepass", "right")
    monkeypatch.delenv("HETOPT_REDIS_PASSWORD", raising=False)
    with pytest.raises(BadInput, match="asks for a password"):
        readers(server.url, key).go_on()
    monkeypatch.setenv("HETOPT_REDIS_PASSWORD", "wrong")
    with pytest.raises(BadInput, match="refuses the password"):
        readers(server.url, key).go_on()
    monkeypatch.setenv("HETOPT_REDIS_PASSWORD", "right")
    write(server.url, f"{key}:0", 0, 5)
    assert readers(server.url, key).go_on().take(5) == list(range(5))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"text": "hello"}, "has no field 'header'"),
        ({"header": "{}", "data": "x"}, "header that says nothing"),
        ({"header": '{"tuple":[{"dtype":"int64","shape":[]}]}', "data": "x" * 8}, "are int64.*, and those of the task"),
        (
            {"header": '{"tuple":[{"dtype":"int64","shape":[]},{"dtype":"float32","shape":[]}]}', "data": "x" * 11},
            "has 11 bytes; its header says 12",
        ),
    ],
)
def test_entries_that_are_no_samples_end_the_run(
    server: RedisServer, key: str, readers: Callable[..., Reader], entry: dict[str, str], said: str
) -> None:
    connection = client(server.url)
    connection.xadd(f"{key}:0", entry)
    connection.close()
    with pytest.raises(RunFailed, match=said):
        readers(server.url, key, patience_s=60).go_on().take(1)
