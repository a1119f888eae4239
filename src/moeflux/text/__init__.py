"""Floor 1: between text and token ids."""
