"""Dagster IO managers: the sealed artifact and the published generation."""
