"""The command line: one small file per command. Data goes to stdout, everything else to stderr."""
