"""The command `tidemark`, also as `python -m tidemark`: what a file beside it may hide is found by `tidemark` first."""

import sys


def main() -> int:
    """Run the command line of this process; return its exit code."""
    try:
        # Here, as every process that it begins imports this module.
        from engine.cli.app import main as run  # noqa: PLC0415
    except KeyboardInterrupt:
        return 130  # as `engine.cli.run.ExitCode` has it, once that is loaded
    return run()


if __name__ == "__main__":
    sys.exit(main())
