"""The deprecated form ``quality.mode`` with ``quality.checks``, taken in as canonical gates before validation.

The mapping is exact: ``min_rows`` keeps its side and whole number, ``source_target_count`` becomes a row count
reconciliation in percent. What is neither is an error under ``mode: fail``, and under ``mode: warn`` stays as
evidence that it was skipped. Nothing is chosen by precedence and no field is ignored.
"""

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

from pydantic import Field, model_validator

from dpone_dagster.contracts.model import ClosedModel
from dpone_dagster.declarations.manifest import Count, ExactDecimal, Id, Severity, Side, SkippedCheck
from dpone_dagster.declarations.reading import Fault, Path
from dpone_dagster.declarations.validation import judge, unknown_key

_CANONICAL_KEYS = ["acceptance", "gates"]
_MIGRATE = "Move the checks to quality.gates and remove quality.mode."
Mode = Literal["fail", "warn"]


class MinRowsCheck(ClosedModel):
    """``min_rows``: one side holds so many rows or more.

    Attributes:
        id: the gate's id.
        type: the check's type.
        side: which rows are counted.
        threshold: a whole number of 0 or more; never assumed.
        value: another name of ``threshold``; where both are written they are equal.
        severity: instead of the one that ``mode`` gives.
    """

    id: Id
    type: Literal["min_rows"]
    side: Side = "target"
    threshold: Count | None = None
    value: Count | None = None
    severity: Severity | None = None

    @model_validator(mode="after")
    def _one_threshold(self) -> "MinRowsCheck":
        if self.threshold is None and self.value is None:
            raise ValueError("min_rows needs threshold, a whole number of 0 or more")
        if self.threshold is not None and self.value is not None and self.threshold != self.value:
            raise ValueError("threshold and value contradict each other: keep threshold")
        return self

    def gate(self, severity: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the canonical gate, and the authored names of its fields where they differ."""
        rows = self.threshold if self.threshold is not None else self.value
        gate = {"id": self.id, "type": "min_rows", "side": self.side, "threshold": rows}
        return {**gate, "severity": self.severity or severity}, {"threshold": "value"} if self.threshold is None else {}


class SourceTargetCountCheck(ClosedModel):
    """``source_target_count``: source and staging hold as many rows, within percent of the source's.

    Attributes:
        id: the gate's id.
        type: the check's type.
        tolerance_pct: an exact decimal; none at all by default.
        severity: instead of the one that ``mode`` gives.
    """

    id: Id
    type: Literal["source_target_count"]
    tolerance_pct: ExactDecimal = Decimal(0)
    severity: Severity | None = None

    def gate(self, severity: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the canonical gate, and the authored names of its fields where they differ."""
        tolerance = {"mode": "pct", "value": str(self.tolerance_pct)}
        gate = {"id": self.id, "type": "row_count_reconciliation", "tolerance": tolerance}
        return {**gate, "severity": self.severity or severity}, {"tolerance": "tolerance_pct"}


class _Switch(ClosedModel):
    mode: Mode = "fail"
    checks: tuple[Any, ...] = Field(default=())


@dataclass(kw_only=True)
class Translation:
    """A quality block in the canonical form.

    Attributes:
        quality: the canonical block; without what is faulty.
        authored: path in it -> the path that the author wrote, both from the block.
    """

    quality: Any
    authored: dict[Path, Path] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def canonical_quality(block: Any) -> Translation:
    """Translate one ``quality`` block; one without ``mode`` and ``checks`` stays as it is."""
    if not isinstance(block, dict):
        return Translation(quality=block)
    canonical = {key: value for key, value in block.items() if key not in ("mode", "checks", "skipped_checks")}
    result = Translation(quality=canonical)
    if "skipped_checks" in block:
        result.faults.append(unknown_key(("skipped_checks",), "skipped_checks", _CANONICAL_KEYS))
    switch = {key: block[key] for key in ("mode", "checks") if key in block}
    if not switch:
        return result
    head, faults = judge(_Switch, switch)
    if head is None:
        result.faults += faults
        return result
    severity = "error" if head.mode == "fail" else "warning"
    gates = canonical.get("gates", [])
    if not isinstance(gates, list):
        return result  # refused by validation
    if gates and head.checks and head.mode == "fail":
        what = "gates and checks stand together; under mode fail there is one form only"
        result.faults.append(Fault(path=("checks",), what=what, next_step=_MIGRATE))
        return result
    if "gates" not in canonical:
        result.authored["gates",] = ("checks",)
    gates = [{"severity": severity, **gate} if isinstance(gate, dict) else gate for gate in gates]
    skipped: list[dict[str, str]] = []
    for index, check in enumerate(head.checks):
        here: Path = ("checks", index)
        known = isinstance(check, dict) and isinstance(check.get("type"), str) and _KNOWN.get(check["type"])
        if known:
            parsed, faults = judge(known, check)
            faults += [Fault(path=(key,), what="has no value") for key, value in check.items() if value is None]
            result.faults += [_at(here, fault) for fault in faults]
            if parsed is not None and not faults:
                gate, renamed = parsed.gate(severity)
                there: Path = ("gates", len(gates))
                result.authored |= {there: here} | {(*there, new): (*here, old) for new, old in renamed.items()}
                gates.append(gate)
            continue
        faults = _unknown_check(check, head.mode)
        result.faults += [_at(here, fault) for fault in faults]
        if not faults:
            result.authored["skipped_checks", len(skipped)] = here
            skipped.append({"id": check["id"], "type": check["type"]})
    if gates:
        canonical["gates"] = gates
    if skipped:
        canonical["skipped_checks"] = skipped
    return result


_KNOWN: dict[str, type[MinRowsCheck] | type[SourceTargetCountCheck]] = {
    "min_rows": MinRowsCheck,
    "source_target_count": SourceTargetCountCheck,
}


def _unknown_check(check: Any, mode: Mode) -> list[Fault]:
    named = {key: check[key] for key in ("id", "type") if key in check} if isinstance(check, dict) else check
    _, faults = judge(SkippedCheck, named)
    if faults:
        return faults
    if mode == "fail":
        what = f"nobody can run a check of this type; {' and '.join(_KNOWN)} can be taken over"
        return [Fault(path=("type",), what=what, next_step=_MIGRATE)]
    if check.get("severity", "warning") != "warning":
        what = "a check that nobody can run blocks nothing, so it cannot have this severity"
        return [Fault(path=("severity",), what=what, next_step=_MIGRATE)]
    return []


def _at(prefix: Path, fault: Fault) -> Fault:
    return Fault(path=(*prefix, *fault.path), what=fault.what, nearest=fault.nearest, next_step=fault.next_step)
