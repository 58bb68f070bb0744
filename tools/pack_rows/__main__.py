"""Makes `python -m tools.pack_rows` the same as the console script."""

import sys

from tools.pack_rows.cli import main

if __name__ == "__main__":
    sys.exit(main())
