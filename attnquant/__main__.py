"""`python -m attnquant` is the command line."""

import sys

from attnquant.cli import main

sys.exit(main())
