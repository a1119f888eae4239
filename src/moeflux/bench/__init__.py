"""Floor 5: measuring, and making what is measured."""
