"""Hand-edited catalogues: each mistake becomes one sentence that names file and line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import inf, nan
from pathlib import Path

import pytest

from hetopt.core.errors import BadInput
from hetopt.optimizer.cost.billing import load_billing
from hetopt.optimizer.market.catalog import AcceleratorModel, Catalog, load_catalog

Edited = Callable[[str, str, str], Path]

TYPES = "instance_types.csv"
REGION = "regions/us-east-1.csv"

TABLE = [
    # file, what was there, what someone wrote, what is said
    (TYPES, "c7i.xlarge,7,x86_64,4,", "c7i.xlarge,7,x86_64,nan,", "line 2: vcpus is 'nan'"),
    (TYPES, "c7i.xlarge,7,x86_64,4,", "c7i.xlarge,7,x86_64,-4,", "line 2: vcpus is '-4'"),
    (TYPES, "c7i.xlarge,7,x86_64,4,", "c7i.xlarge,7,x86_64,0,", "line 2: vcpus is 0, but must be at least 1"),
    (TYPES, "c7i.xlarge,7,x86_64,4,", "c7i.xlarge,7,x86_64,,", "line 2: vcpus is blank"),
    (
        TYPES,
        "c7i.xlarge,7,x86_64,4,2,",
        "c7i.xlarge,7,x86_64,4,8,",
        "cores is 8, but must be between 1 and the 4",
    ),
    (TYPES, "c7i.xlarge,7,x86_64,", "c7i.xlarge,7,sparc,", "architecture is 'sparc', but must be x86_64 or arm64"),
    (TYPES, "c7i.xlarge,", ",", "instance_type is blank"),
    (TYPES, "c7i.xlarge,", "g5.xlarge,", "line 3: g5.xlarge is listed twice"),
    (TYPES, "CPU @", "CPU, @", "line 6: has 28 cells where the header has 27"),
    (TYPES, "A10G,NVIDIA,1,1,", "A10G,NVIDIA,1,2,", "accelerator fraction is 2.0, but must be above 0 and at most 1"),
    (TYPES, "A10G,NVIDIA,1,1,", "A10G,NVIDIA,0,1,", "accelerator count is 0, but must be at least 1"),
    (TYPES, "A10G,NVIDIA,1,1,", "A10G,NVIDIA,1,1,-", "accelerator_memory_gib is '-22.35'"),
    (TYPES, "1.562,12.5", "inf,12.5", "network_baseline_gbps is 'inf'"),
    (TYPES, "1.562,12.5", "0,12.5", "network_baseline_gbps is 0.0, but must be a number above 0"),
    (TYPES, "1.562,12.5", "1.562,1", "network_peak_gbps is 1.0, below the baseline of 1.562"),
    (TYPES, "1.562,12.5,1,0", "1.562,12.5,1,maybe", "efa is 'maybe', which is neither 0, 1 nor blank"),
    (TYPES, "moto-instance-types", "my-notes", "names the source 'my-notes'"),
    (TYPES, "vcpus,", "cpus,", "lacks the column vcpus"),
    (TYPES, "vcpus,", "vcpus,vcpus,", "names a column twice"),
    (TYPES, "vcpus,", "colour,vcpus,", "has the unknown column 'colour'"),
    (TYPES, "c7i.xlarge,7", 'c7i.xlarge,"7', "line "),
    (REGION, "0.1785", "-0.1785", "line 2: on_demand_usd_per_hour is '-0.1785'"),
    (REGION, "0.1785", "0", "line 2: the on-demand price is 0.0, but must be a number above 0"),
    (REGION, "0.1785", "NaN", "line 2: on_demand_usd_per_hour is 'NaN'"),
    (REGION, "0.1785", "cheap", "line 2: on_demand_usd_per_hour is 'cheap'"),
    (REGION, "21.5,,79", "21.5,,0", "spot_saving_percent is 0, but must be above 0 and below 100"),
    (REGION, "21.5,,79", "21.5,,-62", "spot_saving_percent is '-62'"),
    (REGION, "21.5,,79", "21.5,,100", "spot_saving_percent is 100, but must be above 0 and below 100"),
    (REGION, "79,<5%", "79,often", "interruption_band is 'often', but must be one of <5%"),
    (REGION, "c7i.xlarge", "g5.xlarge", "g5.xlarge is listed twice"),
    (REGION, "c7i.xlarge", "c99.xlarge", "c99.xlarge is not in instance_types.csv"),
    (REGION, "instance_type,zones", "instance_type,zone", "has the unknown column 'zone'"),
    ("accelerators.csv", "35,35,70,600,medium", "35,35,70,-600,medium", "memory_bandwidth_gb_per_s is '-600'"),
    (
        "accelerators.csv",
        "35,35,70,600,medium",
        "0,35,70,600,medium",
        "fp32_tflops is 0.0, but must be",
    ),
    ("accelerators.csv", "600,medium", "600,certain", "confidence is 'certain', but must be high, medium, low"),
    ("accelerators.csv", "A100,80,A100-80GB", "A100,40,A100-80GB", "A100 with 40 GiB is listed twice"),
    ("caveats.csv", "types,about,note", "types,note", "lacks the column about"),
    ("sources.json", '"schema_version": 1', '"schema_version": 2', "schema 2; this hetopt reads up to 1"),
    ("sources.json", '"schema_version": 1', '"schema_version": "one"', "schema 'one', which this hetopt cannot read"),
    ("sources.json", '"2026-07-20"', '"last summer"', "is 'last summer', but must look like 2026-07-20"),
    ("sources.json", '"2026-07-20"', '"2026-13-20"', "month must be in 1..12"),
    ("sources.json", '"licence": "Apache-2.0",', "", "needs a title, a date and a licence"),
    ("sources.json", '"licence": "Apache-2.0",', '"licence": 2,', "is not an object of texts"),
    ("sources.json", '["karpenter-prices"]', '["hearsay"]', "the source 'hearsay', which is not described"),
    ("sources.json", '["karpenter-prices"]', "[]", "needs a list of source names"),
    ("sources.json", '"spot_saving_percent"', '"saving"', "names no source for spot_saving_percent"),
    ("sources.json", '"sources": {', '"sources": [', "is not complete JSON"),
    ("sources.json", '"fields"', '"felds"', "fields is not a JSON object"),
]


@pytest.mark.parametrize(("file", "old", "new", "said"), TABLE, ids=[f"{row[0]}: {row[3]}" for row in TABLE])
def test_a_mistake_is_one_sentence(edited: Edited, file: str, old: str, new: str, said: str) -> None:
    folder = edited(file, old, new)
    with pytest.raises(BadInput) as refused:
        load_catalog("us-east-1", folder)
    message = refused.value.message
    assert said in message
    assert file.rpartition("/")[2] in message
    assert "\n" not in message
    assert message.endswith(".")
    assert refused.value.hint
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"value": 60', '"value": -60', "minimum_billed_s: value is -60.0"),
        ('"value": 60', '"value": NaN', "minimum_billed_s: value is nan"),
        ('"value": 60', '"value": "sixty"', "minimum_billed_s needs a numeric value"),
        ('"value": 60', '"value": true', "minimum_billed_s needs a numeric value"),
        ('"unit": "s",', "", "minimum_billed_s needs a numeric value, a unit"),
        ('"date": "2026-11-20"', '"date": "yesterday"', "minimum_billed_s: Invalid isoformat string"),
        ('"confidence": "medium"', '"confidence": "total"', "confidence is 'total'"),
        ('"minimum_billed_s"', '"minimum_s"', "lacks the term minimum_billed_s"),
        ('"terms": {', '"terms": {"tea": {},', "has the unknown term tea"),
        ('"region"', '"place"', "needs a region and an object of terms"),
        ('"schema_version": 1', '"schema_version": 9', "schema 9"),
    ],
)
def test_a_mistake_in_the_billing_terms_is_one_sentence(edited: Edited, old: str, new: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        load_billing(edited("billing.json", old, new))
    assert said in refused.value.message
    assert "billing.json" in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("file", [TYPES, "accelerators.csv", "sources.json", "caveats.csv", REGION])
def test_a_missing_file_is_named(small: Path, file: str) -> None:
    (small / file).unlink()
    with pytest.raises(BadInput, match=file.rpartition("/")[2] if file != REGION else "no region called 'us-east-1'"):
        load_catalog("us-east-1", small)


def test_an_empty_file_and_one_of_other_bytes_are_refused(small: Path) -> None:
    (small / TYPES).write_text("", encoding="utf-8")
    with pytest.raises(BadInput, match="lacks the column instance_type"):
        load_catalog("us-east-1", small)
    (small / TYPES).write_bytes(b"\xff\xfe\x00c7i")
    with pytest.raises(BadInput, match="not UTF-8 text"):
        load_catalog("us-east-1", small)


def test_a_region_is_no_path(small: Path) -> None:
    with pytest.raises(BadInput, match="no region"):
        load_catalog("../regions/us-east-1", small)


@pytest.mark.parametrize("value", [0.0, -1.0, nan, inf])
def test_records_refuse_the_impossible(catalog: Catalog, value: float) -> None:
    """Also when they are made by hand, without a file."""
    found = catalog.instance_type("g5.xlarge")
    price = catalog.price("g5.xlarge", "spot")
    assert price is not None
    assert found.accelerator is not None
    model = found.accelerator.model
    assert isinstance(model, AcceleratorModel)
    for field in ("memory_gib", "network_baseline_gbps", "clock_ghz", "coremark_iterations_per_s", "network_peak_gbps"):
        with pytest.raises(ValueError, match=field):
            dataclasses.replace(found, **{field: value})
    for field in ("fp32_tflops", "memory_bandwidth_gb_per_s"):
        with pytest.raises(ValueError, match=field):
            dataclasses.replace(model, **{field: value})
    with pytest.raises(ValueError, match="price"):
        dataclasses.replace(price, usd_per_hour=value)
    with pytest.raises(ValueError, match="fraction"):
        dataclasses.replace(found.accelerator, fraction=value)
