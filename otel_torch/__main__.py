"""Runs the command as `python -m otel_torch …`, for when its script is not on the PATH."""

import sys

from otel_torch.cli.main import main

sys.exit(main())
