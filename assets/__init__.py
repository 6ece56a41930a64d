"""The marts: declarations, the asset factory and the dbt project."""
