"""Floor 4: conversations with an engine."""
