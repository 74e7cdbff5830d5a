"""Progress of several use cases at once is reported as that of one."""

from engine.runtime import SummedProgress


class Heard:
    """What a listener was shown last."""

    def __init__(self) -> None:
        self.totals = self.done = (0, 0)

    def total(self, *, files: int, bytes_: int) -> None:
        self.totals = files, bytes_

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        self.done = self.done[0] + files, self.done[1] + bytes_


def test_totals_and_what_is_done_add_up() -> None:
    heard = Heard()
    sums = SummedProgress(heard)
    first, second = sums.part(), sums.part()
    first.total(files=2, bytes_=200)
    second.total(files=3, bytes_=30)
    assert heard.totals == (5, 230)
    # A plan that changed takes the place of the one before.
    first.total(files=1, bytes_=100)
    assert heard.totals == (4, 130)
    first.add(files=1, bytes_=100)
    second.add(bytes_=30)
    second.add(files=3)
    assert heard.done == heard.totals
