"""Back up, commit, restore and collect: the use cases. Begin with `Repository`; programs import it of `tidemark`.

The packages, from the bottom up, are in design/architecture.md; each imports only those above it there, and
import-linter keeps that. The file named like its package is where to begin: `engine/backup/backup.py`. A module that
one other module imports, and that hides nothing, belongs into that other one. Results are frozen structs: their fields
are for programs, their `repr` and, in a notebook, their table are for people.
"""

import logging

from typing_extensions import override

# First of all, as tasks on Spark begin here: it finds our own `index` where a file of that name lies beside a script.
import tidemark.errors  # noqa: F401


class _Quiet(logging.NullHandler):
    """Lets nothing be seen where nobody has configured logging, but for errors, which Python shows.

    An error is logged only where nobody is there to raise it to, such as in the thread of a listener.
    """

    @override
    def handle(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR and not self._is_shown(record) and logging.lastResort is not None:
            logging.lastResort.handle(record)
        return True

    def _is_shown(self, record: logging.LogRecord) -> bool:
        """Return whether a record also comes to a handler that somebody has configured."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


logging.getLogger(__name__).addHandler(_Quiet())
