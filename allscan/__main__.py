"""``python -m allscan doctor``."""

import sys

from .tools.doctor import main

if __name__ == "__main__":
    sys.exit(main())
