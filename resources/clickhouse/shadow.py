"""The shadow: untouched partitions hard-linked from the target, touched ones rebuilt row by row."""

# ruff: noqa: S608 - names match ``contracts.mart.Identifier`` and are quoted; values go through ``literal``.

from collections.abc import Collection, Sequence

from dpone_dagster.contracts.mart import MartSpec, Relation, Scope
from dpone_dagster.errors import DponeError
from dpone_dagster.faults import reach
from dpone_dagster.ports import PhysicalDesign, ShadowReport
from resources.clickhouse.dialect import relation_sql, scope_predicate
from resources.clickhouse.quiescence import quiesce
from resources.clickhouse.statements import BOUNDED, Statements, literal, literals, names

# Staged keys that one anti-join, or rows that one group-by of the proof, holds in memory at a time.
BUCKET_ROWS = 1_000_000
# Each bucket reads the touched partitions once more, so their number has an end; beyond it group-bys spill.
MAX_BUCKETS = 32


def touched_partitions(
    statements: Statements, mart: MartSpec, target: Relation, stage: Relation, scope: Scope
) -> list[str]:
    """Return the partition ids of the staged rows and of the target's rows of the scope, sorted.

    Staging has the target's partition expression, so equal rows have equal ids. Where the target has no row of the
    scope, the scope's own partition needs no rebuilding beyond what staging brings.
    """
    return [
        str(row[0])
        for row in statements.rows(
            f"SELECT DISTINCT _partition_id AS id FROM {relation_sql(stage)}"
            f" UNION DISTINCT SELECT DISTINCT _partition_id AS id FROM {relation_sql(target)}"
            f" WHERE {scope_predicate(mart.event_time, scope)} ORDER BY id"
        )
    ]


def expected_rows_sql(
    columns: Sequence[str], key: Sequence[str], target: Relation, stage: Relation, touched: Sequence[str], bucket: str
) -> str:
    """Return the query for the target's rows that stay in the touched partitions: those without a staged key.

    Args:
        bucket: a predicate over the key that takes its share of both sides.
    """
    key_sql = names(key)
    return (
        f"SELECT {names(columns)} FROM {relation_sql(target)}"
        f" WHERE _partition_id IN ({literals(touched)}) AND {bucket}"
        f" AND ({key_sql}) NOT IN (SELECT {key_sql} FROM {relation_sql(stage)} WHERE {bucket})"
    )


def buckets(key: Sequence[str], rows: int) -> list[str]:
    """Return predicates that cut rows by their key's hash into shares of about ``BUCKET_ROWS``, at most 32."""
    shares = min(-(-rows // BUCKET_ROWS), MAX_BUCKETS)
    if shares <= 1:
        return ["1"]
    return [f"cityHash64({names(key)}) % {shares} = {share}" for share in range(shares)]


def build_shadow(
    statements: Statements,
    mart: MartSpec,
    design: PhysicalDesign,
    stage: Relation,
    shadow: Relation,
    scope: Scope,
) -> ShadowReport:
    """Build the shadow anew under its name; a leftover under that name is dropped first.

    Raises:
        DponeError: DPONE_TARGET_REPLACED when the target is not the one of ``design``.
    """
    target = mart.target
    check_uuid(statements, design)
    touched = touched_partitions(statements, mart, target, stage, scope)
    present = present_partitions(statements, target)
    uuid = create_with_untouched(statements, target, shadow, present, touched, never=design.uuid)
    reach("shadow.after_attach")
    untouched = statements.rows(
        "SELECT uniqExact(partition_id), count() FROM system.parts"
        f" WHERE database = {literal(shadow.schema_name)} AND table = {literal(shadow.name)} AND active AND rows > 0"
    )[0]

    columns = [c.name for c in mart.columns]
    # Where the target has nothing, nothing stays: the staged parts are the partition, by hard link. Not where there
    # are constraints, since an attach does not check them.
    as_is = set() if design.detail["constraints"] else set(touched) - present
    for partition in sorted(as_is):
        statements.run(
            f"ALTER TABLE {relation_sql(shadow)} ATTACH PARTITION ID {literal(partition)} FROM {relation_sql(stage)}"
        )
    rebuilt = sorted(set(touched) - as_is)
    staged = statements.count(stage)
    for bucket in buckets(mart.key, staged) if rebuilt else ():
        # Rows that stay and rows that come in one insert, for fewer parts: every later day pays for each of them.
        statements.run(
            f"INSERT INTO {relation_sql(shadow)} ({names(columns)})"
            f" {expected_rows_sql(columns, mart.key, target, stage, rebuilt, bucket)} UNION ALL"
            f" SELECT {names(columns)} FROM {relation_sql(stage)}"
            f" WHERE _partition_id IN ({literals(rebuilt)}) AND {bucket}",
            **BOUNDED,
        )
    check_uuid(statements, design)
    return ShadowReport(
        uuid=uuid,
        touched_partitions=len(touched),
        untouched_partitions=untouched[0],
        untouched_parts=untouched[1],
    )


def present_partitions(statements: Statements, table: Relation) -> set[str]:
    """Return the ids of the partitions that have an active part."""
    return {
        str(row[0])
        for row in statements.rows(
            "SELECT DISTINCT partition_id FROM system.parts"
            f" WHERE database = {literal(table.schema_name)} AND table = {literal(table.name)} AND active"
        )
    }


def create_with_untouched(
    statements: Statements,
    target: Relation,
    shadow: Relation,
    present: Collection[str],
    touched: Collection[str],
    *,
    never: str | None = None,
) -> str:
    """Create the shadow with the target's own design and its untouched partitions, by hard link; return its UUID.

    Args:
        present: the target's partitions.
        never: see ``Statements.create_scratch``.
    """
    # Merges stop while the table is empty, and stay stopped for its UUID until the exchange is proven.
    create = f"CREATE TABLE {relation_sql(shadow)} AS {relation_sql(target)}"
    uuid = statements.create_scratch(shadow, create, never=never)
    if set(present) - set(touched):
        try:
            _attach(statements, target, shadow)
        except DponeError:
            # Attached, half attached or not at all: a second ATTACH would double what the first one did. Once no
            # statement of ours runs any more, start from an empty table; a second failure is the caller's.
            quiesce(statements, statements.prefix)
            statements.drop(shadow, uuid)
            uuid = statements.create_scratch(shadow, create, never=never)
            _attach(statements, target, shadow)
        # One ATTACH of everything and one DROP of the few touched costs far less than one ATTACH a partition.
        if gone := sorted(set(present) & set(touched)):
            drops = ", ".join(f"DROP PARTITION ID {literal(partition)}" for partition in gone)
            statements.run(f"ALTER TABLE {relation_sql(shadow)} {drops}")
    return uuid


def check_uuid(statements: Statements, design: PhysicalDesign) -> None:
    """Refuse to go on when the target's name belongs to another table than the one that was observed.

    Raises:
        DponeError: DPONE_TARGET_REPLACED.
    """
    observed = statements.find_uuid(design.relation)
    if observed != design.uuid:
        raise DponeError(
            "DPONE_TARGET_REPLACED",
            f"Target {design.relation.dotted} is no longer the table that was observed.",
            expected_uuid=design.uuid,
            observed_uuid=observed,
        )


def _attach(statements: Statements, target: Relation, shadow: Relation) -> None:
    statements.run(f"ALTER TABLE {relation_sql(shadow)} ATTACH PARTITION ALL FROM {relation_sql(target)}")
