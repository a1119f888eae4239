"""Floor 3: joins checkpoint, backend and state into something that runs tokens."""
