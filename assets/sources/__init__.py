"""Public data that the demonstration marts read, loaded into the embedded SQL engine."""
