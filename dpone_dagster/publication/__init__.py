"""What is done in order: one path from a dbt build to an exchanged table, written against ports."""
