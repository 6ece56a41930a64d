"""Governed loads: their rows, history, guards, checkpoints and days."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mssql

revision = "v0002"
down_revision = "v0001"
branch_labels = None
depends_on = None

CONTROL_SCHEMA = "dpone_control"
UTC_DATETIME = sa.DateTime().with_variant(mssql.DATETIME2(6), "mssql")  # type: ignore[no-untyped-call]
STATES = (
    "PREPARING",
    "PREPARED",
    "COMMITTING",
    "TARGET_COMMITTED",
    "COMPLETE",
    "FAILED_PRE_COMMIT",
    "COMMIT_UNKNOWN",
    "COMMITTED_INCOMPLETE",
)


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "load",
        sa.Column("load_id", sa.String(length=36), nullable=False),
        sa.Column("process", sa.String(length=128), nullable=False),
        sa.Column("target", sa.String(length=257), nullable=False),
        sa.Column("strategy", sa.String(length=24), nullable=False),
        sa.Column("plan_sha256", sa.String(length=71), nullable=False),
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("scope_start", UTC_DATETIME),
        sa.Column("scope_end", UTC_DATETIME),
        sa.Column("state", sa.String(length=24), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("unknown_since", sa.String(length=24)),
        sa.Column("fencing_epoch", sa.BigInteger(), nullable=False),
        sa.Column("worker_id", sa.String(length=64), nullable=False),
        sa.Column("admitted_epoch", sa.BigInteger(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("admitted_at", UTC_DATETIME, nullable=False),
        sa.Column("updated_at", UTC_DATETIME, nullable=False),
        sa.CheckConstraint("state in ({})".format(", ".join(f"'{state}'" for state in STATES)), name="ck_load_state"),
        sa.CheckConstraint(
            "(state = 'COMMIT_UNKNOWN' and unknown_since is not null)"
            " or (state <> 'COMMIT_UNKNOWN' and unknown_since is null)",
            name="ck_load_unknown_since",
        ),
        sa.PrimaryKeyConstraint("load_id", name="pk_load"),
        schema=CONTROL_SCHEMA,
    )
    op.create_index("ix_load_process", "load", ["process", "admitted_epoch"], schema=CONTROL_SCHEMA)
    unfinished = sa.text("state <> 'COMPLETE' and state <> 'FAILED_PRE_COMMIT'")
    op.create_index(
        "ux_load_open",
        "load",
        ["process"],
        unique=True,
        schema=CONTROL_SCHEMA,
        postgresql_where=unfinished,
        mssql_where=unfinished,
    )
    op.create_table(
        "load_guard",
        sa.Column("process", sa.String(length=128), nullable=False),
        sa.Column("target", sa.String(length=257), nullable=False),
        sa.Column("strategy", sa.String(length=24), nullable=False),
        sa.Column("status", sa.String(length=24), nullable=False),
        sa.Column("load_id", sa.String(length=36), nullable=False),
        sa.Column("set_at", UTC_DATETIME, nullable=False),
        sa.PrimaryKeyConstraint("process", name="pk_load_guard"),
        schema=CONTROL_SCHEMA,
    )
    op.create_table(
        "load_checkpoint",
        sa.Column("process", sa.String(length=128), nullable=False),
        sa.Column("watermark", sa.String(length=128)),
        sa.Column("load_id", sa.String(length=36), nullable=False),
        sa.Column("moved_at", UTC_DATETIME, nullable=False),
        sa.PrimaryKeyConstraint("process", name="pk_load_checkpoint"),
        schema=CONTROL_SCHEMA,
    )
    op.create_table(
        "load_day",
        sa.Column("process", sa.String(length=128), nullable=False),
        sa.Column("scope_start", UTC_DATETIME, nullable=False),
        sa.Column("scope_end", UTC_DATETIME, nullable=False),
        sa.Column("load_id", sa.String(length=36), nullable=False),
        sa.Column("plan_sha256", sa.String(length=71), nullable=False),
        sa.Column("row_count", sa.BigInteger(), nullable=False),
        sa.Column("loaded_at", UTC_DATETIME, nullable=False),
        sa.PrimaryKeyConstraint("process", "scope_start", name="pk_load_day"),
        schema=CONTROL_SCHEMA,
    )
    op.create_table(
        "load_event",
        sa.Column("load_id", sa.String(length=36), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("change_id", sa.String(length=36), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("from_state", sa.String(length=24)),
        sa.Column("to_state", sa.String(length=24), nullable=False),
        sa.Column("guard", sa.String(length=24)),
        sa.Column("fencing_epoch", sa.BigInteger(), nullable=False),
        sa.Column("worker_id", sa.String(length=64), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("changed_at", UTC_DATETIME, nullable=False),
        sa.ForeignKeyConstraint(["load_id"], [f"{CONTROL_SCHEMA}.load.load_id"], name="fk_load_event_load_id"),
        sa.PrimaryKeyConstraint("load_id", "version", name="pk_load_event"),
        schema=CONTROL_SCHEMA,
    )
