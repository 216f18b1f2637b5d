"""`python -m lineattn` is `lineattn`."""

import sys

from lineattn.cli.main import main

# Processes that a command starts import this file again, under another name.
if __name__ == "__main__":
    sys.exit(main())
