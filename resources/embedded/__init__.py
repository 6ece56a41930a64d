"""The embedded profile: PostgreSQL from a wheel and the ClickHouse engine, one of each per ``DPONE_HOME``."""
