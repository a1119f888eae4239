"""Floor 1: where bytes are and how they are coded. Opens checkpoints in place; knows no model and does no inference."""
