"""A mart from its admission to COMPLETE, in order: mutate, observe, seal, stage, gate, shadow, prove, commit.

It is a route of the lifecycle that governed loads walk as well (``publication.lifecycle``). Nothing in ClickHouse that
a reader can see changes before ``commit.commit``; every mart of the workflow is PREPARED before the first goes on. A
failure before that is closed (``publication.closing``); one after it is only ever finished forward, by this run or by
the next (``recovery.reconcile``). What comes before the admission is ``dpone_dagster.run``'s.
"""

from collections.abc import Iterator
from dataclasses import asdict

import pyarrow as pa

from dpone_dagster.contracts.documents import OperationPlan
from dpone_dagster.contracts.set_digest import EMPTY
from dpone_dagster.errors import DponeError
from dpone_dagster.faults import reach
from dpone_dagster.governance.gates import Side, evaluate
from dpone_dagster.journal.facts import DigestFact, Facts
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import OperationRecord
from dpone_dagster.ports import BuildReceipt, BuildResult, MutationOutcome
from dpone_dagster.publication.attempt import (
    Attempt,
    MartResult,
    shadow_of,
    stage_of,
)
from dpone_dagster.publication.cleaning import clean
from dpone_dagster.publication.closing import fail_before_commit
from dpone_dagster.publication.commit import commit
from dpone_dagster.publication.preflight import check_pair, prove_empty
from dpone_dagster.publication.seal import SealAuthority, open_artifact, seal


class SemanticRefresh:
    """The semantic refresh as a route of the governed lifecycle: all marts of a workflow go through each step together.

    There are no hooks and no acceptance here; the source state moves with each mart's publication, inside ``finalize``.
    """

    staged = True

    def __init__(self, attempt: Attempt, operations: list[OperationRecord]) -> None:
        self._attempt = attempt
        self._operations = operations
        self._built: list[tuple[OperationRecord, BuildReceipt]] = []
        self._results: dict[str, MartResult] = {}

    def pre_hooks(self) -> None:
        """Nothing."""

    def extract(self) -> None:
        """Mutate and observe."""
        self._built = _mutate(self._attempt, self._operations)

    def stage(self) -> None:
        """Seal, then load staging from the sealed artifact."""
        self._operations = [_seal_and_stage(self._attempt, operation, receipt) for operation, receipt in self._built]

    def project(self) -> None:
        """Nothing."""

    def gate(self) -> None:
        """Evaluate the gates of every mart."""
        self._operations = _gate(self._attempt, self._operations)

    def accept_before(self) -> None:
        """Nothing."""

    def prepare(self) -> None:
        """Build and prove every shadow; then the barrier: every mart is PREPARED before the first goes on."""
        attempt = self._attempt
        operations = [_shadow_and_prove(attempt, operation) for operation in self._operations]
        attempt.boundary()
        for operation in operations:
            _refuse_late_strangers(attempt, operation)
        self._operations = [attempt.ports.journal.transition(o, State.PREPARED) for o in operations]

    def finalize(self) -> None:
        """EXCHANGE and publish, mart by mart."""
        self._results = commit(self._attempt, self._operations)

    def accept_after(self) -> None:
        """Nothing."""

    def clean(self) -> None:
        """Drop staging and images, and generations that are no longer kept."""
        for result in self._results.values():
            clean(self._attempt, result.operation)

    def persist(self) -> None:
        """Nothing: heads and checkpoint moved with each publication."""

    def post_hooks(self) -> None:
        """Nothing."""

    def complete(self) -> dict[str, MartResult]:
        """Return the results, in plan order."""
        return self._results

    def failed_before_finalize(self, error: BaseException) -> BaseException:
        """Close the operations, if their outcome can be proven now."""
        return fail_before_commit(self._attempt, [o.operation_id for o in self._operations], error)

    def failed_after_finalize(self, error: BaseException) -> BaseException:
        """Tell it as it is: every mart is COMPLETE, and the next run cleans up."""
        return error


# ---------------------------------------------------------------------------------- mutate and observe


def _mutate(attempt: Attempt, operations: list[OperationRecord]) -> list[tuple[OperationRecord, BuildReceipt]]:
    journal, builder = attempt.ports.journal, attempt.ports.builder
    restore_from: dict[str, OperationRecord] = {}
    for operation in operations:
        failed_id = Facts.of(operation).restore_from
        if failed_id:
            failed = journal.operation(failed_id)
            assert failed is not None
            restore_from[operation.mart] = failed
    attempt.boundary()
    operations = [journal.record(o, {"mutation_invoked": True}) for o in operations]
    reach("mutate.before")
    with attempt.phase(operations[0], "mutate"):
        built = builder.build(attempt.workflow.marts, operations, attempt.scope, restore_from=restore_from)
    attempt.tests = built.tests
    reach("mutate.after")
    attempt.lease.check()  # whoever was overtaken finds its successor's traces, and must not judge them
    observed = [_observe(attempt, operation, built) for operation in operations]
    failing = [t for t in built.tests if t.status in ("fail", "error")]
    if failing:
        raise DponeError("DPONE_DBT_TEST_FAILED", f"{len(failing)} dbt tests failed, the first is {failing[0].name}.")
    # dbt skips the tests of a model whose COMMIT it has not seen acknowledged; the receipt proves the commit alone.
    if untested := [t for t in built.tests if t.status not in ("pass", "warn")]:
        raise DponeError(
            "DPONE_DBT_TEST_NOT_RUN", f"{len(untested)} dbt tests did not run, the first is {untested[0].name}."
        )
    return observed


def _observe(attempt: Attempt, operation: OperationRecord, built: BuildResult) -> tuple[OperationRecord, BuildReceipt]:
    """Read receipt and images back; what dbt said only names the reason when the receipt says no."""
    with attempt.phase(operation, "observe") as count:
        outcome, receipt = attempt.ports.source.outcome(operation)
        if outcome is MutationOutcome.COMMIT_UNKNOWN:
            raise DponeError("DPONE_COMMIT_UNKNOWN", f"The SQL mutation of {operation.mart} cannot be classified.")
        if receipt is None:
            model = attempt.mart(operation).model_unique_id
            raise DponeError(
                built.error_codes.get(model, "DPONE_MUTATION_FAILED"),
                f"{built.error_sentences.get(model, f'The SQL mutation of {operation.mart} failed.')}"
                f" It ended as {outcome}.",
            )
        count.rows = receipt.after.rows
        operation = attempt.ports.journal.record(
            operation,
            {
                "outcome": str(outcome),
                "dbt_tests": [asdict(test) for test in built.tests],
                "build_receipt_sha256": receipt.sha256,
                "source_rows": receipt.source_rows,
                "updated_rows": receipt.updated_rows,
                "inserted_rows": receipt.inserted_rows,
                "before": DigestFact.of(receipt.before).as_json(),
                "after": DigestFact.of(receipt.after).as_json(),
            },
        )
    return operation, receipt


# ------------------------------------------------------------------------------------- seal, stage, gate


def _seal_and_stage(attempt: Attempt, operation: OperationRecord, receipt: BuildReceipt) -> OperationRecord:
    ports, mart = attempt.ports, attempt.mart(operation)
    attempt.boundary()
    with attempt.phase(operation, "seal") as count:
        sealed = seal(
            mart=mart,
            operation=operation,
            receipt=receipt,
            reader=ports.source.read_image(mart, receipt.after_image),
            store=ports.artifacts,
            authority=_authority(attempt, operation),
            chunk_rows=ports.policy.chunk_rows,
            check=attempt.cancel.check,
        )
        count.rows, count.bytes = sealed.manifest.total_rows, sealed.manifest.total_bytes
    operation = ports.journal.record(
        operation,
        {
            "seal_authorization_sha256": sealed.authorization.sha256,
            "artifact_manifest_sha256": sealed.manifest.sha256,
            "artifact_prefix": sealed.manifest.artifact_prefix,
            "artifact_bytes": sealed.manifest.total_bytes,
            "artifact_chunks": sealed.manifest.chunk_count,
        },
        documents=[sealed.authorization, sealed.manifest],
    )
    reach("seal.after")
    reach("stage.before")
    attempt.boundary()
    stage, analytics = stage_of(mart, operation), attempt.analytics(operation)

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in open_artifact(ports.artifacts, sealed.manifest, mart):
            attempt.cancel.check()
            yield batch

    with attempt.phase(operation, "stage") as count:
        stage_uuid = analytics.create_stage(mart, stage.name)
        operation = ports.journal.record(operation, {"stage_uuid": stage_uuid})
        count.rows = analytics.load(stage, batches(), ports.progress.rows)
        reach("stage.after")
    return operation


def _authority(attempt: Attempt, operation: OperationRecord) -> SealAuthority:
    """What the journal says about the right to seal this operation's image."""
    journal = attempt.ports.journal
    body, baseline = journal.document(operation.operation_plan_sha256), journal.baseline(operation.mart)
    binding = Facts.of(operation).execution_binding_sha256
    if body is None or baseline is None or binding is None:
        raise DponeError("DPONE_JOURNAL_CORRUPT", f"The journal lacks a document of {operation.mart}'s operation.")
    plan = OperationPlan.parse(body)
    return SealAuthority(
        workflow_execution_binding_sha256=binding,
        baseline_adoption_receipt_sha256=baseline,
        effective_key_mapping_sha256=plan.effective_key_mapping_sha256,
        effective_key_template_sha256=plan.effective_key_template_sha256,
        issuer_authority=f"journal/{attempt.workflow.environment}",
    )


def _gate(attempt: Attempt, operations: list[OperationRecord]) -> list[OperationRecord]:
    """Evaluate every gate of every mart, then refuse if one of them blocks."""
    gated = []
    for operation in operations:
        attempt.boundary()
        mart, facts, analytics = attempt.mart(operation), Facts.of(operation), attempt.analytics(operation)
        assert facts.after is not None
        with attempt.phase(operation, "gate"):
            staged = analytics.digest(mart, stage_of(mart, operation))
            source = facts.after.digest
            report = evaluate(
                operation_id=operation.operation_id,
                gates=mart.gates,
                source=Side(rows=source.rows, digest=source),
                staged=Side(rows=staged.rows, digest=staged),
            )
            attempt.gates[mart.name] = report
            gated.append(
                attempt.ports.journal.record(
                    operation,
                    {"gate_report_sha256": report.sha256, "gates_passed": report.passed},
                    documents=[report],
                )
            )
    reach("gate.after")
    blocked = [(m, r.gate_id) for m, g in attempt.gates.items() for r in g.results if r.blocks]
    if blocked:
        names = ", ".join(f"{mart}.{gate}" for mart, gate in blocked)
        raise DponeError("DPONE_QUALITY_GATES_FAILED", f"Blocking gates failed: {names}.")
    return gated


# -------------------------------------------------------------------------------------- shadow and prove


def _shadow_and_prove(attempt: Attempt, operation: OperationRecord) -> OperationRecord:
    mart, analytics = attempt.mart(operation), attempt.analytics(operation)
    journal, facts = attempt.ports.journal, Facts.of(operation)
    assert facts.after is not None
    attempt.boundary()
    design = check_pair(attempt, mart)
    known = {"predecessor_uuid": design.uuid, "physical_design_sha256": design.sha256}
    if facts.after.digest == EMPTY:
        with attempt.phase(operation, "prove"):
            prove_empty(attempt, operation)
        return journal.record(operation, {**known, "target_outcome": "NOT_REQUIRED_EMPTY_SCOPE"})
    reach("shadow.before")
    with attempt.phase(operation, "shadow"):
        shadow, stage = shadow_of(mart, operation), stage_of(mart, operation)
        operation = journal.record(operation, {"target_rows_before": analytics.count(mart.target, mart)})
        report = analytics.build_shadow(mart, design, stage, shadow, attempt.scope)
    operation = journal.record(
        operation,
        {
            **known,
            "shadow_uuid": report.uuid,
            "touched_partitions": report.touched_partitions,
            "untouched_partitions": report.untouched_partitions,
            "untouched_parts": report.untouched_parts,
        },
    )
    reach("shadow.after")
    attempt.boundary()
    with attempt.phase(operation, "prove") as count:
        proof = analytics.prove(mart, design, stage, shadow, attempt.scope, facts.after.digest)
        count.rows = proof.touched_multiset_rows
    reach("prove.after")
    return journal.record(
        operation,
        {"proof_sha256": proof.sha256, "total_rows": proof.total_rows, "target_outcome": "EXCHANGED"},
    )


def _refuse_late_strangers(attempt: Attempt, operation: OperationRecord) -> None:
    """Count the target once more: rows that somebody added after the shadow was built would be left behind."""
    mart, before = attempt.mart(operation), Facts.of(operation).target_rows_before
    if before is not None and attempt.analytics(operation).count(mart.target, mart) != before:
        raise DponeError(
            "DPONE_TARGET_DIVERGED", f"Somebody wrote to {mart.target.dotted} while its successor was being built."
        )
