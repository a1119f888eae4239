"""The reference backend: plain numpy, float32, one obvious statement per step."""
