"""A server on this machine that speaks AWS's public price feeds, with prices that are made here."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hetopt.optimizer.market.catalog import BUNDLED

# The columns of a price list of EC2 that matter, among others of the more than a hundred that there are.
COLUMNS = (
    *("SKU", "OfferTermCode", "RateCode", "TermType", "PriceDescription", "EffectiveDate", "StartingRange"),
    *("EndingRange", "Unit", "PricePerUnit", "Currency", "RelatedTo", "LeaseContractLength", "PurchaseOption"),
    *("OfferingClass", "Product Family", "serviceCode", "Location", "Location Type", "Instance Type"),
    *("Current Generation", "Instance Family", "vCPU", "Physical Processor", "Clock Speed", "Memory", "Storage"),
    *("Network Performance", "Processor Architecture", "Tenancy", "Operating System", "License Model", "usageType"),
    *("operation", "CapacityStatus", "Dedicated EBS Throughput", "ECU", "Enhanced Networking Supported", "GPU Memory"),
    *("MarketOption", "Normalization Size Factor", "Pre Installed S/W", "Processor Features", "Region Code"),
    *("serviceName", *(f"Other {number}" for number in range(50))),
)
REGION = "eu-west-1"
_LINES = (BUNDLED / "instance_types.csv").read_text(encoding="utf-8").splitlines()
TYPES = tuple(line.split(",", 1)[0] for line in _LINES[1:])
LAST_MODIFIED = "Thu, 19 Nov 2026 10:00:00 GMT"


def usd_of(name: str, factor: float = 1.0) -> float:
    """A price of a type that only depends on its name."""
    return round(factor * (0.05 + int(hashlib.sha256(name.encode()).hexdigest()[:6], 16) / 1e6), 4)


def row(name: str, usd: float | str, **cells: str) -> dict[str, str]:
    """A row that is the price of an hour on demand, but for the cells that are named (``_`` for a space)."""
    price = usd if isinstance(usd, str) else f"{usd:.10f}"
    made = dict.fromkeys(COLUMNS, "")
    made |= {
        "SKU": hashlib.sha256(name.encode()).hexdigest()[:16].upper(),
        "TermType": "OnDemand",
        "PriceDescription": f"${price} per On Demand Linux {name} Instance Hour, and a comma",
        "Unit": "Hrs",
        "PricePerUnit": price,
        "Currency": "USD",
        "Product Family": "Compute Instance",
        "serviceCode": "AmazonEC2",
        "Location Type": "AWS Region",
        "Instance Type": name,
        "Tenancy": "Shared",
        "Operating System": "Linux",
        "License Model": "No License required",
        "operation": "RunInstances",
        "CapacityStatus": "Used",
        "MarketOption": "OnDemand",
        "Pre Installed S/W": "NA",
        "Processor Features": "Intel AVX; Intel AVX2; Intel Turbo",
        "Region Code": REGION,
        "serviceName": "Amazon Elastic Compute Cloud",
    }
    return made | {column.replace("_", " "): value for column, value in cells.items()}


def others(name: str) -> Iterator[dict[str, str]]:
    """Rows of a type that are no price of an hour on demand, each for another reason."""
    yield row(name, 99.0, TermType="Reserved", LeaseContractLength="1yr", PurchaseOption="No Upfront")
    yield row(name, 99.0, Tenancy="Dedicated")
    yield row(name, 99.0, Operating_System="Windows", License_Model="License Included")
    yield row(name, 99.0, CapacityStatus="UnusedCapacityReservation")
    yield row(name, 99.0, CapacityStatus="AllocatedCapacityReservation") | {"Pre Installed S/W": "SQL Ent"}
    yield row(name, 99.0, Location_Type="AWS Local Zone")
    yield row(name, 0.0, MarketOption="CapacityBlock")


def price_list(rows: Iterator[dict[str, str]], *, published: str = "2026-11-25T17:45:21Z") -> bytes:
    """A price list of these rows."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for fact in (
        ("FormatVersion", "v1.0"),
        ("Disclaimer", "For information only, as the pages on http://aws.amazon.com"),
        ("Publication Date", published),
        ("Version", "20261125174521"),
        ("OfferCode", "AmazonEC2"),
        COLUMNS,
    ):
        writer.writerow(fact)
    for cells in rows:
        writer.writerow([cells[column] for column in COLUMNS])
    return text.getvalue().encode()


def rows_of(names: Iterator[str] | tuple[str, ...], factor: float = 1.0) -> Iterator[dict[str, str]]:
    """The rows of these types."""
    for name in names:
        yield row(name, usd_of(name, factor))
        yield from others(name)


def reserved(bytes_wanted: int) -> bytes:
    """About so many bytes of reservations, as most of a price list is."""
    some = price_list(others_of_some()).split(b"\n", 6)[-1]
    return some * max(1, bytes_wanted // len(some))


def others_of_some() -> Iterator[dict[str, str]]:
    """Reservations of some types."""
    for name in random.Random(1).sample(TYPES, 200):
        yield row(name, 0.5, TermType="Reserved", LeaseContractLength="3yr", OfferingClass="standard")


def spot_feed(prices: dict[str, dict[str, str]], currencies: tuple[str, ...] = ("USD",)) -> bytes:
    """The spot price feed, of prices by region and type."""
    regions = [
        {
            "region": region,
            "footnotes": {"*": "notAvailable"},
            "instanceTypes": [
                {
                    "type": "gpuCurrentGen",
                    "sizes": [
                        {
                            "size": name,
                            "valueColumns": [
                                {"name": "linux", "prices": {"USD": usd}},
                                {"name": "mswin", "prices": {"USD": "77"}},
                            ],
                        }
                        for name, usd in here.items()
                    ],
                }
            ],
        }
        for region, here in prices.items()
    ]
    config = {"rate": "perhr", "valueColumns": ["linux", "mswin"], "currencies": list(currencies), "regions": regions}
    return json.dumps({"vers": 0.01, "config": config}).encode()


def advisor(advice: dict[str, dict[str, tuple[int, int]]]) -> bytes:
    """The Spot Advisor's data, of saving and band index by region and type."""
    labels = ("<5%", "5-10%", "10-15%", "15-20%", ">20%")
    return json.dumps(
        {
            "ranges": [{"index": index, "label": label, "dots": 0, "max": 5} for index, label in enumerate(labels)],
            "instance_types": {},
            "spot_advisor": {
                region: {"Linux": {name: {"s": saving, "r": band} for name, (saving, band) in here.items()}}
                for region, here in advice.items()
            },
        }
    ).encode()


@dataclass
class Feeds:
    """What the server has, and how it answers.

    Attributes:
        files: by path: bytes, or a file on the disk.
        packs: whether it packs what it sends, for those who take that.
        cuts: after how many bytes the next answers end, one after another; then none does.
        bytes_per_s: at most.
        answers: by path: another status, headers and body.
        asked: path, headers and status of every request.
        sent: bytes.
    """

    url: str = ""
    files: dict[str, bytes | Path] = field(default_factory=dict)
    packs: bool = False
    cuts: list[int] = field(default_factory=list)
    bytes_per_s: float | None = None
    answers: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str], int]] = field(default_factory=list)
    sent: int = 0

    def fill(
        self,
        *,
        factor: float = 1.0,
        regions: tuple[str, ...] = (REGION,),
        names: tuple[str, ...] = TYPES,
        padding: bytes = b"",
        version: str = "20261125174521",
    ) -> None:
        """Prices that are ``factor`` times `usd_of` on demand, and a third of that on spot."""
        paths = {region: f"/offers/v1.0/aws/AmazonEC2/{version}/{region}/index" for region in regions}
        index = {region: {"regionCode": region, "currentVersionUrl": f"{path}.json"} for region, path in paths.items()}
        local = {"us-east-1-atl-1": {"currentVersionUrl": "/offers/v1.0/aws/AmazonEC2/1/us-east-1-atl-1/index.json"}}
        self.files["/offers/v1.0/aws/AmazonEC2/current/region_index.json"] = json.dumps(
            {"formatVersion": "v1.0", "publicationDate": "2026-11-25T17:45:21Z", "regions": index | local}
        ).encode()
        for path in paths.values():
            self.files[f"{path}.csv"] = price_list(rows_of(names, factor)) + padding
        spot = {name: f"{usd_of(name, factor) / 3:.4f}" for name in names}
        self.files["/spot.json"] = spot_feed(dict.fromkeys(regions, spot))
        self.files["/spot-advisor-data.json"] = advisor(dict.fromkeys(regions, dict.fromkeys(names, (66, 1))))

    @property
    def list_path(self) -> str:
        """The path of the first price list."""
        return next(path for path in self.files if path.endswith(".csv"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    feeds: Feeds

    def do_GET(self) -> None:
        feeds = self.feeds
        self.close_connection = True
        if self.path in feeds.answers:
            status, headers, body = feeds.answers[self.path]
            self._begin(status, {"Content-Length": str(len(body)), **headers})
            self.wfile.write(body)
            return
        if self.path not in feeds.files:
            self._begin(404, {"Content-Length": "0"})
            return
        content = feeds.files[self.path]
        body = content if isinstance(content, bytes) else content.read_bytes()
        headers = {"Last-Modified": LAST_MODIFIED, "Content-Type": "text/csv"}
        if feeds.packs and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = gzip.compress(body, 1, mtime=0), "gzip"
        self._begin(200, {**headers, "Content-Length": str(len(body))})
        self._send(body[: feeds.cuts.pop(0)] if self.path.endswith(".csv") and feeds.cuts else body)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.feeds.asked.append((self.path, dict(self.headers), status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, body: bytes) -> None:
        view = memoryview(body)
        for place in range(0, len(body), 1 << 16):
            piece = view[place : place + (1 << 16)]
            self.wfile.write(piece)
            self.feeds.sent += len(piece)
            if self.feeds.bytes_per_s:
                time.sleep(len(piece) / self.feeds.bytes_per_s)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Readers that go away are what is tested."""


@contextmanager
def serving() -> Iterator[Feeds]:
    """Feeds on a port of this machine."""
    feeds = Feeds()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"feeds": feeds}))
    feeds.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield feeds
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
