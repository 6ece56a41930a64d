"""Baselines: prove that a mart's pair of tables agrees before the first publication, and record it.

Without one, nothing says what the target should hold, and publishing refuses. ``adopt`` compares the two whole
tables by the cross-engine digest; ``create`` makes what is absent, empty, and adopts that.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.documents import BaselineAdoptionReceipt
from dpone_dagster.contracts.mart import MartSpec
from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.port import JournalPort, Lease
from dpone_dagster.planning.plans import Workflow, key_columns
from dpone_dagster.ports import AnalyticsPort, PhysicalDesign, SourcePort


def create(
    *,
    journal: JournalPort,
    source: SourcePort,
    analytics: AnalyticsPort,
    workflow: Workflow,
    mart: MartSpec,
    lease: Lease,
) -> BaselineAdoptionReceipt:
    """Create whichever of the pair's tables is absent, empty, and adopt the pair.

    Raises:
        DponeError: as ``adopt``; an existing table that is not empty must agree with the other.
    """
    try:
        source.create_mart(mart)
    except DponeError as error:
        if error.code != "DPONE_MART_EXISTS":
            raise
    if analytics.design(mart.target) is None:
        analytics.create_target(mart)
    return adopt(journal=journal, source=source, analytics=analytics, workflow=workflow, mart=mart, lease=lease)


def adopt(
    *,
    journal: JournalPort,
    source: SourcePort,
    analytics: AnalyticsPort,
    workflow: Workflow,
    mart: MartSpec,
    lease: Lease,
    now: datetime | None = None,
) -> BaselineAdoptionReceipt:
    """Prove that both tables hold the same rows, value by value, and record the pair as the mart's baseline.

    Raises:
        DponeError: DPONE_BASELINE_DISAGREES, DPONE_BASELINE_EXISTS, DPONE_MART_*, DPONE_TARGET_*, DPONE_KEY_*.
    """
    keys = [c.as_json() for c in key_columns(mart)]
    source.check_mart(mart)
    design = analytics.design(mart.target)
    analytics.check_design(mart, design)
    if design is None:
        raise DponeError("DPONE_TARGET_ABSENT", f"Target {mart.target.dotted} does not exist.")
    in_sql, in_clickhouse = source.image_digest(mart, mart.source), analytics.digest(mart, mart.target)
    if in_sql != in_clickhouse:
        raise DponeError(
            "DPONE_BASELINE_DISAGREES",
            f"{mart.source.dotted} has {in_sql.rows} rows and {mart.target.dotted} has {in_clickhouse.rows}, or their"
            " values differ.",
            sql_digest=in_sql.sha256,
            clickhouse_digest=in_clickhouse.sha256,
        )
    receipt = _receipt(workflow, mart, design, in_sql, keys, now or datetime.now(UTC))
    lease.check()
    journal.adopt_baseline(lease, mart=mart.name, target=mart.target.dotted, target_uuid=design.uuid, receipt=receipt)
    return receipt


def _receipt(
    workflow: Workflow,
    mart: MartSpec,
    design: PhysicalDesign,
    digest: SetDigest,
    keys: list[dict[str, Any]],
    now: datetime,
) -> BaselineAdoptionReceipt:
    static = next(p for p in workflow.plans if p.mart.name == mart.name)
    columns = [c.as_json() for c in mart.columns]
    day = datetime(now.year, now.month, now.day, tzinfo=UTC)
    start = datetime(mart.start_date.year, mart.start_date.month, mart.start_date.day, tzinfo=UTC)
    # An empty pair covers nothing yet: equal ends.
    end = max(day, start + timedelta(days=1)) if digest.rows else start

    def observed(side: str, subject: str, value: object) -> str:
        return sha256_of({"schema": "dpone.baseline-observation.v1", "side": side, "subject": subject, "value": value})

    def side(prefix: str, relation: str, physical: str) -> dict[str, object]:
        return {
            f"{prefix}_relation_id": relation,
            f"{prefix}_generation": 1,
            f"{prefix}_assurance_sha256": observed(prefix, "assurance", "declared"),
            f"{prefix}_coverage_sha256": observed(prefix, "coverage", digest.sha256),
            f"{prefix}_key_sha256": observed(prefix, "key", keys),
            f"{prefix}_physical_sha256": physical,
            f"{prefix}_schema_sha256": observed(prefix, "schema", columns),
        }

    environment, sql, target = workflow.environment, mart.source.dotted, mart.target.dotted
    return BaselineAdoptionReceipt.seal(
        **side("source", sql, observed("source", "definition", static.definition.compiled_sql_sha256)),
        **side("mssql", sql, observed("mssql", "physical", columns)),
        **side("clickhouse", target, design.sha256),
        adopted_at=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        baseline_kind="adopted_complete_relation_conformant",
        certified_codec_mapping_sha256=observed("both", "codec", [c.spec.clickhouse for c in mart.columns]),
        clickhouse_cluster_authority_id=f"clickhouse://{environment}",
        clickhouse_target_authority_id=f"clickhouse://{environment}/{target}",
        clickhouse_target_uuid=design.uuid,
        coverage_start=start.strftime("%Y-%m-%dT%H:%M:%SZ"),
        coverage_end=end.strftime("%Y-%m-%dT%H:%M:%SZ"),
        ddl_assurance_sha256=observed("mssql", "ddl", "declared"),
        deployment_id=workflow.deployment_id,
        historical_clickhouse_internal_multiset_conformance="PROVEN",
        historical_clickhouse_internal_multiset_evidence_sha256=digest.sha256,
        historical_cross_engine_payload_value_equivalence="NOT_CLAIMED",
        model_unique_id=mart.model_unique_id,
        mssql_connection_authority_id=f"mssql://{environment}",
        mssql_target_authority_id=f"mssql://{environment}/{sql}",
        release_id=workflow.release_id,
        source_snapshot_sha256=digest.sha256,
        status="COMPLETE",
        utc_assurance_sha256=observed("mssql", "utc", list(mart.utc_assured)),
        writer_assurance_sha256=observed("mssql", "writer", "declared"),
    )
