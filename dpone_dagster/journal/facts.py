"""What the journal keeps beside an operation's state: one closed list of facts, each written with a transition."""

from typing import Self

from dpone_dagster.contracts.model import ClosedModel
from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.journal.port import OperationRecord


class DigestFact(ClosedModel):
    """A set digest as JSON: lanes as decimal strings, since JSON numbers end at 53 bits for many readers."""

    rows: int
    lanes: tuple[str, str, str, str]

    @classmethod
    def of(cls, digest: SetDigest) -> Self:
        """Wrap a set digest."""
        a, b, c, d = (str(lane) for lane in digest.lanes)
        return cls(rows=digest.rows, lanes=(a, b, c, d))

    @property
    def digest(self) -> SetDigest:
        """Unwrap."""
        a, b, c, d = (int(lane) for lane in self.lanes)
        return SetDigest(self.rows, (a, b, c, d))


class TestFact(ClosedModel):
    """One dbt test of the workflow's build, as ``ports.TestResult``."""

    unique_id: str
    name: str
    status: str
    failures: int | None = None


class Facts(ClosedModel):
    """Facts of one operation; absent until its boundary is crossed.

    Attributes:
        mutation_invoked: set durably before dbt is called, so that its absence proves NOT_INVOKED.
        restore_from: the failed operation whose before image the mutation restored first.
        outcome: MutationOutcome as last observed.
        dbt_tests: what the tests of the workflow's build said; they judge the day, and prove nothing.
        target_outcome: EXCHANGED or NOT_REQUIRED_EMPTY_SCOPE.
        failure_code, failure_sentence: why it is FAILED_PRE_COMMIT or unknown.
    """

    execution_binding_sha256: str | None = None
    restore_from: str | None = None
    mutation_invoked: bool | None = None
    outcome: str | None = None
    build_receipt_sha256: str | None = None
    source_rows: int | None = None
    updated_rows: int | None = None
    inserted_rows: int | None = None
    dbt_tests: tuple[TestFact, ...] = ()
    before: DigestFact | None = None
    after: DigestFact | None = None
    seal_authorization_sha256: str | None = None
    artifact_manifest_sha256: str | None = None
    artifact_prefix: str | None = None
    artifact_bytes: int | None = None
    artifact_chunks: int | None = None
    stage_uuid: str | None = None
    gate_report_sha256: str | None = None
    gates_passed: bool | None = None
    predecessor_uuid: str | None = None
    physical_design_sha256: str | None = None
    target_rows_before: int | None = None
    shadow_uuid: str | None = None
    proof_sha256: str | None = None
    touched_partitions: int | None = None
    untouched_partitions: int | None = None
    untouched_parts: int | None = None
    total_rows: int | None = None
    target_outcome: str | None = None
    clickhouse_receipt_sha256: str | None = None
    terminal_receipt_sha256: str | None = None
    durable_summary_sha256: str | None = None
    failed_summary_sha256: str | None = None
    failure_code: str | None = None
    failure_sentence: str | None = None

    @classmethod
    def of(cls, operation: OperationRecord) -> Self:
        """Read an operation's facts."""
        return cls.model_validate(operation.facts, strict=False)
