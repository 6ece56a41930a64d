"""Every boundary at which a process can be lost, listed once; a test can break any of them.

Production code calls ``reach(BOUNDARY)`` at each boundary. Nothing happens unless the process was started with
``DPONE_FAULT=<boundary>:<action>``; the variable is read once, at import, so nothing else can switch it on.

Actions: ``kill`` (SIGKILL to the own process), ``stop`` (SIGSTOP), ``fail`` (raise before the effect, or lose
the acknowledgement where the boundary lies after one), ``hang`` (sleep past every deadline).
"""

import os
import signal
import threading
import time

BOUNDARIES: dict[str, str] = {
    "admit.before": "locks held, admission not begun",
    "admit.after": "admission committed",
    "mutate.before": "dbt not invoked",
    "mutate.before_commit": "strategy done, COMMIT not sent",
    "mutate.after_commit": "COMMIT acknowledged, dbt tests not run",
    "mutate.after": "dbt returned",
    "seal.before_chunk": "a chunk is written but not visible",
    "seal.before_manifest": "all chunks visible, no manifest",
    "seal.after": "manifest visible",
    "stage.before": "no staging table",
    "stage.in_load": "staging half loaded",
    "stage.after": "staging loaded",
    "gate.after": "every gate evaluated",
    "shadow.before": "no shadow",
    "shadow.after_attach": "untouched partitions attached",
    "shadow.after": "shadow complete",
    "prove.after": "proofs hold, PREPARED not written",
    "prepared.after": "PREPARED written",
    "exchange.before": "COMMITTING written, EXCHANGE not sent",
    "exchange.after": "EXCHANGE acknowledged, TARGET_COMMITTED not written",
    "target_committed.after": "TARGET_COMMITTED written, predecessor not renamed",
    "publish.before": "predecessor renamed, publication not begun",
    "publish.after": "publication committed, nothing projected",
    "clean.after": "staging dropped",
    "load.admitted": "governed load: admitted, no hook has run",
    "load.pre_hooks": "governed load: pre-hooks done, nothing extracted",
    "load.staged": "governed load: staged and recorded",
    "load.gated": "governed load: gates evaluated",
    "load.prepared": "governed load: PREPARED written",
    "load.before_finalize": "governed load: armed, finalize not sent",
    "load.after_finalize": "governed load: finalize acknowledged, TARGET_COMMITTED not written",
    "load.committed": "governed load: TARGET_COMMITTED written",
    "load.cleaned": "governed load: staging dropped, checkpoint not moved",
    "load.before_checkpoint": "governed load: everything accepted, checkpoint not moved",
    "load.after_checkpoint": "governed load: checkpoint moved, post-hooks not run",
}

_ARMED_AT, _, _ACTION = os.environ.get("DPONE_FAULT", "").partition(":")
if _ARMED_AT and (_ARMED_AT not in BOUNDARIES or _ACTION not in {"kill", "stop", "fail", "hang"}):
    raise SystemExit("DPONE_FAULT does not name a boundary and an action of dpone_dagster/faults.py")


class InjectedFault(Exception):
    """Raised by the action ``fail``; only a process started for a test can see it."""


def reach(boundary: str) -> None:
    """Pass a boundary, or break there if this process was started to."""
    if boundary not in BOUNDARIES:
        raise KeyError(boundary)
    if boundary != _ARMED_AT:
        return
    if _ACTION == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif _ACTION == "stop":
        # To this very thread: sent to the process, another thread may take it while this one walks on.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif _ACTION == "hang":
        time.sleep(3600)
    else:
        raise InjectedFault(boundary)
