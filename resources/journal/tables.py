"""The journal's tables, once; SQLAlchemy Core, portable between PostgreSQL and SQL Server.

Conventions: digests are ``sha256:`` + 64 hex digits; JSON is canonical JSON in a text column; every datetime
is naive UTC with microseconds (``timestamp`` here, ``datetime2(6)`` on SQL Server), so SQL that writes one
must convert: ``now() at time zone 'utc'``, ``sysutcdatetime()``. Schemas: ``dpone_control`` holds these
tables, ``dpone_images`` the before and after images that the dbt strategy creates.

What the dbt strategy may rely on, inside the adapter's transaction:

- the fence: ``select epoch, worker_id, operation_id from dpone_control.resource_guard where resource_id =
  'mart:<name>' for update``, and the operation's row: ``operation_plan_sha256``, ``state = 'PREPARING'``,
  ``version``, ``fencing_epoch``, ``worker_id``, ``mart``, ``scope_start``, ``scope_end``;
- ``dpone_control.model_receipt``: it inserts one row, and nobody ever changes one.

While that transaction is open the guard's row is locked, so transitions of the operation wait for it.
"""

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mssql

from dpone_dagster.journal.graph import TERMINAL, State

CONTROL_SCHEMA = "dpone_control"
IMAGE_SCHEMA = "dpone_images"

Digest = sa.String(71)
Worker = sa.String(64)
Name = sa.String(128)
Execution = sa.String(512)  # as long as the contract lets it be
Target = sa.String(257)  # database.table
Resource = sa.String(300)  # kind:name
Lane = sa.Numeric(20, 0)  # an unsigned 64-bit sum


class UtcDateTime(sa.types.TypeDecorator[datetime]):
    """Aware UTC datetimes in Python, naive UTC ones in the database."""

    impl = sa.DateTime().with_variant(mssql.DATETIME2(6), "mssql")  # type: ignore[no-untyped-call]
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Store UTC without its zone."""
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Give the zone back."""
        return None if value is None else value.replace(tzinfo=UTC)


METADATA = sa.MetaData(
    schema=CONTROL_SCHEMA,
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    },
)

# ------------------------------------------------------------------------------------------ who may do it

# The fence. One row a resource (`workflow:<name>`, `mart:<name>`, `target:<database>.<table>`), made on first
# use and never deleted; epoch grows by one with every admission and takeover. An operation's fencing_epoch is
# its mart guard's epoch. operation_id is the operation admitted last (NULL on workflow guards).
resource_guard = sa.Table(
    "resource_guard",
    METADATA,
    sa.Column("resource_id", Resource, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("worker_id", Worker, nullable=False),
    sa.Column("operation_id", Digest),
    sa.Column("changed_at", UtcDateTime, nullable=False),
)

# One row each time a worker got its locks; says who to name to those who wait, and whom to end. A row without
# ended_at is no proof of life: the session lock is.
attempt = sa.Table(
    "attempt",
    METADATA,
    sa.Column("attempt_id", sa.String(36), primary_key=True),
    sa.Column("worker_id", Worker, nullable=False, index=True),
    sa.Column("logical_run_id", Name, nullable=False),
    sa.Column("run_id", Name, nullable=False),
    sa.Column("try_number", sa.Integer, nullable=False),
    sa.Column("task_id", sa.String(256), nullable=False),
    sa.Column("owner", sa.String(32), nullable=False),
    sa.Column("scope_start", UtcDateTime, nullable=False),
    sa.Column("scope_end", UtcDateTime, nullable=False),
    sa.Column("session_tag", sa.String(63), nullable=False),
    sa.Column("backend_pid", sa.Integer, nullable=False),
    sa.Column("host", sa.String(256), nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("started_at", UtcDateTime, nullable=False),
    sa.Column("ended_at", UtcDateTime),
    sa.Column("ended_reason", sa.String(200)),
)

attempt_resource = sa.Table(
    "attempt_resource",
    METADATA,
    sa.Column("attempt_id", sa.ForeignKey(attempt.c.attempt_id), primary_key=True),
    sa.Column("resource_id", Resource, primary_key=True, index=True),
)

# Written before a worker's sessions are ended, finished afterwards.
takeover_log = sa.Table(
    "takeover_log",
    METADATA,
    sa.Column("takeover_id", sa.String(36), primary_key=True),
    sa.Column("worker_id", Worker, nullable=False, index=True),
    sa.Column("by_login", Name, nullable=False),
    sa.Column("by_host", sa.String(256), nullable=False),
    sa.Column("by_pid", sa.Integer, nullable=False),
    sa.Column("reason", sa.String(400), nullable=False),
    sa.Column("logged_at", UtcDateTime, nullable=False),
    sa.Column("sessions_ended", sa.Integer),
    sa.Column("finished_at", UtcDateTime),
)

# ---------------------------------------------------------------------------------------- what happened

operation = sa.Table(
    "operation",
    METADATA,
    sa.Column("operation_id", Digest, primary_key=True),
    sa.Column("operation_plan_sha256", Digest, nullable=False),
    sa.Column("workflow_plan_sha256", Digest, nullable=False),
    sa.Column("workflow_execution_id", Execution, nullable=False, index=True),
    sa.Column("workflow", Name, nullable=False),
    sa.Column("mart", Name, nullable=False),
    sa.Column("target", Target, nullable=False),
    sa.Column("scope_start", UtcDateTime, nullable=False),
    sa.Column("scope_end", UtcDateTime, nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("replacement_ordinal", sa.Integer, nullable=False),
    sa.Column("mode", sa.String(40), nullable=False),
    sa.Column("attempt_binding_sha256", Digest, nullable=False),
    sa.Column("state", sa.String(24), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("unknown_since", sa.String(24)),
    sa.Column("fencing_epoch", sa.BigInteger, nullable=False),
    sa.Column("worker_id", Worker, nullable=False),
    # The mart guard's epoch at admission: orders the operations of a mart, whatever the clocks say.
    sa.Column("admitted_epoch", sa.BigInteger, nullable=False),
    sa.Column("facts", sa.Text, nullable=False),
    sa.Column("admitted_at", UtcDateTime, nullable=False),
    sa.Column("updated_at", UtcDateTime, nullable=False),
    # When staging and images of a finished operation were dropped; outside the operation's versions, like phases.
    sa.Column("cleaned_at", UtcDateTime),
    sa.CheckConstraint(
        "state in ({})".format(", ".join(f"'{state}'" for state in State)),
        name="state",
    ),
    sa.CheckConstraint(
        "(state = 'COMMIT_UNKNOWN' and unknown_since is not null)"
        " or (state <> 'COMMIT_UNKNOWN' and unknown_since is null)",
        name="unknown_since",
    ),
    sa.Index("ix_operation_mart_scope", "mart", "scope_start"),
)

# At most one unfinished operation a mart, kept by the engine; spelled so that SQL Server takes it.
_OPEN = sa.text(" and ".join(f"state <> '{state}'" for state in sorted(TERMINAL)))
sa.Index("ux_operation_open", operation.c.mart, unique=True, postgresql_where=_OPEN, mssql_where=_OPEN)

_UNCLEANED = sa.text("cleaned_at is null")
sa.Index("ix_operation_uncleaned", operation.c.mart, postgresql_where=_UNCLEANED, mssql_where=_UNCLEANED)

# Append-only: one row for every version of an operation, in the transaction that made it. from_state is NULL
# for admission; facts are the ones this change added; documents is a JSON list of the digests it wrote.
transition = sa.Table(
    "transition",
    METADATA,
    sa.Column("operation_id", sa.ForeignKey(operation.c.operation_id), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("change_id", sa.String(36), nullable=False),
    sa.Column("kind", sa.String(12), nullable=False),  # admit, transition, record, take_over, publish
    sa.Column("from_state", sa.String(24)),
    sa.Column("to_state", sa.String(24), nullable=False),
    sa.Column("fencing_epoch", sa.BigInteger, nullable=False),
    sa.Column("worker_id", Worker, nullable=False),
    sa.Column("facts", sa.Text, nullable=False),
    sa.Column("documents", sa.Text, nullable=False),
    sa.Column("changed_at", UtcDateTime, nullable=False),
)

# Create-only. body is the canonical JSON of the whole document.
document = sa.Table(
    "document",
    METADATA,
    sa.Column("sha256", Digest, primary_key=True),
    sa.Column("schema_name", Name, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

# Durations for people; not evidence.
phase = sa.Table(
    "phase",
    METADATA,
    sa.Column("phase_id", sa.String(36), primary_key=True),
    sa.Column("operation_id", Digest, nullable=False, index=True),
    sa.Column("worker_id", Worker, nullable=False),
    sa.Column("name", sa.String(40), nullable=False),
    sa.Column("started_at", UtcDateTime, nullable=False),
    sa.Column("seconds", sa.Float(53), nullable=False),
    sa.Column("row_count", sa.BigInteger),
    sa.Column("byte_count", sa.BigInteger),
)

# ---------------------------------------------------------------------------------------- what is true now

baseline = sa.Table(
    "baseline",
    METADATA,
    sa.Column("mart", Name, primary_key=True),
    sa.Column("target", Target, nullable=False),
    sa.Column("target_uuid", sa.String(36), nullable=False),
    sa.Column("receipt_sha256", Digest, nullable=False),
    sa.Column("worker_id", Worker, nullable=False),
    sa.Column("adopted_at", UtcDateTime, nullable=False),
)

# operation_id is NULL while the generation is the adopted baseline.
generation_head = sa.Table(
    "generation_head",
    METADATA,
    sa.Column("target", Target, primary_key=True),
    sa.Column("uuid", sa.String(36), nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("operation_id", Digest),
    sa.Column("changed_at", UtcDateTime, nullable=False),
)

# Every generation a target ever had. retired_at is set when a successor is published, dropped_at when the
# table is known to be gone; the one with neither is the head.
generation = sa.Table(
    "generation",
    METADATA,
    sa.Column("target", Target, primary_key=True),
    sa.Column("uuid", sa.String(36), primary_key=True),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("operation_id", Digest),
    sa.Column("published_at", UtcDateTime, nullable=False),
    sa.Column("retired_at", UtcDateTime),
    sa.Column("dropped_at", UtcDateTime),
)

scope_head = sa.Table(
    "scope_head",
    METADATA,
    sa.Column("mart", Name, primary_key=True),
    sa.Column("scope_start", UtcDateTime, primary_key=True),
    sa.Column("scope_end", UtcDateTime, nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("operation_id", Digest, nullable=False),
    sa.Column("row_count", sa.BigInteger, nullable=False),
    sa.Column("after_image_sha256", Digest, nullable=False),
    sa.Column("artifact_manifest_sha256", Digest, nullable=False),
    sa.Column("target_uuid", sa.String(36), nullable=False),
    sa.Column("published_at", UtcDateTime, nullable=False),
)

# The greatest COMPLETE day of a mart. Not the end of an unbroken run of days: backfills publish in any order,
# and gaps are read from scope_head.
checkpoint = sa.Table(
    "checkpoint",
    METADATA,
    sa.Column("mart", Name, primary_key=True),
    sa.Column("last_scope_start", UtcDateTime, nullable=False),
    sa.Column("last_scope_end", UtcDateTime, nullable=False),
    sa.Column("operation_id", Digest, nullable=False),  # the publication that moved it last
    sa.Column("published_at", UtcDateTime, nullable=False),
)

# ---------------------------------------------------------------------------------------- governed loads

# One row a governed load; scope_start and scope_end are NULL where no day is loaded. States, fences and facts are those
# of operations.
load = sa.Table(
    "load",
    METADATA,
    sa.Column("load_id", sa.String(36), primary_key=True),
    sa.Column("process", Name, nullable=False),
    sa.Column("target", Target, nullable=False),
    sa.Column("strategy", sa.String(24), nullable=False),
    sa.Column("plan_sha256", Digest, nullable=False),
    sa.Column("run_id", Name, nullable=False),
    sa.Column("scope_start", UtcDateTime),
    sa.Column("scope_end", UtcDateTime),
    sa.Column("state", sa.String(24), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("unknown_since", sa.String(24)),
    sa.Column("fencing_epoch", sa.BigInteger, nullable=False),
    sa.Column("worker_id", Worker, nullable=False),
    # The process guard's epoch at admission: orders the loads of a process, whatever the clocks say.
    sa.Column("admitted_epoch", sa.BigInteger, nullable=False),
    sa.Column("facts", sa.Text, nullable=False),
    sa.Column("admitted_at", UtcDateTime, nullable=False),
    sa.Column("updated_at", UtcDateTime, nullable=False),
    sa.CheckConstraint("state in ({})".format(", ".join(f"'{state}'" for state in State)), name="state"),
    sa.CheckConstraint(
        "(state = 'COMMIT_UNKNOWN' and unknown_since is not null)"
        " or (state <> 'COMMIT_UNKNOWN' and unknown_since is null)",
        name="unknown_since",
    ),
    sa.Index("ix_load_process", "process", "admitted_epoch"),
)
sa.Index("ux_load_open", load.c.process, unique=True, postgresql_where=_OPEN, mssql_where=_OPEN)

# Append-only: one row for every version of a load.
load_event = sa.Table(
    "load_event",
    METADATA,
    sa.Column("load_id", sa.ForeignKey(load.c.load_id), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("change_id", sa.String(36), nullable=False),
    sa.Column(
        "kind", sa.String(16), nullable=False
    ),  # begin, transition, record, take_over, persist_state, clear_guard
    sa.Column("from_state", sa.String(24)),
    sa.Column("to_state", sa.String(24), nullable=False),
    sa.Column("guard", sa.String(24)),
    sa.Column("fencing_epoch", sa.BigInteger, nullable=False),
    sa.Column("worker_id", Worker, nullable=False),
    sa.Column("facts", sa.Text, nullable=False),
    sa.Column("changed_at", UtcDateTime, nullable=False),
)

# Spec G's native guard: while a route has a row, nothing loads it automatically.
load_guard = sa.Table(
    "load_guard",
    METADATA,
    sa.Column("process", Name, primary_key=True),
    sa.Column("target", Target, nullable=False),
    sa.Column("strategy", sa.String(24), nullable=False),
    sa.Column("status", sa.String(24), nullable=False),
    sa.Column("load_id", sa.String(36), nullable=False),
    sa.Column("set_at", UtcDateTime, nullable=False),
)

# What the last accepted load read up to; it moves after everything else.
load_checkpoint = sa.Table(
    "load_checkpoint",
    METADATA,
    sa.Column("process", Name, primary_key=True),
    sa.Column("watermark", sa.String(128)),
    sa.Column("load_id", sa.String(36), nullable=False),
    sa.Column("moved_at", UtcDateTime, nullable=False),
)

load_day = sa.Table(
    "load_day",
    METADATA,
    sa.Column("process", Name, primary_key=True),
    sa.Column("scope_start", UtcDateTime, primary_key=True),
    sa.Column("scope_end", UtcDateTime, nullable=False),
    sa.Column("load_id", sa.String(36), nullable=False),
    sa.Column("plan_sha256", Digest, nullable=False),
    sa.Column("row_count", sa.BigInteger, nullable=False),
    sa.Column("loaded_at", UtcDateTime, nullable=False),
)

# ------------------------------------------------------------------------------- written by the dbt strategy


def _image(side: str) -> list[sa.Column[Any]]:
    """One image of a receipt: where it is, its row count and the four lanes of its set digest."""
    return [
        sa.Column(f"{side}_schema", Name, nullable=False),
        sa.Column(f"{side}_name", Name, nullable=False),
        sa.Column(f"{side}_rows", sa.BigInteger, nullable=False),
        *(sa.Column(f"{side}_l{lane}", Lane, nullable=False) for lane in range(4)),
    ]


model_receipt = sa.Table(
    "model_receipt",
    METADATA,
    sa.Column("operation_id", Digest, primary_key=True),
    sa.Column("operation_plan_sha256", Digest, nullable=False),
    sa.Column("workflow_execution_id", Execution, nullable=False),
    sa.Column("fencing_epoch", sa.BigInteger, nullable=False),
    sa.Column("worker_id", Worker, nullable=False),
    *_image("before"),
    *_image("after"),
    sa.Column("updated_rows", sa.BigInteger, nullable=False),
    sa.Column("inserted_rows", sa.BigInteger, nullable=False),
    sa.Column("source_rows", sa.BigInteger, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
)
