"""A worker process for the journal's tests: ``journal_worker.py URL ACTION DAY RUN_ID``.

Prints one line for each step, and waits for a line before the next.
"""

import os
import signal
import sys

import journal_support as support
import sqlalchemy as sa

from dpone_dagster.contracts.mart import Scope
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import RunIdentity
from resources.journal.store import SqlJournal


def say(*words: object) -> None:
    """Print one line at once."""
    sys.stdout.write(" ".join(str(word) for word in words) + "\n")
    sys.stdout.flush()


def publish_and_die(journal: SqlJournal, who: RunIdentity) -> None:
    """Get to a publication, and be killed when everything is written and COMMIT is about to be sent."""
    with support.hold(journal, who) as lease:
        support.adopt(journal, lease)
        operation = support.committed(journal, lease)
        say("publishing")
        sys.stdin.readline()
        sa.event.listen(sa.Engine, "commit", lambda connection: os.kill(os.getpid(), signal.SIGKILL))
        support.publish(journal, operation)


def main(url: str, action: str, day: str, run_id: str) -> None:
    """Hold, admit and then do what the lines on stdin say."""
    journal = SqlJournal(url)
    scope = Scope.day(day)
    who = support.identity(run_id)
    say("ready")
    if action == "race":
        sys.stdin.readline()
    if action == "publish":
        publish_and_die(journal, who)
    try:
        with support.hold(journal, who, scope=scope) as lease:
            operation = support.admit(journal, lease, scope=scope, salt=run_id)
            say(f"admitted {who.worker_id} {operation.operation_id}")
            for line in sys.stdin:
                word = line.strip()
                try:
                    if word == "end":
                        break
                    if word == "check":
                        lease.check()
                    else:
                        operation = journal.transition(operation, State(word))
                except DponeError as error:
                    say(error.code)
                else:
                    say("done")
    except DponeError as error:
        say(error.code, *(error.details.get(name) for name in ("run_id", "pid", "host")))


main(*sys.argv[1:])
