"""Floor 1: model families as data. config.json becomes a `ModelSpec`, tensor names become roles. No math on weights."""
