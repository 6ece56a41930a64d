"""PostgreSQL, standing in for SQL Server: its dialect, its marts, and its side of governed loads."""
