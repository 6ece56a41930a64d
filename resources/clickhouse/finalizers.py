"""How each strategy's next state is built beside the target, proven, and put in its place.

``rename``: there is no target yet, so the shadow becomes it. ``exchange``: the shadow is the whole next table. Its
untouched partitions are the target's own parts, hard-linked; only touched ones are written. ``partition_replace``: the
shadow holds the touched partitions only, which replace the target's one by one.
"""

# ruff: noqa: S608 - names are quoted; values go through ``literal``.

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.mart import Column, Relation, Scope
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import FinalizerTraits, PhysicalDesign, Visibility
from resources.clickhouse.ddl import Ddl
from resources.clickhouse.dialect import quote, relation_sql, scope_predicate
from resources.clickhouse.proof import digest_of, prove_all_visible, prove_untouched
from resources.clickhouse.shadow import buckets, create_with_untouched, expected_rows_sql, present_partitions
from resources.clickhouse.statements import BOUNDED, Statements, literal, literals, names

_ATOMIC = FinalizerTraits(visibility=Visibility.ATOMIC, retry_safe=True)
_TRAITS = {
    "full_refresh": _ATOMIC,
    "append": _ATOMIC,
    "merge": _ATOMIC,
    "replace": _ATOMIC,
    "partition_replace": FinalizerTraits(visibility=Visibility.PER_PARTITION, retry_safe=True),
}
LEGACY = FinalizerTraits(visibility=Visibility.PARTIAL, retry_safe=False)


def describe(strategy: str, *, legacy: bool = False) -> FinalizerTraits:
    """Say what a reader sees while a strategy changes the target, and whether that may be sent again.

    Args:
        legacy: whether the rows are written straight into the target.
    """
    return LEGACY if legacy else _TRAITS[strategy]


# ------------------------------------------------------------------------------------- what the target is now


@dataclass(frozen=True, kw_only=True)
class TargetState:
    """What tells whether anybody wrote to a table: merges change none of it.

    Attributes:
        rows: visible rows.
        blocks: partition id -> its newest block number; every insert, attach and replacement takes a new one.
        mutation: the newest mutation's number.
    """

    rows: int
    blocks: Mapping[str, int]
    mutation: int

    def sha256(self, *, without: Collection[str] = ()) -> str:
        """Return the digest of the state, less some partitions; the rows count only where none is left out."""
        return sha256_of(
            {
                "rows": None if without else self.rows,
                "blocks": {key: block for key, block in self.blocks.items() if key not in without},
                "mutation": self.mutation,
            }
        )


def target_state(statements: Statements, table: Relation) -> TargetState:
    """Read a table's state from its metadata."""
    mine = f"database = {literal(table.schema_name)} AND table = {literal(table.name)}"
    blocks = statements.rows(
        "SELECT partition_id, toInt64(max(max_block_number)) FROM system.parts"
        f" WHERE {mine} AND active AND rows > 0 GROUP BY partition_id"
    )
    mutation = statements.value(
        f"SELECT max(toUInt64OrZero(extract(mutation_id, '[0-9]+'))) FROM system.mutations WHERE {mine}"
    )
    return TargetState(
        rows=statements.count(table), blocks={str(key): int(block) for key, block in blocks}, mutation=int(mutation)
    )


def partitions_of(statements: Statements, table: Relation, where: str = "1") -> set[str]:
    """Return the partition ids of the rows that fulfil a condition."""
    found = statements.rows(f"SELECT DISTINCT _partition_id FROM {relation_sql(table)} WHERE {where}")
    return {str(row[0]) for row in found}


def in_scope(column: str, scope: Scope) -> str:
    """Return the condition for a row of the day; a row without a time is in none."""
    return f"ifNull({scope_predicate(column, scope)}, 0)"


# --------------------------------------------------------------------------------------------------- the keys


def check_keys(statements: Statements, table: Relation, key: Sequence[Column], *, where: str = "1") -> None:
    """Refuse NULL in a key column.

    Raises:
        DponeError: DPONE_KEY_NULL, with the number of rows.
    """
    for column in key:
        if column.nullable and (rows := statements.count(table, f"({where}) AND isNull({quote(column.name)})")):
            raise DponeError(
                "DPONE_KEY_NULL",
                f"Key column {column.name} is NULL in {rows} rows of {table.dotted}.",
                field=column.name,
                rows=rows,
            )


def check_unique(statements: Statements, table: Relation, key: Sequence[str], rows: int) -> None:
    """Refuse two rows of one key.

    Raises:
        DponeError: DPONE_KEY_NOT_UNIQUE, with the number of surplus rows.
    """
    surplus = sum(
        int(
            statements.value(
                # No alias: a key column may have its name.
                "SELECT sum(`count()`) - count() FROM (SELECT count() FROM"
                f" {relation_sql(table)} WHERE {bucket} GROUP BY {names(key)})",
                **BOUNDED,
            )
        )
        for bucket in buckets(key, rows)
    )
    if surplus:
        raise DponeError(
            "DPONE_KEY_NOT_UNIQUE", f"{surplus} staged rows repeat the unique_key of another.", surplus_rows=surplus
        )


def key_holders(statements: Statements, target: Relation, ready: Relation, key: Sequence[str], rows: int) -> set[str]:
    """Return the target's partitions that hold a staged key.

    Where the partition follows from the key's columns, equal keys have equal partitions and nothing is read.
    """
    by = statements.rows(
        f"SELECT name FROM system.columns WHERE database = {literal(target.schema_name)}"
        f" AND table = {literal(target.name)} AND is_in_partition_key"
    )
    if {str(row[0]) for row in by} <= set(key):
        return set()
    return set().union(
        *(partitions_of(statements, target, _has_key(ready, key, bucket)) for bucket in buckets(key, rows))
    )


def _has_key(ready: Relation, key: Sequence[str], bucket: str) -> str:
    return f"{bucket} AND ({names(key)}) IN (SELECT {names(key)} FROM {relation_sql(ready)} WHERE {bucket})"


# ------------------------------------------------------------------------------------------------- the shadow


@dataclass(frozen=True, kw_only=True)
class Rebuild:
    """What of the target goes and what stays.

    Attributes:
        touched: partition ids that are written anew; None for none: the staged rows are added.
        gone: condition for the target's rows that go, inside the touched partitions; None for those of staged keys.
        key: the unique key's columns, where ``gone`` is None.
    """

    touched: frozenset[str]
    gone: str | None = "1"
    key: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Built:
    """A shadow and what was counted of it."""

    uuid: str
    kept_rows: int
    rows: int
    by_parts: int
    by_digest: int


def build(
    statements: Statements,
    ddl: Ddl,
    *,
    design: PhysicalDesign,
    columns: Sequence[Column],
    ready: Relation,
    shadow: Relation,
    staged_rows: int,
    rebuild: Rebuild,
    target_rows: int,
) -> Built:
    """Build and prove a table that holds the target's rows that stay and the staged ones.

    Args:
        design: the target's; the shadow gets the same.
        ready: the staged rows, in a table of the target's structure and partitions.

    Raises:
        DponeError: DPONE_PROOF_FAILED.
    """
    target, column_names = design.relation, [c.name for c in columns]
    present = present_partitions(statements, target)
    uuid = create_with_untouched(statements, target, shadow, present, rebuild.touched)
    staged = partitions_of(statements, ready)
    rebuilt = sorted(rebuild.touched & present) if rebuild.gone != "1" else []
    # What nothing stays beside is taken as it is. Not where there are constraints: an attach does not check them.
    as_is = set() if design.detail["constraints"] else staged - set(rebuilt)
    written = sorted({*rebuilt, *staged} - as_is)
    if as_is and as_is == staged:
        statements.run(ddl.attach(shadow, ready))
    else:
        for partition in sorted(as_is):
            statements.run(ddl.attach(shadow, ready, partition))
    for bucket in buckets(rebuild.key, staged_rows) if written and rebuild.key else ["1"] if written else []:
        inside = f"_partition_id IN ({literals(written)})"
        staying = f" UNION ALL {_staying(rebuild, column_names, target, ready, rebuilt, bucket)}" if rebuilt else ""
        statements.run(
            f"INSERT INTO {relation_sql(shadow)} ({names(column_names)}) SELECT {names(column_names)}"
            f" FROM {relation_sql(ready)} WHERE {inside} AND {bucket}{staying}",
            **BOUNDED,
        )
    kept = target_rows - _gone_rows(statements, rebuild, target, ready, staged_rows)
    # Only partitions that get nothing from staging are the target's own parts.
    own = rebuild.touched | staged
    by_parts, by_digest = prove_untouched(statements, columns, target, shadow, sorted(own))
    prove_all_visible(statements, target, sorted(present))
    found = statements.count(shadow)
    if found != kept + staged_rows:
        raise DponeError(
            "DPONE_PROOF_FAILED",
            f"The shadow of {target.dotted} has {found} rows; {kept} stay and {staged_rows} are staged.",
            expected_rows=kept + staged_rows,
            observed_rows=found,
        )
    return Built(uuid=uuid, kept_rows=kept, rows=found, by_parts=by_parts, by_digest=by_digest)


def _staying(
    rebuild: Rebuild, columns: Sequence[str], target: Relation, ready: Relation, rebuilt: Sequence[str], bucket: str
) -> str:
    if rebuild.gone is None:
        return expected_rows_sql(columns, rebuild.key, target, ready, rebuilt, bucket)
    return (
        f"SELECT {names(columns)} FROM {relation_sql(target)}"
        f" WHERE _partition_id IN ({literals(rebuilt)}) AND NOT {rebuild.gone}"
    )


def _gone_rows(statements: Statements, rebuild: Rebuild, target: Relation, ready: Relation, staged_rows: int) -> int:
    """Count the rows that go by what makes them go, not by what makes the others stay."""
    if not rebuild.touched:
        return 0
    inside = f"_partition_id IN ({literals(sorted(rebuild.touched))})"
    if rebuild.gone is not None:
        return statements.count(target, f"{inside} AND {rebuild.gone}")
    return sum(
        statements.count(target, f"{inside} AND {_has_key(ready, rebuild.key, bucket)}")
        for bucket in buckets(rebuild.key, staged_rows)
    )


# ------------------------------------------------------------------------------------------ partition by partition


def differing_partitions(
    statements: Statements, columns: Sequence[Column], target: Relation, shadow: Relation, partitions: Sequence[str]
) -> set[str]:
    """Return the partitions in which two tables do not hold the same rows: by their parts, else by the exact digest."""
    parts = "arraySort(groupArrayIf((hash_of_all_files, rows), {}))"
    ours, other = (
        f"(database = {literal(table.schema_name)} AND table = {literal(table.name)})" for table in (target, shadow)
    )
    found = statements.rows(
        f"SELECT partition_id FROM system.parts WHERE ({ours} OR {other}) AND active AND rows > 0"
        f" AND partition_id IN ({literals(partitions)}) GROUP BY partition_id"
        f" HAVING {parts.format(ours)} != {parts.format(other)}"
    )
    return {str(row[0]) for row in found if not _same_rows(statements, columns, target, shadow, str(row[0]))}


def _same_rows(
    statements: Statements, columns: Sequence[Column], target: Relation, shadow: Relation, partition: str
) -> bool:
    where = f"_partition_id = {literal(partition)}"
    if statements.count(target, where) != statements.count(shadow, where):
        return False
    return digest_of(statements, columns, target, where) == digest_of(statements, columns, shadow, where)
