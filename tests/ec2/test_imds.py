"""The metadata client speaks version 2 alone, renews its token, and takes silence for no news."""

from __future__ import annotations

import json
import time

import pytest

from benchmarks.box.metadata import metadata_service
from hetopt.backends.ec2.facts import METADATA_ENDPOINT_VARIABLE, METADATA_TOKEN_S
from hetopt.backends.ec2.node.imds import Imds, Notice, over_http
from tests.ec2.conftest import Patience

ID = "/latest/meta-data/instance-id"
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


def test_notices_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    with metadata_service({ID: "i-0123"}) as service:
        monkeypatch.setenv(METADATA_ENDPOINT_VARIABLE, service.url)
        imds = Imds(transport=over_http, clock=time.time)
        assert imds.instance_id() == "i-0123"
        assert imds.notice() is None, "404 is the normal answer"
        service.answers[REBALANCE] = json.dumps({"noticeTime": "2026-11-20T08:22:00Z"})
        assert imds.notice() == Notice(kind="rebalance", time_s=1795162920.0)
        service.answers[ACTION] = json.dumps({"action": "terminate", "time": "2026-11-20T08:24:00Z"})
        assert imds.notice() == Notice(kind="interruption", time_s=1795163040.0)
        assert len(service.tokens) == 1, "one token serves for hours"
        service.tokens.clear()
        assert imds.notice() is not None, "a token that was forgotten is renewed at once"
        assert service.refused == 1


def test_the_token_is_renewed_before_it_ends(monkeypatch: pytest.MonkeyPatch, patience: Patience) -> None:
    with metadata_service({ID: "i-0123"}) as service:
        monkeypatch.setenv(METADATA_ENDPOINT_VARIABLE, service.url)
        imds = Imds(transport=over_http, clock=patience.clock)
        imds.instance_id()
        patience.now_s += METADATA_TOKEN_S - 30
        imds.instance_id()
        assert len(service.tokens) == 2
        assert service.refused == 0


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"action": "none"}', '{"action": 3, "time": null}'])
def test_nonsense_is_no_notice(text: str) -> None:
    def transport(method: str, path: str, headers: object) -> tuple[int, bytes]:
        if method == "PUT":
            return 200, b"token"
        return (200, text.encode()) if path == ACTION else (404, b"")

    assert Imds(transport=transport, clock=time.time).notice() is None


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METADATA_ENDPOINT_VARIABLE, "http://127.0.0.1:9")
    imds = Imds(transport=over_http, clock=time.time)
    assert imds.instance_id() is None
    assert imds.notice() is None
