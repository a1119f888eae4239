"""The CUDA backend: torch for memory, streams and graphs, Triton for arithmetic. Imported only when it is asked for."""
