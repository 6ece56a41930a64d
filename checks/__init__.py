"""Gates as partitioned asset checks."""
