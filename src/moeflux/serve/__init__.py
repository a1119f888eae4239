"""HTTP over the worker: dialects of clients in, the worker's events out. Nothing here computes."""
