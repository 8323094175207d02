"""attndsl."""
