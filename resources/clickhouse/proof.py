"""The three proofs of a shadow (design, step 9): what an exchange would change, and that it changes nothing else."""

# ruff: noqa: S608 - names match ``contracts.mart.Identifier`` and are quoted; values go through ``literal``.

from collections.abc import Sequence

from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.mart import Column, MartSpec, Relation, Scope
from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import PhysicalDesign, ProofReport
from resources.clickhouse.design import read_design
from resources.clickhouse.dialect import parse, relation_sql, scope_predicate, set_digest_sql
from resources.clickhouse.shadow import buckets, check_uuid, expected_rows_sql, touched_partitions
from resources.clickhouse.statements import BOUNDED, Statements, literal, literals, names

SCHEMA = "dpone.clickhouse-proof.v1"


def digest(statements: Statements, mart: MartSpec, table: Relation, where: str = "1") -> SetDigest:
    """Return the set digest of a table's rows."""
    return digest_of(statements, mart.columns, table, where)


def digest_of(statements: Statements, columns: Sequence[Column], table: Relation, where: str = "1") -> SetDigest:
    """Return the set digest of a table's rows over the given columns."""
    return parse(statements.rows(set_digest_sql(columns, relation_sql(table), where), **BOUNDED)[0])


def prove(
    statements: Statements,
    mart: MartSpec,
    design: PhysicalDesign,
    stage: Relation,
    shadow: Relation,
    scope: Scope,
    after: SetDigest,
) -> ProofReport:
    """Prove that the shadow is the target with the staged rows in place, and that its scope is the after image.

    Raises:
        DponeError: DPONE_TARGET_REPLACED, DPONE_TARGET_DESIGN_CHANGED, DPONE_PROOF_FAILED, DPONE_STAGE_MISMATCH,
            DPONE_TARGET_DIVERGED.
    """
    target = mart.target
    _prove_design(statements, design, shadow)
    touched = touched_partitions(statements, mart, target, stage, scope)
    staged_as_is = _staged_as_is(statements, target, stage, shadow, touched)
    multiset_rows = _prove_touched(
        statements, mart, target, stage, shadow, [each for each in touched if each not in staged_as_is]
    )
    by_parts, by_digest = prove_untouched(statements, mart.columns, target, shadow, touched)
    found = _prove_scope(statements, mart, stage, shadow, scope, after)
    total = statements.count(shadow)
    # What was proven is true of this target only.
    check_uuid(statements, design)
    return ProofReport(
        touched_multiset_rows=multiset_rows,
        touched_partitions_by_parts=len(staged_as_is),
        untouched_partitions_by_parts=by_parts,
        untouched_partitions_by_digest=by_digest,
        scope=found,
        total_rows=total,
        sha256=sha256_of(
            {
                "schema": SCHEMA,
                "target_uuid": design.uuid,
                "physical_design_sha256": design.sha256,
                "scope": [scope.start_text, scope.end_text],
                "touched_partitions": len(touched),
                "touched_multiset_rows": multiset_rows,
                "touched_partitions_by_parts": len(staged_as_is),
                "untouched_partitions_by_parts": by_parts,
                "untouched_partitions_by_digest": by_digest,
                "scope_sha256": found.sha256,
                "total_rows": total,
            }
        ),
    )


def _prove_design(statements: Statements, design: PhysicalDesign, shadow: Relation) -> None:
    check_uuid(statements, design)
    for relation in (design.relation, shadow):
        observed = read_design(statements, relation)
        if observed is None or observed.sha256 != design.sha256:
            raise DponeError(
                "DPONE_TARGET_DESIGN_CHANGED",
                f"Table {relation.dotted} does not have the physical design that was observed.",
                expected_sha256=design.sha256,
                observed_sha256=observed.sha256 if observed else None,
            )


def _staged_as_is(
    statements: Statements, target: Relation, stage: Relation, shadow: Relation, touched: Sequence[str]
) -> set[str]:
    """(a) Touched partitions that the target does not have and whose parts in the shadow are staging's, hash by hash.

    Such a partition holds exactly the staged rows. Any other is compared row by row.
    """
    parts = "arraySort(groupArrayIf((hash_of_all_files, rows), table = {}))"
    found = statements.rows(
        f"SELECT partition_id FROM system.parts WHERE database = {literal(target.schema_name)}"
        f" AND table IN ({literals([target.name, stage.name, shadow.name])}) AND active AND rows > 0"
        f" AND partition_id IN ({literals(touched)}) GROUP BY partition_id"
        f" HAVING countIf(table = {literal(target.name)}) = 0"
        f" AND {parts.format(literal(stage.name))} = {parts.format(literal(shadow.name))}"
    )
    return {str(row[0]) for row in found}


def _prove_touched(
    statements: Statements,
    mart: MartSpec,
    target: Relation,
    stage: Relation,
    shadow: Relation,
    touched: Sequence[str],
) -> int:
    """(a) Both multisets, over every business column, share by share of the key's hash; returns rows compared."""
    if not touched:
        return 0
    names_ = [c.name for c in mart.columns]
    columns = names(names_)
    inside = f"_partition_id IN ({literals(touched)})"
    prove_all_visible(statements, target, touched)
    largest = max(statements.count(table, inside) for table in (target, shadow))
    compared = 0
    for bucket in buckets(mart.key, 2 * largest):  # both sides meet in one group-by
        # Groups treat NULL as a value of its own. Equal rows on both sides add up to zero, one by one.
        both = (
            f"SELECT {columns}, 1 AS __dpone_sign"
            f" FROM ({expected_rows_sql(names_, mart.key, target, stage, touched, bucket)})"
            f" UNION ALL SELECT {columns}, 1 AS __dpone_sign FROM {relation_sql(stage)} WHERE {inside} AND {bucket}"
            f" UNION ALL SELECT {columns}, -1 AS __dpone_sign FROM {relation_sql(shadow)} WHERE {inside} AND {bucket}"
        )
        differing, rows = statements.rows(
            "SELECT countIf(__dpone_sum != 0), sum(__dpone_rows) FROM (SELECT sum(__dpone_sign) AS __dpone_sum,"
            f" countIf(__dpone_sign < 0) AS __dpone_rows FROM ({both}) GROUP BY {columns})",
            **BOUNDED,
        )[0]
        if differing:
            raise DponeError(
                "DPONE_PROOF_FAILED",
                f"{differing} distinct rows of the rebuilt partitions of {target.dotted} differ.",
                distinct_rows=differing,
            )
        compared += rows
    return compared


def prove_all_visible(statements: Statements, target: Relation, touched: Sequence[str]) -> None:
    """Refuse an account that does not see every row of the partitions.

    A row policy or filter would hide rows from the rebuild and from its proof alike. What the parts hold can be counted
    without reading rows, except where a lightweight delete masks some.

    Raises:
        DponeError: DPONE_PROOF_FAILED.
    """
    inside = f"partition_id IN ({literals(touched)})"
    held, masked = statements.rows(
        "SELECT sum(rows), countIf(has_lightweight_delete) FROM system.parts"
        f" WHERE database = {literal(target.schema_name)} AND table = {literal(target.name)} AND active AND {inside}"
    )[0]
    visible = statements.count(target, f"_{inside}")
    if visible > held or (visible != held and not masked):
        raise DponeError(
            "DPONE_PROOF_FAILED",
            f"The account sees {visible} rows of the touched partitions of {target.dotted}, its parts hold {held}.",
            next_step="Exempt the publication's account from row policies, then materialize the partition again.",
        )


def prove_untouched(
    statements: Statements, columns: Sequence[Column], target: Relation, shadow: Relation, touched: Sequence[str]
) -> tuple[int, int]:
    """(b) Part hashes partition by partition, else the exact digest; returns how many were proven each way.

    Raises:
        DponeError: DPONE_PROOF_FAILED.
    """
    parts = "arraySort(groupArrayIf((hash_of_all_files, rows), {}))"
    ours, other = (
        f"(database = {literal(table.schema_name)} AND table = {literal(table.name)})" for table in (target, shadow)
    )
    # One statement, so that both tables are seen at the same moment. Emptied parts hold nothing.
    found = statements.rows(
        f"SELECT partition_id, {parts.format(ours)} = {parts.format(other)}"
        f" FROM system.parts WHERE ({ours} OR {other}) AND active AND rows > 0"
        f" AND partition_id NOT IN ({literals(touched)}) GROUP BY partition_id"
    )
    differing = sorted(str(partition) for partition, same in found if not same)
    if differing:
        # A merge moved parts or the engine was started anew. A row's partition follows from the row, so one digest
        # over all these partitions proves each of them, and that neither side has a partition of its own.
        where = f"_partition_id IN ({literals(differing)})"
        if digest_of(statements, columns, target, where) != digest_of(statements, columns, shadow, where):
            raise DponeError(
                "DPONE_PROOF_FAILED",
                f"Rows of the untouched partitions of {target.dotted} differ.",
                partitions=len(differing),
            )
    return len(found) - len(differing), len(differing)


def _prove_scope(
    statements: Statements, mart: MartSpec, stage: Relation, shadow: Relation, scope: Scope, after: SetDigest
) -> SetDigest:
    """(c) The shadow's scope is the after image, so the target held no rows of it that were not published."""
    inside = scope_predicate(mart.event_time, scope)
    if outside := statements.count(stage, f"NOT {inside}"):
        raise DponeError("DPONE_STAGE_MISMATCH", f"{outside} staged rows of {mart.name} are outside {scope.key}.")
    found = digest(statements, mart, shadow, inside)
    if found == after:
        return found
    if digest(statements, mart, stage) != after:
        raise DponeError("DPONE_STAGE_MISMATCH", f"The staged rows of {mart.name} are not the after image's.")
    raise DponeError(
        "DPONE_TARGET_DIVERGED",
        f"Target {mart.target.dotted} would hold {found.rows} rows of {scope.key}, the after image has {after.rows}.",
        expected_sha256=after.sha256,
        observed_sha256=found.sha256,
    )
