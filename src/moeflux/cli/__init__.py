"""Floor 6: the command line. Answers and data go to stdout, everything else to stderr; nothing is computed here."""
