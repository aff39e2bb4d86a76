"""`python -m jax_trainer` is the same as `jax-trainer`."""

import sys

from jax_trainer.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
