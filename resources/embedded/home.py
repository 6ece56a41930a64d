"""``DPONE_HOME``: the one folder that holds everything the embedded profile keeps."""

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dpone_dagster.errors import DponeError

# sun_path holds 108 bytes on Linux and 104 on macOS, the closing NUL included.
SOCKET_PATH_LIMIT = 103


@dataclass(frozen=True, kw_only=True)
class Home:
    """The layout of a ``DPONE_HOME``.

    Attributes:
        root: absolute path, symbolic links resolved.
    """

    root: Path

    @property
    def pg(self) -> Path:
        """PostgreSQL's data folder, owned by the account PostgreSQL runs as."""
        return self.root / "pg"

    @property
    def clickhouse(self) -> Path:
        """The ClickHouse engine's data folder."""
        return self.root / "clickhouse"

    @property
    def artifacts(self) -> Path:
        """The local artifact store."""
        return self.root / "artifacts"

    @property
    def run(self) -> Path:
        """Locks, process records and the token; only the owner may look inside."""
        return self.root / "run"

    @property
    def dagster(self) -> Path:
        """``DAGSTER_HOME`` of the embedded profile."""
        return self.root / "dagster"

    @property
    def pg_socket_folder(self) -> Path:
        """Where PostgreSQL listens: its data folder, or a short private folder when that path is too long."""
        if len(os.fsencode(self.pg / ".s.PGSQL.5432")) <= SOCKET_PATH_LIMIT:
            return self.pg
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"dpone-{digest}"

    def create(self) -> None:
        """Create the folders that are missing, after refusing a place where the engines must not run.

        Raises:
            DponeError: DPONE_HOME_REFUSED.
        """
        self.check()
        missing = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            # As root, PostgreSQL runs as another account that has to pass through here, whatever the umask.
            folder.chmod(0o711)
        for folder in (self.clickhouse, self.artifacts, self.run, self.dagster):
            if not folder.is_dir():
                folder.mkdir(mode=0o700, exist_ok=True)

    def check(self) -> None:
        """Refuse a path that an engine misreads; as root, also one that other accounts cannot pass through.

        PostgreSQL never runs as root, so its own account has to reach the data folder. The wheel's own
        starter would widen the permissions of every parent folder for that; this one refuses instead.

        Raises:
            DponeError: DPONE_HOME_REFUSED.
        """
        if "?" in str(self.root):  # the ClickHouse engine takes what follows for options
            raise DponeError("DPONE_HOME_REFUSED", "The path of DPONE_HOME has a question mark in it.")
        if os.geteuid() != 0:
            return
        for parent in self.root.parents:
            if parent.exists() and not parent.stat().st_mode & stat.S_IXOTH:
                raise DponeError(
                    "DPONE_HOME_REFUSED",
                    "DPONE_HOME lies under a folder that only its owner may enter, and this process runs as root: "
                    "PostgreSQL's own account could not reach it, and a private folder is never opened for it.",
                )

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the exclusive file lock ``run/<name>.lock``; the kernel drops it when the process dies."""
        handle = os.open(self.run / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def resolve(environ: Mapping[str, str] = os.environ) -> Home:
    """Return the home that ``DPONE_HOME`` names, by default ``.dpone`` in the current folder.

    Where root works in a private folder, which PostgreSQL's own account could not enter, the default is a folder
    under the system's temporary one instead, named after the current folder.
    """
    if named := environ.get("DPONE_HOME"):
        return Home(root=Path(named).expanduser().resolve())
    home = Home(root=Path(".dpone").resolve())
    try:
        home.check()
    except DponeError:
        name = hashlib.sha256(os.fsencode(home.root)).hexdigest()[:12]
        return Home(root=Path(tempfile.gettempdir()).resolve() / f"dpone-{name}")
    return home


if __name__ == "__main__":
    print(resolve().root)  # noqa: T201 - for the Makefile
