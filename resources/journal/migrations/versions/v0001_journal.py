"""The journal's first form."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mssql

revision = "v0001"
down_revision = None
branch_labels = None
depends_on = None

# Spelled out, not taken from tables.py: a migration says what the schema was, whatever the tables become.
CONTROL_SCHEMA = "dpone_control"
UTC_DATETIME = sa.DateTime().with_variant(mssql.DATETIME2(6), "mssql")  # type: ignore[no-untyped-call]


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "attempt",
        sa.Column("attempt_id", sa.String(length=36), nullable=False),
        sa.Column("worker_id", sa.String(length=64), nullable=False),
        sa.Column("logical_run_id", sa.String(length=128), nullable=False),
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("try_number", sa.Integer(), nullable=False),
        sa.Column("task_id", sa.String(length=256), nullable=False),
        sa.Column("owner", sa.String(length=32), nullable=False),
        sa.Column("scope_start", UTC_DATETIME, nullable=False),
        sa.Column("scope_end", UTC_DATETIME, nullable=False),
        sa.Column("session_tag", sa.String(length=63), nullable=False),
        sa.Column("backend_pid", sa.Integer(), nullable=False),
        sa.Column("host", sa.String(length=256), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started_at", UTC_DATETIME, nullable=False),
        sa.Column("ended_at", UTC_DATETIME),
        sa.Column("ended_reason", sa.String(length=200)),
        sa.PrimaryKeyConstraint("attempt_id", name="pk_attempt"),
        schema=CONTROL_SCHEMA,
    )
    op.create_index("ix_attempt_worker_id", "attempt", ["worker_id"], schema=CONTROL_SCHEMA)
    op.create_table(
        "baseline",
        sa.Column("mart", sa.String(length=128), nullable=False),
        sa.Column("target", sa.String(length=257), nullable=False),
        sa.Column("target_uuid", sa.String(length=36), nullable=False),
        sa.Column("receipt_sha256", sa.String(length=71), nullable=False),
        sa.Column("worker_id", sa.String(length=64), nullable=False),
        sa.Column("adopted_at", UTC_DATETIME, nullable=False),
        sa.PrimaryKeyConstraint("mart", name="pk_baseline"),
        schema=CONTROL_SCHEMA,
    )
    op.create_table(
        "checkpoint",
        sa.Column("mart", sa.String(length=128), nullable=False),
        sa.Column("last_scope_start", UTC_DATETIME, nullable=False),
        sa.Column("last_scope_end", UTC_DATETIME, nullable=False),
        sa.Column("operation_id", sa.String(length=71), nullable=False),
        sa.Column("published_at", UTC_DATETIME, nullable=False),
        sa.PrimaryKeyConstraint("mart", name="pk_checkpoint"),
        schema=CONTROL_SCHEMA,
    )
    op.create_table(
        "document",
        sa.Column("sha256", sa.String(length=71), nullable=False),
        sa.Column("schema_name", sa.String(length=128), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", UTC_DATETIME, nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="pk_document"),
        schema=CONTROL_SCHEMA,
    )
    op.create_table(
        "generation",
        sa.Column("target", sa.String(length=257), nullable=False),
        sa.Column("uuid", sa.String(length=36), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("operation_id", sa.String(length=71)),
        sa.Column("published_at", UTC_DATETIME, nullable=False),
        sa.Column("retired_at", UTC_DATETIME),
        sa.Column("dropped_at", UTC_DATETIME),
        sa.PrimaryKeyConstraint("target", "uuid", name="pk_generation"),
        schema=CONTROL_SCHEMA,
    )
    op.create_table(
        "generation_head",
        sa.Column("target", sa.String(length=257), nullable=False),
        sa.Column("uuid", sa.String(length=36), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("operation_id", sa.String(length=71)),
        sa.Column("changed_at", UTC_DATETIME, nullable=False),
        sa.PrimaryKeyConstraint("target", name="pk_generation_head"),
        schema=CONTROL_SCHEMA,
    )
    op.create_table(
        "model_receipt",
        sa.Column("operation_id", sa.String(length=71), nullable=False),
        sa.Column("operation_plan_sha256", sa.String(length=71), nullable=False),
        sa.Column("workflow_execution_id", sa.String(length=512), nullable=False),
        sa.Column("fencing_epoch", sa.BigInteger(), nullable=False),
        sa.Column("worker_id", sa.String(length=64), nullable=False),
        sa.Column("before_schema", sa.String(length=128), nullable=False),
        sa.Column("before_name", sa.String(length=128), nullable=False),
        sa.Column("before_rows", sa.BigInteger(), nullable=False),
        sa.Column("before_l0", sa.Numeric(precision=20, scale=0), nullable=False),
        sa.Column("before_l1", sa.Numeric(precision=20, scale=0), nullable=False),
        sa.Column("before_l2", sa.Numeric(precision=20, scale=0), nullable=False),
        sa.Column("before_l3", sa.Numeric(precision=20, scale=0), nullable=False),
        sa.Column("after_schema", sa.String(length=128), nullable=False),
        sa.Column("after_name", sa.String(length=128), nullable=False),
        sa.Column("after_rows", sa.BigInteger(), nullable=False),
        sa.Column("after_l0", sa.Numeric(precision=20, scale=0), nullable=False),
        sa.Column("after_l1", sa.Numeric(precision=20, scale=0), nullable=False),
        sa.Column("after_l2", sa.Numeric(precision=20, scale=0), nullable=False),
        sa.Column("after_l3", sa.Numeric(precision=20, scale=0), nullable=False),
        sa.Column("updated_rows", sa.BigInteger(), nullable=False),
        sa.Column("inserted_rows", sa.BigInteger(), nullable=False),
        sa.Column("source_rows", sa.BigInteger(), nullable=False),
        sa.Column("created_at", UTC_DATETIME, nullable=False),
        sa.PrimaryKeyConstraint("operation_id", name="pk_model_receipt"),
        schema=CONTROL_SCHEMA,
    )
    op.create_table(
        "operation",
        sa.Column("operation_id", sa.String(length=71), nullable=False),
        sa.Column("operation_plan_sha256", sa.String(length=71), nullable=False),
        sa.Column("workflow_plan_sha256", sa.String(length=71), nullable=False),
        sa.Column("workflow_execution_id", sa.String(length=512), nullable=False),
        sa.Column("workflow", sa.String(length=128), nullable=False),
        sa.Column("mart", sa.String(length=128), nullable=False),
        sa.Column("target", sa.String(length=257), nullable=False),
        sa.Column("scope_start", UTC_DATETIME, nullable=False),
        sa.Column("scope_end", UTC_DATETIME, nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("replacement_ordinal", sa.Integer(), nullable=False),
        sa.Column("mode", sa.String(length=40), nullable=False),
        sa.Column("attempt_binding_sha256", sa.String(length=71), nullable=False),
        sa.Column("state", sa.String(length=24), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("unknown_since", sa.String(length=24)),
        sa.Column("fencing_epoch", sa.BigInteger(), nullable=False),
        sa.Column("worker_id", sa.String(length=64), nullable=False),
        sa.Column("admitted_epoch", sa.BigInteger(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("admitted_at", UTC_DATETIME, nullable=False),
        sa.Column("updated_at", UTC_DATETIME, nullable=False),
        sa.Column("cleaned_at", UTC_DATETIME),
        sa.CheckConstraint(
            "(state = 'COMMIT_UNKNOWN' and unknown_since is not null)"
            " or (state <> 'COMMIT_UNKNOWN' and unknown_since is null)",
            name="ck_operation_unknown_since",
        ),
        sa.CheckConstraint(
            "state in ('PREPARING', 'PREPARED', 'COMMITTING', 'TARGET_COMMITTED', 'COMPLETE',"
            " 'FAILED_PRE_COMMIT', 'COMMIT_UNKNOWN', 'COMMITTED_INCOMPLETE')",
            name="ck_operation_state",
        ),
        sa.PrimaryKeyConstraint("operation_id", name="pk_operation"),
        schema=CONTROL_SCHEMA,
    )
    op.create_index("ix_operation_mart_scope", "operation", ["mart", "scope_start"], schema=CONTROL_SCHEMA)
    op.create_index("ix_operation_workflow_execution_id", "operation", ["workflow_execution_id"], schema=CONTROL_SCHEMA)
    op.create_index(
        "ux_operation_open",
        "operation",
        ["mart"],
        unique=True,
        schema=CONTROL_SCHEMA,
        postgresql_where=sa.text("state <> 'COMPLETE' and state <> 'FAILED_PRE_COMMIT'"),
        mssql_where=sa.text("state <> 'COMPLETE' and state <> 'FAILED_PRE_COMMIT'"),
    )
    op.create_index(
        "ix_operation_uncleaned",
        "operation",
        ["mart"],
        schema=CONTROL_SCHEMA,
        postgresql_where=sa.text("cleaned_at is null"),
        mssql_where=sa.text("cleaned_at is null"),
    )
    op.create_table(
        "phase",
        sa.Column("phase_id", sa.String(length=36), nullable=False),
        sa.Column("operation_id", sa.String(length=71), nullable=False),
        sa.Column("worker_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("started_at", UTC_DATETIME, nullable=False),
        sa.Column("seconds", sa.Float(precision=53), nullable=False),
        sa.Column("row_count", sa.BigInteger()),
        sa.Column("byte_count", sa.BigInteger()),
        sa.PrimaryKeyConstraint("phase_id", name="pk_phase"),
        schema=CONTROL_SCHEMA,
    )
    op.create_index("ix_phase_operation_id", "phase", ["operation_id"], schema=CONTROL_SCHEMA)
    op.create_table(
        "resource_guard",
        sa.Column("resource_id", sa.String(length=300), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("worker_id", sa.String(length=64), nullable=False),
        sa.Column("operation_id", sa.String(length=71)),
        sa.Column("changed_at", UTC_DATETIME, nullable=False),
        sa.PrimaryKeyConstraint("resource_id", name="pk_resource_guard"),
        schema=CONTROL_SCHEMA,
    )
    op.create_table(
        "scope_head",
        sa.Column("mart", sa.String(length=128), nullable=False),
        sa.Column("scope_start", UTC_DATETIME, nullable=False),
        sa.Column("scope_end", UTC_DATETIME, nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("operation_id", sa.String(length=71), nullable=False),
        sa.Column("row_count", sa.BigInteger(), nullable=False),
        sa.Column("after_image_sha256", sa.String(length=71), nullable=False),
        sa.Column("artifact_manifest_sha256", sa.String(length=71), nullable=False),
        sa.Column("target_uuid", sa.String(length=36), nullable=False),
        sa.Column("published_at", UTC_DATETIME, nullable=False),
        sa.PrimaryKeyConstraint("mart", "scope_start", name="pk_scope_head"),
        schema=CONTROL_SCHEMA,
    )
    op.create_table(
        "takeover_log",
        sa.Column("takeover_id", sa.String(length=36), nullable=False),
        sa.Column("worker_id", sa.String(length=64), nullable=False),
        sa.Column("by_login", sa.String(length=128), nullable=False),
        sa.Column("by_host", sa.String(length=256), nullable=False),
        sa.Column("by_pid", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(length=400), nullable=False),
        sa.Column("logged_at", UTC_DATETIME, nullable=False),
        sa.Column("sessions_ended", sa.Integer()),
        sa.Column("finished_at", UTC_DATETIME),
        sa.PrimaryKeyConstraint("takeover_id", name="pk_takeover_log"),
        schema=CONTROL_SCHEMA,
    )
    op.create_index("ix_takeover_log_worker_id", "takeover_log", ["worker_id"], schema=CONTROL_SCHEMA)
    op.create_table(
        "attempt_resource",
        sa.Column("attempt_id", sa.String(length=36), nullable=False),
        sa.Column("resource_id", sa.String(length=300), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], [f"{CONTROL_SCHEMA}.attempt.attempt_id"], name="fk_attempt_resource_attempt_id"
        ),
        sa.PrimaryKeyConstraint("attempt_id", "resource_id", name="pk_attempt_resource"),
        schema=CONTROL_SCHEMA,
    )
    op.create_index("ix_attempt_resource_resource_id", "attempt_resource", ["resource_id"], schema=CONTROL_SCHEMA)
    op.create_table(
        "transition",
        sa.Column("operation_id", sa.String(length=71), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("change_id", sa.String(length=36), nullable=False),
        sa.Column("kind", sa.String(length=12), nullable=False),
        sa.Column("from_state", sa.String(length=24)),
        sa.Column("to_state", sa.String(length=24), nullable=False),
        sa.Column("fencing_epoch", sa.BigInteger(), nullable=False),
        sa.Column("worker_id", sa.String(length=64), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("documents", sa.Text(), nullable=False),
        sa.Column("changed_at", UTC_DATETIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["operation_id"], [f"{CONTROL_SCHEMA}.operation.operation_id"], name="fk_transition_operation_id"
        ),
        sa.PrimaryKeyConstraint("operation_id", "version", name="pk_transition"),
        schema=CONTROL_SCHEMA,
    )
