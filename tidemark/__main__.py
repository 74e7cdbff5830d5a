"""`python -m tidemark`: the command line where no console script is installed."""

import sys

if __name__ == "__main__":
    # Here, as every process that it begins imports this module.
    from engine.cli.app import main

    sys.exit(main())
