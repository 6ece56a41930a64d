"""What the journal's tests share: identities, documents, plans, and processes that hold what they are told to."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any, ClassVar

import psycopg

from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.mart import Scope
from dpone_dagster.contracts.model import Document
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import Lease, OperationRecord, PlanBundle, PlannedOperation, Predecessors, RunIdentity
from resources.journal.store import SqlJournal

ROOT = Path(__file__).resolve().parents[2]
DAY = Scope.day("2024-03-01")
NEXT = Scope.day("2024-03-02")
TARGET = "analytics.sales"
RESOURCES = ("workflow:daily", "mart:sales", f"target:{TARGET}")
BASE_UUID = "00000000-0000-0000-0000-000000000001"
NEW_UUID = "00000000-0000-0000-0000-000000000002"
ALL_TABLES = (
    "resource_guard",
    "operation",
    "transition",
    "document",
    "scope_head",
    "generation_head",
    "generation",
    "checkpoint",
    "baseline",
)


class Note(Document):
    """A small document."""

    SCHEMA: ClassVar[str] = "test.note.v1"
    DIGEST: ClassVar[str] = "note_sha256"

    text: str
    note_sha256: str


def digest(*parts: object) -> str:
    """A digest that stands for a name."""
    return sha256_of([str(part) for part in parts])


def identity(name: str = "run") -> RunIdentity:
    """A new worker of a run."""
    return RunIdentity(
        logical_run_id=name,
        run_id=name,
        try_number=1,
        task_id="publish",
        worker_id=str(uuid.uuid4()),
        owner="dpone-cli",
    )


def bundle(
    predecessors: dict[str, Predecessors],
    *,
    scope: Scope = DAY,
    salt: str = "",
    targets: dict[str, str] | None = None,
    facts: dict[str, Any] | None = None,
) -> PlanBundle:
    """A plan for every mart asked for; salt makes another identity."""
    operations = []
    for mart, found in predecessors.items():
        revision = found.scope_head.revision + 1 if found.scope_head else 1
        operation_id = digest("operation", mart, scope.key, revision, salt)
        operations.append(
            PlannedOperation(
                mart=mart,
                target=(targets or {}).get(mart, TARGET),
                operation_id=operation_id,
                operation_plan_sha256=digest("plan", operation_id),
                revision=revision,
                replacement_ordinal=0,
                mode="normal",
                facts=facts or {},
            )
        )
    return PlanBundle(
        workflow="daily",
        scope=scope,
        workflow_plan_sha256=digest("workflow", scope.key, salt),
        workflow_execution_id=digest("execution", scope.key, salt),
        documents=(Note.seal(text=f"plan {scope.key}"),),
        operations=tuple(operations),
    )


def bind(plan: PlanBundle, operation_id: str, epoch: int) -> Note:
    """An attempt binding."""
    return Note.seal(text=f"binding {operation_id} {epoch}")


def admit(journal: SqlJournal, lease: Any, *, scope: Scope = DAY, salt: str = "") -> OperationRecord:
    """Admit one operation of the mart ``sales``."""
    [operation] = journal.admit(
        lease,
        workflow="daily",
        marts=["sales"],
        targets=[TARGET],
        scope=scope,
        build=lambda found: bundle(found, scope=scope, salt=salt),
        bind=bind,
    )
    return operation


def hold(
    journal: SqlJournal, who: RunIdentity, *, scope: Scope = DAY, deadline: float = 20, on_wait: Any = None
) -> Any:
    """Hold the resources of the mart ``sales``."""
    return journal.hold(
        RESOURCES, identity=who, scope=scope, deadline_seconds=deadline, on_wait=on_wait or (lambda sentence: None)
    )


def everything(connection: psycopg.Connection[Any]) -> dict[str, list[Any]]:
    """Every row that a transition may write."""
    return {
        table: sorted(connection.execute(f"select * from dpone_control.{table}").fetchall(), key=str)
        for table in ALL_TABLES
    }


def adopt(journal: SqlJournal, lease: Lease, *, mart: str = "sales", target: str = TARGET) -> Note:
    receipt = Note.seal(text=f"baseline of {mart}")
    journal.adopt_baseline(lease, mart=mart, target=target, target_uuid=BASE_UUID, receipt=receipt)
    return receipt


def committed(journal: SqlJournal, lease: Lease, **options: Any) -> OperationRecord:
    """An operation whose EXCHANGE is proven."""
    operation = admit(journal, lease, **options)
    head = journal.generation(TARGET)
    assert head is not None
    operation = journal.record(operation, {"predecessor_uuid": head.uuid})
    for state in (State.PREPARED, State.COMMITTING, State.TARGET_COMMITTED):
        operation = journal.transition(operation, state)
    return operation


def publish(journal: SqlJournal, operation: OperationRecord, *, uuid: str = NEW_UUID, rows: int = 5) -> OperationRecord:
    return journal.publish(
        operation,
        target_uuid=uuid,
        rows=rows,
        after_image_sha256=digest("after", rows),
        artifact_manifest_sha256=digest("manifest", rows),
        facts={"target_outcome": "EXCHANGED"},
        documents=[Note.seal(text=f"terminal {operation.operation_id}")],
    )


class Worker:
    """A real process that runs a script of this folder and talks in lines on stdin and stdout."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        )

    def hear(self) -> str:
        """Next line of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> None:
        """Give it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Make sure it is gone."""
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def rows(connection: psycopg.Connection[Any], table: str) -> int:
    """Count a control table without the journal's own readers."""
    found = connection.execute(f"select count(*) from dpone_control.{table}").fetchone()
    assert found is not None
    return int(found[0])


def wait_until(condition: Any, *, seconds: float = 15) -> None:
    """Poll until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


class LossyProxy:
    """A Unix-socket proxy before PostgreSQL that loses what it is armed to lose.

    ``lose = "request"`` drops the connection instead of passing the next COMMIT on, ``"answer"`` drops it after the
    engine has committed, ``"answer and engine"`` also refuses whoever comes next.
    """

    def __init__(self, folder: str, upstream: str) -> None:
        self.lose = ""
        self.refusing = False
        self._upstream = upstream
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/.s.PGSQL.5432")
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing:
                client.close()
                continue
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._upstream)
            threading.Thread(target=self._answers, args=[server, client], daemon=True).start()
            threading.Thread(target=self._requests, args=[client, server], daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self.lose and b"Q\0\0\0\x0bCOMMIT\0" in data:
                    losing, self.lose = self.lose, ""
                    self.refusing = losing == "answer and engine"
                    # The client hears nothing any more; the engine finishes what it was sent.
                    client.shutdown(socket.SHUT_RDWR)
                    if losing != "request":
                        server.sendall(data)
                        time.sleep(0.3)
                    break
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # a close alone waits for the other thread's recv

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
        client.close()
        server.close()
