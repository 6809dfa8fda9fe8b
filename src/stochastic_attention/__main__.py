"""`python -m stochastic_attention` is `sattn`."""

import sys

from .cli import main

sys.exit(main())
