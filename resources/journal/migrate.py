"""Bring the journal's schema up to date: idempotent, and safe when several processes start at once."""

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from resources.journal.dialect import dialect_for, engine_errors, wait_for_lock
from resources.journal.tables import CONTROL_SCHEMA, IMAGE_SCHEMA

_LOCK = "journal:migrate"


def migrate(engine: sa.Engine, *, deadline_seconds: float = 60) -> None:
    """Create or upgrade the control and image schemas.

    Raises:
        DponeError: DPONE_ENGINE_UNAVAILABLE; DPONE_JOURNAL_BUSY when another migration outlasts the deadline.
    """
    dialect = dialect_for(engine.url)
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine_errors(dialect, "migrate"), engine.connect() as lock_connection:
        locks = lock_connection.execution_options(isolation_level="AUTOCOMMIT")
        wait_for_lock(dialect, locks, _LOCK, deadline_seconds)
        try:
            # On a second connection: the lock is a session's, and a failed migration must not touch it.
            with engine.begin() as connection:
                present = set(sa.inspect(connection).get_schema_names())
                for schema in (CONTROL_SCHEMA, IMAGE_SCHEMA):
                    if schema not in present:
                        connection.execute(sa.schema.CreateSchema(schema))
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
        finally:
            dialect.unlock(locks, _LOCK)
