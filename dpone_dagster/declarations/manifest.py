"""The load manifest: what `dpone.batch.v1` and `dpone.flow.v1` may say, each field once.

The JSON Schema, the reference in the docs, the validation and the plan digest derive from these models. A field that
is not here is refused, wherever it stands; so is a field that its neighbours make meaningless.
"""

import re
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    Strict,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from dpone_dagster.contracts.mart import Identifier
from dpone_dagster.contracts.model import ClosedModel

# Names that engines give: anything, so they are always quoted.
Name = Annotated[str, Field(min_length=1, max_length=128)]
Id = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]
Count = Annotated[int, Field(ge=0)]
Severity = Literal["error", "warning"]
Side = Literal["source", "target"]


_PLAIN_DECIMAL = r"^[0-9]{1,20}(\.[0-9]{1,20})?$"
_DAY = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"


def _plain_decimal(value: Any) -> Any:
    # 0.1 as a binary float is another number; the YAML loader hands decimals over as text.
    if isinstance(value, float):
        raise ValueError("should be an exact decimal, not a binary float: write it as text")
    # Decimal itself takes 1e9999, 1_0, blanks and the digits of other scripts.
    if isinstance(value, bool) or (isinstance(value, str) and not re.fullmatch(_PLAIN_DECIMAL, value)):
        raise ValueError("should be a plain decimal number of 0 or more, such as 0.5")
    return value


def _iso_day(value: Any) -> Any:
    # Pydantic would read text of digits alone as seconds since 1970.
    if not isinstance(value, str):
        return value
    try:
        return date.fromisoformat(value if re.fullmatch(_DAY, value) else "")
    except ValueError:
        raise ValueError("should be a date YYYY-MM-DD") from None


Day = Annotated[date, BeforeValidator(_iso_day), WithJsonSchema({"type": "string", "format": "date", "pattern": _DAY})]
ExactDecimal = Annotated[
    Decimal,
    Field(ge=0, allow_inf_nan=False),
    BeforeValidator(_plain_decimal),
    Strict(False),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": _PLAIN_DECIMAL}]}),
]


_SIGNED_DECIMAL = r"^-?[0-9]{1,20}(\.[0-9]{1,20})?$"


def _signed_decimal(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(_SIGNED_DECIMAL, value):
        raise ValueError("should be a plain decimal number, such as -0.5")
    return value if isinstance(value, str) else _plain_decimal(value)


SignedDecimal = Annotated[
    Decimal,
    Field(allow_inf_nan=False),
    BeforeValidator(_signed_decimal),
    Strict(False),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": _SIGNED_DECIMAL}]}),
]


def _unique(names: tuple[str, ...] | None, field: str) -> None:
    if names is not None and len(set(names)) != len(names):
        raise ValueError(f"{field} repeats a name")


# ------------------------------------------------------------------------------------------------ relations


class TableRef(ClosedModel):
    """A table: its schema (SQL Server, PostgreSQL) or database (ClickHouse), and its name.

    Attributes:
        schema_name: the schema or database.
        name: the table; any name that the engine takes.
    """

    schema_name: Name = Field(alias="schema")
    name: Name

    @property
    def dotted(self) -> str:
        """``schema.name``."""
        return f"{self.schema_name}.{self.name}"


class SqlText(ClosedModel):
    """One SQL body: short text in ``sql``, or a file beside the manifest in ``sql_file``.

    Attributes:
        sql: short SQL.
        sql_file: a path relative to the manifest's folder, inside the repository.
    """

    sql: Annotated[str, Field(min_length=1)] | None = None
    sql_file: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "SqlText":
        if (self.sql is None) == (self.sql_file is None):
            raise ValueError("exactly one of sql and sql_file is needed")
        return self


# ---------------------------------------------------------------------------------------------------- hooks

HookKind = Literal[
    "source_refresh",
    "source_materialization",
    "source_maintenance",
    "target_preparation",
    "target_maintenance",
    "data_quality_probe",
    "notification",
    "custom",
]


class HookLineage(ClosedModel):
    """What a hook reads and writes, as the author says; shown, not checked.

    Attributes:
        inputs: what is read.
        outputs: what is written.
    """

    inputs: tuple[Name, ...] = ()
    outputs: tuple[Name, ...] = ()


class HookExecution(ClosedModel):
    """Where a hook runs: inline in the load's own process, or as a step of its own that the orchestrator shows.

    Attributes:
        cli: under ``dpone run`` hooks always run in its own process.
        orchestrator: ``separate_task`` makes the hook a step of its own in Dagster.
    """

    cli: Literal["inline"] = "inline"
    orchestrator: Literal["inline", "separate_task"] = Field(
        default="inline", validation_alias=AliasChoices("orchestrator", "airflow")
    )

    @model_validator(mode="before")
    @classmethod
    def _one_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and "airflow" in data and "orchestrator" in data:
            raise ValueError("airflow is an alias of orchestrator: give one of them")
        return data


class RetryPolicy(ClosedModel):
    """How often a hook is tried when its engine refuses it or cannot be reached before it was sent.

    Attributes:
        attempts: tries altogether.
        delay_seconds: the pause between two tries.
    """

    attempts: Annotated[int, Field(ge=2, le=10)]
    delay_seconds: Annotated[int, Field(ge=0, le=600)] = 5


class Hook(ClosedModel):
    """One action before the extraction (``pre_hook``) or after the load (``post_hook``).

    Attributes:
        kind: what the hook is for; shown in evidence.
        sql: short SQL.
        sql_file: a path relative to the manifest's folder, inside the repository.
        retry_policy: ``none``, or how often and how far apart.
        depends_on: ids of the same phase that run before.
        timeout_seconds: the engine's deadline for the whole body.
        id: unique inside its phase.
        type: the provider that runs it; ``sql``, ``webhook`` and ``data_quality_probe`` ship.
        connector: which side's engine runs the SQL.
        autocommit: every statement for itself; otherwise one transaction, where the engine has them.
        mutates_source: the author's word that the body changes something; SQL that does needs it.
        expect: for ``data_quality_probe``: the one number that the query should yield.
        webhook: for ``webhook``: the environment variable that holds the address.
        options: for providers of others.
    """

    id: Id
    kind: HookKind
    type: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")] = "sql"
    connector: Literal["source", "sink"] = "source"
    sql: Annotated[str, Field(min_length=1)] | None = None
    sql_file: Annotated[str, Field(min_length=1)] | None = None
    autocommit: bool = True
    mutates_source: bool = False
    retry_policy: Literal["none"] | RetryPolicy = "none"
    depends_on: tuple[Id, ...] = ()
    lineage: HookLineage = HookLineage()
    execution: HookExecution = HookExecution()
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 3600
    expect: int | None = None
    webhook: Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")] | None = None
    options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fields_belong_to_the_type(self) -> "Hook":
        has_sql = (self.sql is not None) + (self.sql_file is not None)
        if self.type in ("sql", "data_quality_probe") and has_sql != 1:
            raise ValueError("exactly one of sql and sql_file is needed")
        if self.type == "webhook" and self.kind != "notification":
            raise ValueError("kind should be notification for a webhook")
        if self.type == "webhook" and (has_sql or self.webhook is None):
            raise ValueError("webhook should name the environment variable of the address, and stands without SQL")
        if self.kind == "data_quality_probe" and self.type in ("sql", "webhook"):
            raise ValueError("type should be data_quality_probe for this kind: sql alone compares nothing")
        if (self.type == "data_quality_probe") != (self.expect is not None):
            raise ValueError("expect belongs to data_quality_probe, which needs it")
        if self.webhook is not None and self.type != "webhook":
            raise ValueError("webhook belongs to the type webhook")
        if self.options is not None and self.type in ("sql", "webhook", "data_quality_probe"):
            raise ValueError("options belong to providers that do not ship with dpone")
        _unique(self.depends_on, "depends_on")
        return self


class Hooks(ClosedModel):
    """The two phases; ``depends_on`` names hooks of the same phase.

    Attributes:
        pre_hook: before the extraction.
        post_hook: after the load is finished and its state kept.
    """

    pre_hook: tuple[Hook, ...] = ()
    post_hook: tuple[Hook, ...] = ()


# --------------------------------------------------------------------------------------------------- source


class Read(ClosedModel):
    """Which rows of the source a run reads.

    Attributes:
        mode: ``whole``; ``daily``, one UTC day of ``column``; ``watermark``, what lies above the checkpoint.
        column: a datetime2(6) in UTC for ``daily``; any ordered NOT NULL column for ``watermark``.
        start_date: the first day of ``daily``.
    """

    mode: Literal["whole", "daily", "watermark"] = "whole"
    column: Name | None = None
    start_date: Day | None = None

    @model_validator(mode="after")
    def _fields_belong_to_the_mode(self) -> "Read":
        if (self.mode == "whole") != (self.column is None):
            raise ValueError("column belongs to daily and watermark, which need it")
        if (self.mode == "daily") != (self.start_date is not None):
            raise ValueError("start_date belongs to daily, which needs it")
        return self


class SourceOptions(ClosedModel):
    """What a source does besides being read.

    Attributes:
        query: read this query instead of a table.
    """

    hooks: Hooks = Hooks()
    query: SqlText | None = None


class Source(ClosedModel):
    """Where the rows come from: a table, a query under ``options.query``, or the Python asset that hands them over.

    Attributes:
        type: ``sqlserver`` (``mssql`` is the same; PostgreSQL stands in for it in the embedded profile),
            ``clickhouse`` or ``asset``.
        connection_id: a named connection; by default the profile's own.
    """

    type: Literal["sqlserver", "mssql", "clickhouse", "asset"]
    connection_id: Identifier | None = None
    table: TableRef | None = None
    read: Read = Read()
    options: SourceOptions = SourceOptions()

    @model_validator(mode="after")
    def _one_origin(self) -> "Source":
        origins = (self.table is not None) + (self.options.query is not None)
        if self.type == "asset":
            if origins or self.read.mode != "whole":
                raise ValueError("an asset hands its rows over: no table, no query, and read whole")
        elif origins != 1:
            raise ValueError("exactly one of table and options.query is needed")
        return self


# ----------------------------------------------------------------------------------------------------- sink


class Staging(ClosedModel):
    """Where scratch tables live; by default beside the target.

    Attributes:
        schema_name: the database for scratch tables.
    """

    schema_name: Identifier | None = Field(default=None, alias="schema")


class ClickHouseStorage(ClosedModel):
    """How a missing target is created, and the cluster that DDL names.

    Attributes:
        cluster: named in ON CLUSTER of every DDL statement.
        partition_by: a ClickHouse expression, checked by the engine; none for no partitions.
        order_by: sorting columns; by default the unique key, else nothing.
    """

    cluster: Identifier | None = None
    partition_by: Annotated[str, Field(min_length=1)] | None = None
    order_by: tuple[Name, ...] | None = None


class Storage(ClosedModel):
    """Per engine."""

    clickhouse: ClickHouseStorage = ClickHouseStorage()


class PhysicalDesignSpec(ClosedModel):
    """The physical design of the target."""

    storage: Storage = Storage()


class RowIdentity(ClosedModel):
    """``__dpone__row_id``: written only where a unique key makes it deterministic.

    Attributes:
        mode: ``auto``: where there is a unique key; ``off``: never; ``required``: refuse without one.
        unsupported_policy: what to do under ``auto`` without a unique key.
    """

    mode: Literal["auto", "off", "required"] = "auto"
    unsupported_policy: Literal["warn", "skip", "error"] = "warn"


class Lineage(ClosedModel):
    """The ``__dpone__*`` columns, projected in the engine's own SQL.

    Attributes:
        enabled: whether the columns are written.
        preset: which columns.
    """

    enabled: bool = False
    preset: Literal["bulk_standard"] = "bulk_standard"
    row_identity: RowIdentity = RowIdentity()


class Audit(ClosedModel):
    """``__dpone__loads`` and ``__dpone__load_steps``; switched off only explicitly.

    Attributes:
        enabled: ``false`` is an explicit opt-out.
        mode: ``off`` is an explicit opt-out too.
        state_schema: the database of the two tables; by default the target's.
    """

    enabled: bool = True
    mode: Literal["standard", "off"] = "standard"
    state_schema: Identifier | None = None


class DecisionAudit(ClosedModel):
    """Whether runtime decisions become step rows.

    Attributes:
        persist: whether they do.
    """

    persist: bool = True


class LoadGovernance(ClosedModel):
    """When the target changes in relation to the gates.

    Attributes:
        enabled: without it nothing but the load runs: no audit, and gates and acceptance may not be declared.
        finalization_phase: ``legacy_post_finalize`` writes straight into the target; gates then judge what a
            reader sees already.
    """

    enabled: bool = True
    finalization_phase: Literal["pre_finalize", "legacy_post_finalize"] = "pre_finalize"
    audit: Audit = Audit()
    decision_audit: DecisionAudit = DecisionAudit()


class SinkOptions(ClosedModel):
    """What a sink does besides taking rows."""

    lineage: Lineage = Lineage()
    load_governance: LoadGovernance = LoadGovernance()


Strategy = Literal["full_refresh", "append", "merge", "replace", "partition_replace"]


class Sink(ClosedModel):
    """Where the rows go, and how the target takes them.

    Attributes:
        type: ClickHouse.
        connection_id: a named connection; by default the profile's own.
        table: the target.
        strategy: ``full_refresh``: the staged rows become the table; ``append``: they are added; ``merge``: they
            replace rows of the same ``unique_key``; ``replace``: they replace the scope that was read (everything,
            or one day); ``partition_replace``: they replace every partition that they touch.
        unique_key: NOT NULL columns that name a row.
    """

    type: Literal["clickhouse"]
    connection_id: Identifier | None = None
    table: TableRef
    strategy: Strategy
    unique_key: tuple[Name, ...] | None = None
    staging: Staging = Staging()
    physical_design: PhysicalDesignSpec = PhysicalDesignSpec()
    options: SinkOptions = SinkOptions()

    @model_validator(mode="after")
    def _fields_belong_together(self) -> "Sink":
        if self.unique_key is not None and not self.unique_key:
            raise ValueError("unique_key should name a column")
        _unique(self.unique_key, "unique_key")
        if self.strategy == "merge" and self.unique_key is None:
            raise ValueError("strategy merge needs unique_key")
        identity = self.options.lineage.row_identity
        strict = identity.mode == "required" or (identity.mode == "auto" and identity.unsupported_policy == "error")
        if self.options.lineage.enabled and self.unique_key is None and strict:
            raise ValueError("options.lineage.row_identity needs unique_key")
        legacy = self.options.load_governance.finalization_phase == "legacy_post_finalize"
        if legacy and self.strategy != "append":
            raise ValueError("options.load_governance.finalization_phase legacy_post_finalize can only append")
        return self


# ---------------------------------------------------------------------------------------------------- gates


class _Gate(ClosedModel):
    """What every gate has.

    Attributes:
        id: unique among the gates; names the check in Dagster.
        severity: ``error`` stops the load before the target changes; ``warning`` only reports.
        type: what is judged.
        side: which rows are judged: the source's, or the staged ones (``target``).
    """

    id: Id
    severity: Severity = "error"


class Tolerance(ClosedModel):
    """An allowed difference of two row counts: rows, or percent of the source's.

    Attributes:
        mode: rows, or percent of the source's rows.
        value: an exact decimal of 0 or more.
    """

    mode: Literal["absolute", "pct"]
    value: ExactDecimal


class RowCountGate(_Gate):
    """Source and staging hold as many rows; 0 and 0 pass, rows out of nothing never do.

    Attributes:
        tolerance: none by default.
    """

    type: Literal["row_count_reconciliation"]
    tolerance: Tolerance = Tolerance(mode="absolute", value=Decimal(0))


class MinRowsGate(_Gate):
    """One side holds ``threshold`` rows or more.

    Attributes:
        threshold: a whole number of 0 or more.
    """

    type: Literal["min_rows"]
    side: Side = "target"
    threshold: Count


class TypedHashGate(_Gate):
    """Source and staging hold the same rows, value by value.

    Attributes:
        modulus: one key in so many is compared.
        mode: ``full``; ``sample``: rows whose key digest modulo ``modulus`` is 0, the same on both engines.
        key: what a sampled row is known by; by default the sink's unique key, else all columns.
        columns: what is compared; by default every business column.
    """

    type: Literal["typed_hash_reconciliation"]
    mode: Literal["full", "sample"] = "full"
    modulus: Annotated[int, Field(ge=2, le=1_000_000)] | None = None
    key: tuple[Name, ...] | None = None
    columns: tuple[Name, ...] | None = None

    @model_validator(mode="after")
    def _modulus_belongs_to_sample(self) -> "TypedHashGate":
        if self.mode == "full" and (self.modulus is not None or self.key is not None):
            raise ValueError("modulus and key belong to the mode sample")
        for field in ("key", "columns"):
            value = getattr(self, field)
            if value is not None and not value:
                raise ValueError(f"{field} should name a column")
            _unique(value, field)
        return self


class CustomSqlGate(_Gate):
    """A query of one side's engine that yields one number, between ``min`` and ``max``.

    ``{{ relation }}`` in it stands for the rows that are judged: the source's, or the staged ones.

    Attributes:
        sql: one reading query.
        sql_file: a path relative to the manifest's folder, inside the repository.
        min: the least allowed result.
        max: the greatest allowed result.
    """

    type: Literal["custom_sql"]
    side: Side = "target"
    sql: Annotated[str, Field(min_length=1)] | None = None
    sql_file: Annotated[str, Field(min_length=1)] | None = None
    min: SignedDecimal | None = None
    max: SignedDecimal | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "CustomSqlGate":
        if (self.sql is None) == (self.sql_file is None):
            raise ValueError("exactly one of sql and sql_file is needed")
        if self.min is None and self.max is None:
            raise ValueError("min or max is needed")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError("min should not exceed max")
        return self


class NotNullGate(_Gate):
    """No row has a NULL in one of the columns.

    Attributes:
        columns: all of them are judged.
    """

    type: Literal["not_null"]
    side: Side = "target"
    columns: Annotated[tuple[Name, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _once(self) -> "NotNullGate":
        _unique(self.columns, "columns")
        return self


class UniqueGate(_Gate):
    """No two rows agree in all the columns; NULLs agree with each other here.

    Attributes:
        columns: taken together.
    """

    type: Literal["unique"]
    side: Side = "target"
    columns: Annotated[tuple[Name, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _once(self) -> "UniqueGate":
        _unique(self.columns, "columns")
        return self


class FreshnessGate(_Gate):
    """The newest value of a datetime column is at most ``max_age_seconds`` older than the reference.

    Attributes:
        column: a datetime2(6) in UTC.
        max_age_seconds: a whole number.
        reference: the start of the run, or the end of the day that is loaded.
    """

    type: Literal["freshness"]
    side: Side = "target"
    column: Name
    max_age_seconds: Count
    reference: Literal["run_start", "scope_end"] = "run_start"


class AcceptedValuesGate(_Gate):
    """Every value of a column is one of ``values``; NULL only where ``allow_null`` says so.

    Attributes:
        column: any column.
        values: text, whole numbers or booleans.
        allow_null: whether NULL is accepted.
    """

    type: Literal["accepted_values"]
    side: Side = "target"
    column: Name
    values: Annotated[tuple[str | int | bool, ...], Field(min_length=1)]
    allow_null: bool = False


class SchemaGate(_Gate):
    """A pandera schema holds for the staged rows, block by block, so memory stays flat.

    Attributes:
        ref: ``module:attribute`` of a ``DataFrameSchema`` or ``DataFrameModel``.
    """

    type: Literal["schema"]
    ref: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$")]


class ProviderGate(_Gate):
    """A gate of somebody else's, registered under the entry points ``dpone.gate_providers``.

    Attributes:
        options: handed to the provider as they are.
    """

    type: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*\.[a-z][a-z0-9_.]*$")]
    side: Side = "target"
    options: dict[str, Any] = Field(default_factory=dict)


def _gate_tag(gate: Any) -> str | None:
    type_ = gate.get("type") if isinstance(gate, dict) else getattr(gate, "type", None)
    if not isinstance(type_, str):
        return None
    # A dot tells the gates of others from a misspelled name of ours.
    return "provider" if "." in type_ else type_


Gate = Annotated[
    Annotated[RowCountGate, Tag("row_count_reconciliation")]
    | Annotated[MinRowsGate, Tag("min_rows")]
    | Annotated[TypedHashGate, Tag("typed_hash_reconciliation")]
    | Annotated[CustomSqlGate, Tag("custom_sql")]
    | Annotated[NotNullGate, Tag("not_null")]
    | Annotated[UniqueGate, Tag("unique")]
    | Annotated[FreshnessGate, Tag("freshness")]
    | Annotated[AcceptedValuesGate, Tag("accepted_values")]
    | Annotated[SchemaGate, Tag("schema")]
    | Annotated[ProviderGate, Tag("provider")],
    Discriminator(
        _gate_tag,
        custom_error_type="gate_type",
        custom_error_message="type should be a known gate type, or a provider's with a dot in it",
    ),
]

# ----------------------------------------------------------------------------------------------- acceptance

Selector = Literal["off", "none", "all_columns", "business_columns", "source_and_binary_semantics", "strict"]
Columns = bool | Selector | Annotated[tuple[Name, ...], Field(min_length=1)]


class Capture(ClosedModel):
    """Which sides are measured.

    Attributes:
        source: what is read.
        staged: what is staged; loads without staging have none.
        target: what a reader sees afterwards.
    """

    source: bool = True
    staged: bool = True
    target: bool = True


class AcceptanceChecks(ClosedModel):
    """What is measured of each side, in one aggregate query, exactly.

    Attributes:
        row_count: count rows.
        null_counts: NULLs a column: ``true`` or a selector for all business columns, or a list of names.
        distinct_counts: exact distinct values a column; the same forms. Expensive on wide tables.
    """

    row_count: bool = True
    null_counts: Columns = "off"
    distinct_counts: Columns = "off"

    @model_validator(mode="after")
    def _once(self) -> "AcceptanceChecks":
        for field in ("null_counts", "distinct_counts"):
            value = getattr(self, field)
            if isinstance(value, tuple):
                _unique(value, field)
        return self

    @property
    def any(self) -> bool:
        """Whether at least one check is asked for."""
        return self.row_count or any(
            value not in (False, "off", "none") for value in (self.null_counts, self.distinct_counts)
        )


class Acceptance(ClosedModel):
    """Counts of source, staging and target that outlive the cleanup.

    Attributes:
        enabled: always said; a disabled policy is validated all the same.
        mode: ``required`` fails the run where a side cannot be measured or sides disagree.
    """

    enabled: bool
    mode: Literal["warn_only", "required"] = "warn_only"
    capture: Capture = Capture()
    checks: AcceptanceChecks = AcceptanceChecks()

    @model_validator(mode="after")
    def _asks_for_something(self) -> "Acceptance":
        if self.enabled and not (self.capture.source or self.capture.staged or self.capture.target):
            raise ValueError("capture should keep a side")
        if self.enabled and not self.checks.any:
            raise ValueError("checks should keep a check")
        return self


class SkippedCheck(ClosedModel):
    """A check of an older manifest that nobody can run: evidence that it was skipped, never proof of anything."""

    id: Id
    type: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,99}$")]


class Quality(ClosedModel):
    """The gates of a load, and what is counted as evidence.

    Attributes:
        gates: rules that are judged before the target changes, in this order in the report.
        acceptance: counts of each side that are kept as evidence.
        skipped_checks: only from the compatibility form under ``mode: warn``; nobody can author it.
    """

    gates: tuple[Gate, ...] = ()
    acceptance: Acceptance | None = None
    skipped_checks: SkipJsonSchema[tuple[SkippedCheck, ...]] = Field(default=(), exclude_if=lambda checks: not checks)

    @model_validator(mode="after")
    def _ids_are_unique(self) -> "Quality":
        ids = tuple(item.id for item in (*self.gates, *self.skipped_checks))
        _unique(ids, "gates")
        if any(id_.startswith("dpone_") for id_ in ids):
            raise ValueError("gates have an id that starts with dpone_, which is the platform's")
        return self


# -------------------------------------------------------------------------------------------------- manifest


class Process(ClosedModel):
    """One load: from one source into one target.

    Attributes:
        description: shown in Dagster.
        owners: shown in Dagster: e-mail addresses or ``team:name``.
        group: the Dagster asset group.
        depends_on: processes of the same flow, or asset keys.
        name: the load's name, its Dagster asset and its ``--selector``.
    """

    name: Identifier
    description: str | None = None
    owners: tuple[str, ...] = ()
    group: Identifier | None = None
    depends_on: tuple[Name, ...] = ()
    source: Source
    sink: Sink
    quality: Quality = Quality()

    @model_validator(mode="after")
    def _parts_agree(self) -> "Process":
        self.check()
        return self

    def check(self) -> None:
        """Raise ValueError where source, sink and quality contradict each other."""
        read, strategy = self.source.read.mode, self.sink.strategy
        if strategy == "full_refresh" and read != "whole":
            raise ValueError("sink.strategy full_refresh replaces the whole table, so source.read.mode should be whole")
        if strategy == "replace" and read == "watermark":
            raise ValueError("sink.strategy replace needs a scope: source.read.mode should be whole or daily")
        if strategy == "partition_replace" and read == "watermark":
            raise ValueError(
                "sink.strategy partition_replace would drop what lies below the watermark: use merge or append"
            )
        if strategy == "append" and read == "daily":
            # The day would be added once more by every repetition of its partition.
            raise ValueError(
                "sink.strategy append would double a day that is loaded again: use replace, merge or partition_replace"
            )
        governance = self.sink.options.load_governance
        acceptance = self.quality.acceptance
        if not governance.enabled and (self.quality.gates or (acceptance and acceptance.enabled)):
            raise ValueError("quality.gates and acceptance need sink.options.load_governance.enabled")
        for index, gate in enumerate(self.quality.gates):
            if isinstance(gate, FreshnessGate) and gate.reference == "scope_end" and read != "daily":
                raise ValueError(f"quality.gates.{index}.reference scope_end needs source.read.mode daily")
            if self.legacy and not self.sink.options.lineage.enabled and getattr(gate, "side", "target") == "target":
                # Nothing else tells the rows of this load from the others in the target.
                raise ValueError(
                    f"quality.gates.{index} judges rows in the target: sink.options.lineage.enabled is needed"
                )

    @property
    def legacy(self) -> bool:
        """Whether the target changes before the gates run."""
        return self.sink.options.load_governance.finalization_phase == "legacy_post_finalize"


class BatchManifest(Process):
    """``dpone.batch.v1``: one load in one file.

    Attributes:
        kind: the document's type.
    """

    kind: Literal["dpone.batch.v1"]

    @property
    def processes(self) -> Iterator[Process]:
        """The one process."""
        # Validated already, field by field and together; without it a manifest would be validated twice.
        given = {name: getattr(self, name) for name in Process.model_fields}
        yield Process.model_construct(_fields_set=self.model_fields_set - {"kind"}, **given)


class FlowManifest(ClosedModel):
    """``dpone.flow.v1``: several loads in one file, in the order of their dependencies.

    Attributes:
        kind: the document's type.
        name: the flow's name.
        description: for readers.
        loads: one entry a load.
        quality: gates for every process that declares none, acceptance for every one that declares none.
    """

    kind: Literal["dpone.flow.v1"]
    name: Identifier
    description: str | None = None
    quality: Quality | None = None
    loads: Annotated[tuple[Process, ...], Field(min_length=1, alias="processes")]

    @model_validator(mode="after")
    def _names_are_unique(self) -> "FlowManifest":
        _unique(tuple(process.name for process in self.loads), "processes")
        targets = [process.sink.table.dotted for process in self.loads]
        if twice := [target for target in targets if targets.count(target) > 1]:
            raise ValueError(f"processes load {twice[0]} twice: a target belongs to one process")
        for index, process in enumerate(self.processes):
            try:
                process.check()
            except ValueError as error:
                raise ValueError(f"with the flow's quality, processes.{index} does not fit: {error}") from None
        return self

    @property
    def processes(self) -> Iterator[Process]:
        """Each process, with the flow's gates and acceptance where it declares none itself."""
        for process in self.loads:
            own = process.quality.model_fields_set if "quality" in process.model_fields_set else set()
            given = self.quality.model_fields_set if self.quality else set()
            # Checks of the older form are gates, some of which nobody can run: they come or stay together.
            groups = ({"gates", "skipped_checks"}, {"acceptance"})
            inherited = {name for group in groups if not group & own for name in group & given}
            if not inherited:
                yield process
                continue
            fields = {name: self.quality if name in inherited else process.quality for name in Quality.model_fields}
            quality = Quality(**{name: getattr(holder, name) for name, holder in fields.items()})
            yield process.model_copy(update={"quality": quality})


Manifest = Annotated[BatchManifest | FlowManifest, Field(discriminator="kind")]
