"""Fixtures of the adapters' tests."""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from resources.embedded.postgres import PostgresEndpoint
from resources.journal.migrate import migrate
from resources.journal.store import SqlJournal


@pytest.fixture
def journal(fresh_db: PostgresEndpoint) -> Iterator[SqlJournal]:
    """A journal in a database of this test's own, migrated."""
    engine = sa.create_engine(fresh_db.sqlalchemy_url)
    migrate(engine)
    engine.dispose()
    journal = SqlJournal(fresh_db.sqlalchemy_url)
    yield journal
    journal.close()
