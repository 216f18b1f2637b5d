"""The command line: `main` and one file a verb."""
