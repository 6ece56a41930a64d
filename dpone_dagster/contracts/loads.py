"""What a governed load hands on as evidence: gate report and acceptance snapshots. Numbers and names, never values."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dpone_dagster.contracts.fields import Count, Text
from dpone_dagster.contracts.model import ClosedModel
from dpone_dagster.contracts.receipts import GateResult, require_verdict

# Names that engines give: anything at all. They are keys as they are, so no two of them become one.
Name = Annotated[str, Field(min_length=1, max_length=128)]
AcceptanceSide = Literal["source", "staged", "target"]
AcceptanceBoundary = Literal["pre_commit", "post_commit", "resume_validation"]


class LoadGateResult(GateResult):
    """One gate's verdict; the type of a provider's gate has dots in it."""

    type: Text


class LoadGateReport(ClosedModel):
    """Every declared gate of one load, in declared order. Only ``governance.gate_runner`` makes one."""

    kind: Literal["dpone.data_quality.gates.v1"] = "dpone.data_quality.gates.v1"
    passed: bool
    results: tuple[LoadGateResult, ...]

    @model_validator(mode="after")
    def _verdict_follows(self) -> Self:
        require_verdict(self.passed, self.results)
        return self


class AcceptanceSnapshot(ClosedModel):
    """Exact counts of one side of one load.

    Attributes:
        dataset: what was measured, for people.
        columns: the business columns in order; framework columns (``__dpone__*``) are none.
        row_count: None where it was not asked for or could not be had; ``status`` says which.
        null_counts, distinct_counts: exact column name -> count. NULL is no distinct value.
        boundary: where in the load it was taken.
        error_code: why a snapshot of status ``warning`` has no counts.
    """

    schema_: Literal["dpone.acceptance.metric_snapshot.v1"] = Field(
        default="dpone.acceptance.metric_snapshot.v1", alias="schema"
    )
    side: AcceptanceSide
    dataset: Text | None = None
    boundary: AcceptanceBoundary
    status: Literal["succeeded", "warning"]
    columns: tuple[Name, ...] = ()
    row_count: Count | None = None
    null_counts: dict[Name, Count] = Field(default_factory=dict)
    distinct_counts: dict[Name, Count] = Field(default_factory=dict)
    error_code: Text | None = None

    @model_validator(mode="after")
    def _counts_belong_to_success(self) -> Self:
        if (self.status == "warning") != (self.error_code is not None):
            raise ValueError("error_code belongs to the status warning, which needs it")
        if self.status == "warning" and (self.row_count is not None or self.null_counts or self.distinct_counts):
            raise ValueError("counts belong to the status succeeded")
        if foreign := [name for name in (*self.null_counts, *self.distinct_counts) if name not in self.columns]:
            raise ValueError(f"columns lack {len(foreign)} of the counted columns")
        return self


class AcceptanceDifference(ClosedModel):
    """Two sides that disagree in one count.

    Attributes:
        column: None for the row count.
        count, other_count: None where a side lacks the column.
    """

    metric: Literal["row_count", "null_count", "distinct_count"]
    column: Name | None = None
    side: AcceptanceSide
    count: Count | None = None
    other_side: AcceptanceSide
    other_count: Count | None = None

    def sentence(self) -> str:
        """Say the disagreement in words."""
        what = self.metric if self.column is None else f"{self.metric} of column {self.column}"
        return f"{what} is {self.count} in {self.side} and {self.other_count} in {self.other_side}"

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form; a missing count stays visible as null."""
        return self.model_dump(mode="json", by_alias=True)
