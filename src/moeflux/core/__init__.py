"""Floor 0: words every room shares: errors, options, byte units, tensor naming. Imports nothing above it."""
