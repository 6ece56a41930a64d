"""Rules evaluated before the target changes."""
