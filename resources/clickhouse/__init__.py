"""ClickHouse, spoken to over HTTP: its dialect, and everything that is done in and to a target."""
