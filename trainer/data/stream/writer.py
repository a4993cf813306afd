"""Writes samples to a Redis Stream, each once even where the broker goes away in between."""

from __future__ import annotations

import time
from collections.abc import Callable

from hetopt.core.errors import RunFailed
from hetopt.trainer.data.fetch import Batch
from hetopt.trainer.data.stream.redis_source import (
    DATA_FIELD,
    HEADER_FIELD,
    EntryId,
    Unreachable,
    connect,
    entry_id,
    explained,
    id_text,
    place_of,
)
from hetopt.trainer.data.stream.wire import pack

_AT_ONCE = 500
_AGAIN_S = 0.1


class StreamWriter:
    """The only writer of a stream.

    It names entries itself (time, running number), so that after a lost answer the stream's last name tells what
    had arrived: nothing is written twice and nothing is left out.

    Args:
        url: of the broker; the password comes from ``HETOPT_REDIS_PASSWORD``.
        key: of the stream, such as ``hetopt:0``.
        max_samples: older samples are dropped beyond so many (truncation); None: all wait.
        max_age_s: samples that are older are dropped (bounded age); None: none is too old.
        patience_s: how long a broker that is away is waited for.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        max_samples: int | None = None,
        max_age_s: float | None = None,
        patience_s: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_samples is not None and max_age_s is not None:
            raise ValueError("a stream is bounded by the number of samples or by their age, not by both")
        self._url = url
        self._key = key
        self._max_samples = max_samples
        self._max_age_s = max_age_s
        self._patience_s = patience_s
        self._clock = clock
        self._client = connect(url)
        self._last: EntryId | None = None

    def write(self, batch: Batch) -> list[str]:
        """Append the samples of a batch; their names.

        Raises:
            BadInput: they cannot travel, or the broker refuses.
            RunFailed: the broker is full, or stays away.
        """
        header, data = pack(batch)
        names: list[EntryId] = []
        for first in range(0, len(data), _AT_ONCE):
            names += self._write(header, data[first : first + _AT_ONCE])
        return [id_text(name) for name in names]

    def close(self) -> None:
        """Let go of the broker."""
        self._client.close()

    def _write(self, header: bytes, data: list[bytes]) -> list[EntryId]:
        names: list[EntryId] | None = None
        done = 0
        begun_s = time.monotonic()
        while True:
            try:
                with explained(self._url, self._key):
                    if self._last is None or done < 0:
                        self._last = self._newest()
                    if names is None:
                        names = self._names(len(data))
                    done = sum(name <= self._last for name in names)
                    self._append(header, data[done:], names[done:])
                    self._last = names[-1]
                    return names
            except Unreachable as error:
                if time.monotonic() - begun_s > self._patience_s:
                    raise RunFailed(
                        f"the Redis at {place_of(self._url)} has not answered for {self._patience_s:g} s: {error}",
                        hint="start it again",
                    ) from None
                done = -1  # ask how far it got
                self._client.close()
                time.sleep(_AGAIN_S)

    def _append(self, header: bytes, data: list[bytes], names: list[EntryId]) -> None:
        if not data:
            return
        pipe = self._client.pipeline(transaction=False)
        for name, item in zip(names, data, strict=True):
            pipe.xadd(
                self._key,
                {HEADER_FIELD: header, DATA_FIELD: item},
                id=id_text(name),
                maxlen=self._max_samples,
                approximate=False,
            )
        if self._max_age_s is not None:
            oldest_ms = int((self._clock() - self._max_age_s) * 1000)
            pipe.xtrim(self._key, minid=id_text((max(0, oldest_ms), 0)), approximate=False)
        pipe.execute()

    def _names(self, count: int) -> list[EntryId]:
        assert self._last is not None
        now_ms = int(self._clock() * 1000)
        time_ms, sequence = self._last if self._last[0] >= now_ms else (now_ms, -1)
        return [(time_ms, sequence + 1 + number) for number in range(count)]

    def _newest(self) -> EntryId:
        """The name of the last entry that the stream has ever had."""
        from redis.exceptions import ResponseError

        try:
            return entry_id(self._client.xinfo_stream(self._key)["last-generated-id"])
        except ResponseError as error:
            if "no such key" in str(error).lower():
                return (0, 0)
            raise
