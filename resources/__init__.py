"""Adapters round vendor SDKs: engines, drivers, stores, dbt."""
