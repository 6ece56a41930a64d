"""From a dbt manifest to proofs and plans; pure."""
