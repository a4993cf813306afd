"""JSON Schemas of the files that flow through hetopt, made from the records that read them."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from hetopt.core.artifact import Artifact
from hetopt.core.profile import Profile
from hetopt.core.run_spec import RunSpec
from hetopt.core.step_samples import StepSample, StepSamples
from hetopt.optimizer.launch_record import Launch
from hetopt.optimizer.plan import Plan
from hetopt.reports.report import Report

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_FILES: dict[str, type[BaseModel]] = {
    "profile": Profile,
    "step-sample": StepSample,
    "step-samples": StepSamples,
    "plan": Plan,
    "run-spec": RunSpec,
    "launch": Launch,
    "report": Report,
}


def schemas() -> dict[str, str]:
    """The text of each schema by its file's name."""
    return {f"{name}.schema.json": _text(name, record) for name, record in _FILES.items()}


def _text(name: str, record: type[BaseModel]) -> str:
    schema: dict[str, Any] = {"$schema": DIALECT, **record.model_json_schema(), "title": name}
    if issubclass(record, Artifact):
        schema["properties"]["kind"] = {"const": record.KIND}
        schema["properties"]["schema_version"] = {"const": record.VERSION}
        schema["required"] = ["kind", "schema_version", *schema.get("required", [])]
        schema["description"] = f"{schema.get('description', '')} Made by `{record.MADE_BY}`.".strip()
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
