"""`python -m eagle3_jax VERB`, the same as `eagle3 VERB`."""

import sys

from eagle3_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
