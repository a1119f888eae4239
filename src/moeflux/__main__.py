"""`python -m moeflux` is the `moeflux` command."""

from moeflux.cli.main import main

main()
