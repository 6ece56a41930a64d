"""What the audit tables say of a load's steps: details without secrets, and throughput where a step counted something.

Throughput is a counter divided by wall clock. Read it with the step's phase: a finalize that swaps names has a very
high rate, because the rows it counts had been moved before.
"""

import json
from collections.abc import Mapping
from typing import Any

from dpone_dagster.declarations.manifest import Process
from dpone_dagster.governance import rules
from dpone_dagster.ports import AuditStep

THROUGHPUT_SCHEMA = "dpone.runtime.throughput.v1"
COMPLETED = frozenset({"completed", "succeeded"})
# The first of them that a step reports is its counter.
ROW_COUNTERS = ("extracted_rows", "staged_rows", "projected_rows", "inserted_rows", "final_rows", "rows", "row_count")
BYTE_COUNTERS = ("extracted_bytes", "staged_bytes", "bytes", "byte_count")
MIB = 1 << 20
TEXT_LIMIT = 300  # names, codes and digests are shorter; what is longer was meant for people


def audit_enabled(process: Process) -> bool:
    """Return whether a load is written to the audit tables: always, unless the manifest opts out explicitly."""
    governance = process.sink.options.load_governance
    return governance.enabled and governance.audit.enabled and governance.audit.mode != "off"


def state_schema(process: Process) -> str:
    """Return the database of the audit tables: the declared one, else the target's."""
    return process.sink.options.load_governance.audit.state_schema or process.sink.table.schema_name


def step_details(step: AuditStep) -> dict[str, Any]:
    """Return a step's details as they are written: redacted, with ``throughput`` where it can be told."""
    details: dict[str, Any] = redacted(step.details)
    if (measured := throughput(step)) is not None:
        details["throughput"] = measured
    return details


def throughput(step: AuditStep) -> dict[str, Any] | None:
    """Return the throughput of a completed step that counted rows or bytes; None for every other.

    Returns:
        Rates per second of wall clock; None for a rate whose counter the step does not report.
    """
    rows_key, rows = _counter(step.details, ROW_COUNTERS)
    bytes_key, size = _counter(step.details, BYTE_COUNTERS)
    if step.status not in COMPLETED or step.seconds <= 0 or (rows is None and size is None):
        return None
    per_second = None if size is None else size / step.seconds
    return {
        "schema": THROUGHPUT_SCHEMA,
        "scope": "load_step",
        "duration_seconds": step.seconds,
        "row_count": rows,
        "row_count_source": rows_key,
        "byte_count": size,
        "byte_count_source": bytes_key,
        "rows_per_second": None if rows is None else rows / step.seconds,
        "bytes_per_second": per_second,
        "mib_per_second": None if per_second is None else per_second / MIB,
        "rate_type": "counter_over_wall_clock",
        "confidence": "measured",
    }


def redacted(value: Any, name: str = "") -> Any:
    """Return JSON-like details without text under names of secrets, and without long text."""
    if isinstance(value, Mapping):
        return {str(key): redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, name) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    hidden = len(text) > TEXT_LIMIT or rules.redacted({name: 0})[name] == rules.REDACTED
    return rules.REDACTED if hidden else text


def details_json(details: Mapping[str, Any]) -> str:
    """Return details as one line of JSON; numbers that JSON does not have are refused (ValueError)."""
    return json.dumps(details, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _counter(details: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str | None, int | None]:
    for key in keys:
        if (counted := rules.count(details.get(key))) is not None:
            return key, counted
    return None, None
