"""Where the ``dpone`` command begins: an interrupt during its imports, which take half a second, ends it quietly."""

import sys


def main() -> None:
    """Run the command."""
    try:
        from dpone_dagster.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()
