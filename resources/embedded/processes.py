"""Starting processes that outlive their starter, and ending exactly the process that a record names."""

import os
import subprocess
import time

import psutil

_children: list[subprocess.Popen[bytes]] = []


def keep(child: subprocess.Popen[bytes]) -> None:
    """Remember a started process, so that it is reaped when it dies before its starter."""
    _children.append(child)


def private(path: str, flags: int) -> int:
    """An ``opener`` whose new files are for the owner only."""
    return os.open(path, flags, 0o600)


def is_running(process: psutil.Process) -> bool:
    """Whether the process lives; a zombie, which nobody may reap in a container, does not."""
    for child in _children:
        child.poll()
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end(process: psutil.Process, signal_number: int, timeout_seconds: float) -> bool:
    """Send one signal and return whether the process was gone within the time."""
    deadline = time.monotonic() + timeout_seconds
    try:
        process.send_signal(signal_number)
    except psutil.NoSuchProcess:
        return True
    while is_running(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
