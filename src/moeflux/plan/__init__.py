"""Floor 3: what a model takes on a machine and what speed that allows, before anything loads. Names no backend."""
