"""The artifact store of the embedded profile: immutable objects in a folder, made visible only when whole.

Layout under the root: objects at ``<key>``, files on their way in at ``.work/<random>/``. A key's segments
never start with a dot, so nothing on its way in is ever an object. Power loss: file and folder are fsynced
before an object is acknowledged; what the disk itself then loses is not covered.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dpone_dagster.errors import DponeError

_KEY = re.compile(r"(?=.{1,500}\Z)[a-z0-9][a-z0-9._-]{0,99}(/[a-z0-9][a-z0-9._-]{0,99})*")
_WORK = ".work"
# EFBIG is a file size limit of the process or the file system: to the operator the same lack of room.
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class LocalArtifactStore:
    """Create-only objects in a local folder; an object's version is its content digest.

    Args:
        root: the folder; made (owner-only) if absent.
        free_bytes: refuse to write while the disk has less room than this, so that a full artifact disk stops
            a publication before it starts rather than in the middle.
    """

    provider = "local"

    def __init__(self, root: Path, *, free_bytes: int) -> None:
        self._root = root.resolve()
        self._free_bytes = free_bytes
        with _disk_answers():
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._root / _WORK).mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """Yield a private folder for files on their way into the store; it is removed at the end.

        Folders of dead writers are removed first. A writer holds a file lock on its folder for as long as it
        lives, stopped or not, and the kernel drops it when it dies: no clock has to be trusted.

        Raises:
            DponeError: DPONE_ARTIFACT_NO_SPACE, also for a disk that fills up while the folder is in use.
        """
        with _disk_answers():
            self._sweep()
            self._require_room()
            folder, lock = self._claim()
        try:
            yield folder
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise _no_space() from None
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

    def put_new(self, key: str, source: Path) -> str:
        """Publish a file made in ``workspace()`` under ``key``, whole or not at all; the file is consumed.

        Returns:
            The object's version: ``sha256:..`` of its bytes.

        Raises:
            DponeError: DPONE_ARTIFACT_CONFLICT when a different object has the key (an identical one is a
                replay and returns its version); DPONE_ARTIFACT_NO_SPACE.
        """
        target = self._path(key)
        if not source.is_relative_to(self._root / _WORK):
            raise ValueError("an object is made in workspace(), where it can be linked into place")
        with _disk_answers():
            self._require_room()
            descriptor = os.open(source, os.O_RDONLY)
            try:
                os.fchmod(descriptor, 0o400)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            version = _digest(source)
            try:
                self._make_folder(target.parent)
                os.link(source, target)  # unlike rename, never replaces what is there
            except (FileExistsError, NotADirectoryError):
                if not target.is_file() or _digest(target) != version:
                    raise DponeError(
                        "DPONE_ARTIFACT_CONFLICT", f"Object {key} exists with different content.", key=key
                    ) from None
            _sync(target.parent)  # also for a replay: the first writer may have died before its own
            source.unlink()
        return version

    def open(self, key: str) -> BinaryIO:
        """Open an object for reading.

        Raises:
            DponeError: DPONE_ARTIFACT_MISSING.
        """
        path = self._path(key)
        with _disk_answers():
            try:
                return path.open("rb")
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                if not self._root.is_dir():
                    raise  # the disk is gone, which says nothing about the object
                raise DponeError("DPONE_ARTIFACT_MISSING", f"Object {key} is absent.", key=key) from None

    def list(self, prefix: str) -> list[str]:
        """Return the sorted keys of the objects under the folder ``prefix``."""
        folder = self._path(prefix)
        with _disk_answers():
            return sorted(p.relative_to(self._root).as_posix() for p in folder.rglob("*") if p.is_file())

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise DponeError(
                "DPONE_CONTRACT_INVALID",
                "An object key has a segment outside [a-z0-9][a-z0-9._-]*.",
                field="key",
            )
        return self._root / key

    def _require_room(self) -> None:
        if shutil.disk_usage(self._root).free < self._free_bytes:
            raise _no_space()

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync(folder.parent)

    def _claim(self) -> tuple[Path, int]:
        while True:
            folder = Path(tempfile.mkdtemp(dir=self._root / _WORK))
            try:
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue  # swept between its making and its lock
            if _locked(lock) and folder.is_dir():
                return folder, lock
            os.close(lock)

    def _sweep(self) -> None:
        for folder in (self._root / _WORK).iterdir():
            try:
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue  # its owner or another sweeper was faster
            try:
                if _locked(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _no_space() -> DponeError:
    return DponeError("DPONE_ARTIFACT_NO_SPACE", "The artifact store has not enough room.")


@contextmanager
def _disk_answers() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise _no_space() from None
        name = errno.errorcode.get(error.errno or 0, "unknown")
        raise DponeError(
            "DPONE_ENGINE_UNAVAILABLE", f"The artifact store's disk answered {name}.", errno=name
        ) from None
