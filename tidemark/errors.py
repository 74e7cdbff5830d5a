"""The base of every error of Tidemark. It imports nothing, so that every package may import it."""


class TidemarkError(Exception):
    """Base of everything that Tidemark refuses or could not do; `except TidemarkError` catches all of it.

    Attributes:
        operation: What was being done, such as "restore"; empty where a value itself is refused.
        subject: The key, path, scope or name concerned; may be empty.
        hint: What an operator can do about it; never empty.
    """

    default_hint = "see the cause below"

    def __init__(self, message: str, *, operation: str = "", subject: str = "", hint: str = "") -> None:
        self.operation = operation
        self.subject = subject
        self.hint = hint or self.default_hint
        about = " ".join(filter(None, (operation, subject)))
        super().__init__(f"{about}: {message}" if about else message)

    def __reduce__(self) -> tuple[object, ...]:  # type: ignore[explicit-override]  # nothing is imported here
        """Let pickle make it again as it is: `__init__` takes other arguments than it has."""
        return _again, (type(self), self.args), vars(self)


def _again(kind: type[TidemarkError], args: tuple[object, ...]) -> TidemarkError:
    return kind.__new__(kind, *args)


class ShadowedError(TidemarkError, ImportError):
    """A module of somebody else's, imported first, has the name of a package of Tidemark."""

    default_hint = "rename that file: a process has one module of a name"
