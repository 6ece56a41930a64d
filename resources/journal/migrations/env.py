"""Alembic's environment: runs on the connection that ``migrate`` hands over, in its transaction."""

from alembic import context

from resources.journal.tables import CONTROL_SCHEMA

context.configure(
    connection=context.config.attributes["connection"],
    version_table="schema_version",
    version_table_schema=CONTROL_SCHEMA,
)
with context.begin_transaction():
    context.run_migrations()
