"""`hetopt profile --from-samples` and `hetopt predict` as a person or a program runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.disturbance import PATIENCE_S
from tests.face.conftest import Answer

Hetopt = Callable[..., Answer]
COMMAND = (sys.executable, "-m", "hetopt.cli.main")


def row(layout: tuple[int, ...], batch: int, *, type_: str = "gpu", **more: object) -> dict[str, object]:
    return {"nodes": [{"type": type_, "workers": workers} for workers in layout], "local_batch_size": batch, **more}


def lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(one) + "\n" for one in rows)


def measured(type_: str = "gpu") -> list[dict[str, object]]:
    """Computing 20 ms and 1 ms a sample; exchanging by a ring of 100 ms between nodes, 30 ms inside."""
    found = []
    for layout in ((1,), (2,), (4,), (1, 1), (2, 2)):
        workers = sum(layout)
        exchange = (0.1 if len(layout) > 1 else 0.03) * 2 * (workers - 1) / workers
        for batch in (8, 32, 128):
            compute = 0.02 + 0.001 * batch
            step = 0.3 * compute + ((0.7 * compute) ** 4 + exchange**4) ** 0.25
            found.append(row(layout, batch, type_=type_, step_time_s=step))
    return found


@pytest.fixture
def profile(hetopt: Hetopt, tmp_path: Path) -> Path:
    samples, path = tmp_path / "samples.jsonl", tmp_path / "p.json"
    samples.write_text(lines(measured()))
    answer = hetopt("profile", "--from-samples", samples, "-o", path)
    assert answer.code == 0, answer.err
    assert "15 step times of 5 layouts" in answer.out
    return path


def refused(answer: Answer, said: str) -> None:
    error = " ".join(answer.err.split())
    assert answer.code == 2
    assert said in error
    assert "→" in error
    assert "Traceback" not in error


def test_every_line_comes_back_in_its_place_with_an_interval(hetopt: Hetopt, profile: Path, tmp_path: Path) -> None:
    asked = [row((2,) * nodes, batch, id=f"{nodes}-{batch}") for nodes in (4, 1, 2) for batch in (64, 16)]
    queries = tmp_path / "q.jsonl"
    queries.write_text(lines(asked))
    answer = hetopt("predict", profile, queries)
    assert answer.code == 0
    found = [json.loads(text) for text in answer.out.splitlines()]
    assert [one["id"] for one in found] == [one["id"] for one in asked]
    for one, was in zip(found, asked, strict=True):
        assert {name: one[name] for name in was} == was
        assert 0 < one["step_time_low_s"] < one["step_time_s"] < one["step_time_high_s"]
        assert one["evidence"] == "measured"


def test_from_a_profile_of_a_task(hetopt: Hetopt, digits_profile: Path, tmp_path: Path) -> None:
    queries = tmp_path / "q.jsonl"
    queries.write_text(lines([row((1,), 64, type_="local"), row((2, 2), 64, type_="local")]))
    alone, together = (json.loads(text) for text in hetopt("predict", digits_profile, queries).out.splitlines())
    measured_s = next(
        point["step_time_s"]
        for device in json.loads(digits_profile.read_text())["devices"]
        for point in device["step_times"]
        if device["workers_per_host"] == 1 and point["local_batch_size"] == 64
    )
    assert alone["step_time_s"] == pytest.approx(measured_s, rel=0.1)
    # A step cannot be shorter than its computation, which was measured: what is open lies above.
    assert together["step_time_high_s"] / together["step_time_low_s"] > 2, "no network was measured"


def test_probes_are_marked_in_order_with_reasons(hetopt: Hetopt, profile: Path, tmp_path: Path) -> None:
    queries = tmp_path / "q.jsonl"
    queries.write_text(lines([row((2,) * nodes, batch) for nodes in (2, 3, 8) for batch in (16, 64)]))
    answer = hetopt("predict", profile, queries, "--suggest-probes", 2)
    found = [json.loads(text) for text in answer.out.splitlines()]
    assert len(found) == 6
    marked = sorted((one for one in found if "suggested_probe" in one), key=lambda one: one["suggested_probe"])
    assert [one["suggested_probe"] for one in marked] == [1, 2]
    assert len(marked[0]["nodes"]) > 2
    assert all("uncertainty" in one["reason"] and "probe_cost_usd" not in one for one in marked)


def test_probes_of_catalogue_types_are_priced(hetopt: Hetopt, tmp_path: Path) -> None:
    samples, path, queries = (tmp_path / name for name in ("s.jsonl", "p.json", "q.jsonl"))
    samples.write_text(lines(measured("g4dn.12xlarge")))
    hetopt("profile", "--from-samples", samples, "-o", path)
    queries.write_text(lines([row((2,) * nodes, 64, type_="g4dn.12xlarge") for nodes in (3, 16)]))
    answer = hetopt("predict", path, queries, "--suggest-probes", 1, "--market", "on-demand")
    found = [json.loads(text) for text in answer.out.splitlines()]
    cost = next(one["probe_cost_usd"] for one in found if "suggested_probe" in one)
    assert 0.1 < cost < 10


@pytest.mark.parametrize("wanted", ["b", "2"])
def test_the_breakdown_of_one_query(hetopt: Hetopt, profile: Path, tmp_path: Path, wanted: str) -> None:
    queries = tmp_path / "q.jsonl"
    more = {"id": "b"} if wanted == "b" else {}
    queries.write_text(lines([row((1,), 8), row((4,) * 4, 64, **more)]))
    text = " ".join(hetopt("predict", profile, queries, "--explain", wanted).out.split())
    assert "4 × gpu (4 workers), local batch 64" in text
    assert "not hidden behind computing" in text
    assert "beyond what was measured: up to 4 workers and 2 nodes" in text
    data = json.loads(hetopt("predict", profile, queries, "--explain", wanted, "--json").out)["explanation"]
    assert data["predicted"]["step_time_s"] > data["compute_s"] > 0
    refused(hetopt("predict", profile, queries, "--explain", "nobody"), "no query has the id 'nobody'")


def test_lines_that_cannot_be_predicted_keep_their_place_and_say_why(
    hetopt: Hetopt, profile: Path, tmp_path: Path
) -> None:
    queries = tmp_path / "q.jsonl"
    good, unknown = row((1,), 8), row((1,), 8, type_="abacus")
    queries.write_text(lines([good, unknown]) + 'nonsense\n\n{"nodes": [{"type": "gpu", "wor')
    answer = hetopt("predict", profile, queries)
    refused(answer, "3 of 4 queries could not be predicted; line 2: the type 'abacus' was not measured (gpu was)")
    found = [json.loads(text) for text in answer.out.splitlines()]
    assert ["error" in one for one in found] == [False, True, True, True]
    assert found[1]["nodes"] == unknown["nodes"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"compresion": {"name": "topk"}}, "'compresion' (did you mean 'compression'?)"),
        ({"Precision": "bf16"}, "'Precision' (did you mean 'precision'?)"),
        ({"nodes": [{"type": "gpu", "workers": 1, "zone": "x"}]}, None),
        ({"nodes": [{"type": "gpu", "worker": 1}]}, "'worker' (did you mean 'workers'?)"),
        ({"id": 1, "note": "mine", "step_time_low_s": 1, "syncs": 3, "sync": "bsp"}, None),
    ],
)
def test_a_misspelt_field_is_named_and_a_field_of_others_is_theirs(
    hetopt: Hetopt, profile: Path, tmp_path: Path, line: dict[str, object], said: str | None
) -> None:
    queries = tmp_path / "queries.jsonl"
    queries.write_text(json.dumps({"nodes": [{"type": "gpu", "workers": 1}], "local_batch_size": 8, **line}))
    answer = hetopt("predict", profile, queries)
    told = json.loads(answer.out)
    assert (answer.code, told.get("error", "")[-2:]) == ((0, "") if said is None else (2, ")."))
    assert said is None or said in told["error"]
    samples = tmp_path / "samples.jsonl"
    samples.write_text(queries.read_text()[:-1] + ', "step_time_s": 0.2}')
    assert hetopt("profile", "--from-samples", samples, "--json").code == answer.code


def test_bad_files(hetopt: Hetopt, profile: Path, tmp_path: Path) -> None:
    samples = tmp_path / "bad.jsonl"
    samples.write_text(lines(measured())[:-30])
    output = tmp_path / "new.json"
    refused(hetopt("profile", "--from-samples", samples, "-o", output), "line 15, the last, where the file stops")
    assert not output.exists()
    refused(hetopt("profile", "--from-samples", tmp_path / "none", "-o", output), "does not exist")
    refused(hetopt("profile", "digits", "--from-samples", samples, "-o", output), "line 15, the last")
    refused(hetopt("recommend", profile, "--budget", 5), "holds step times alone")
    refused(hetopt("profile", "digits", "--explore", "-o", output), "belong together")
    refused(hetopt("profile", "digits", "--hosts", "speed=1 x2", "-o", output), "belong together")
    refused(hetopt("profile", "-o", output), "name the task to measure")
    refused(hetopt("predict", tmp_path / "none.json", samples), "does not exist")
    refused(hetopt("predict", profile, tmp_path), "cannot be read")
    empty = tmp_path / "empty"
    empty.write_text("\n")
    refused(hetopt("predict", profile, empty), "there are no queries")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\n")
    refused(hetopt("predict", profile, binary), "is not UTF-8 text")
    refused(hetopt("recommend", profile, "--budget", 5), "holds step times alone")


def test_a_pipe_is_answered_line_by_line_and_a_reader_may_leave(profile: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "predict", str(profile)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(lines([row((1,), 8, id="first")]))
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == "first"
        process.stdout.close()
        process.stdin.write(lines([row((1,), 8)] * 3))
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=PATIENCE_S) == 141, "as of any program whose reader has gone"


def test_samples_come_through_a_pipe_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "profile", "--from-samples", "-", "--json"],
        input=lines(measured()),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert json.loads(done.stdout)["kind"] == "step-samples"
    assert not list(tmp_path.iterdir())
