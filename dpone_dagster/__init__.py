"""The core of dpone_dagster: contracts, journal, planning, gates, publication and recovery.

Nothing in here imports Dagster, a database driver, SQLAlchemy or dbt; the two composition roots
(``definitions.py`` for Dagster, ``cli.py`` for the ``dpone`` command) are the only exceptions.
"""

__version__ = "0.1.0"
