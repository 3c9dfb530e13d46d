"""`python -m otel_torch …`: the command where its script is not on the PATH."""

import sys

from otel_torch.cli.main import main

sys.exit(main())
