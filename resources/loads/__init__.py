"""Governed loads: sources, sinks, probes and audit behind the ports of ``dpone_dagster.governance``."""
