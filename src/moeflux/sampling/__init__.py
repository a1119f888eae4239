"""Floor 1: which token comes next, given logits. Knows nothing of models, text or sequences."""
