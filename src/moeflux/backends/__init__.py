"""Floor 2: the math. `ops` composes every block from primitives and is the oracle; each backend supplies the primitives."""
