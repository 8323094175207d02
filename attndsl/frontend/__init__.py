"""Text to checked IR. Never imports torch."""
