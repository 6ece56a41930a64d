"""The journal's one implementation: tables, migrations, dialects, and the store behind ``JournalPort``."""
