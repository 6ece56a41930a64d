"""What authors declare: a mart in dbt's meta, a load in a YAML manifest; read, and refused with file and line."""
