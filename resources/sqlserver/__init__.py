"""SQL Server: its dialect."""
