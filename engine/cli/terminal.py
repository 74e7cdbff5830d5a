"""Draw on a terminal: progress as a bar with share, rate and time left, and tables as wide as it is.

The only importer of rich.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final, Literal, Self, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from engine.cli.output import above_bar
from engine.text import TableLine
from index.display import human_bytes, human_duration

# Over how long a rate is taken.
RATE_PERIOD_S: Final = 10.0
# Until then there is no useful rate.
RATE_AGE_S_MIN: Final = 0.5


class TerminalBar:
    """Shows files, bytes, rate and time left in one line, from the first moment on; at the end it is gone."""

    def __init__(self, stream: TextIO, what: str) -> None:
        """Begin to count; `what` begins the line."""
        self._what, self._files, self._files_total = what, 0, 0
        self._console = _Screen(file=stream)
        # What the other columns take of it, at their widest.
        bar = BarColumn(bar_width=max(6, min(40, self._console.width - 68)))
        columns = (TextColumn("{task.description}", markup=False), bar, TaskProgressColumn(), _Bytes(), _Left())
        self._bar = Bar(
            *columns,
            console=self._console,
            transient=True,
            speed_estimate_period=RATE_PERIOD_S,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> Self:
        # The work goes on also where nobody reads this any more; so below.
        with contextlib.suppress(OSError, ValueError):
            self._bar.start()
        above_bar.append(lambda line: self._console.print(Text.from_ansi(line), soft_wrap=True))
        return self

    def __exit__(self, *_: object) -> None:
        above_bar.pop()
        with contextlib.suppress(OSError, ValueError):
            self._bar.stop()

    def total(self, *, files: int, bytes_: int) -> None:
        self._files_total = files
        self._bar.update(self._task, total=bytes_ or None, description=self._description)

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        self._files += files
        self._bar.update(self._task, advance=bytes_, description=self._description)

    @property
    def _description(self) -> str:
        of = f"/{self._files_total:,}" if self._files_total else ""
        return f"{self._what} {self._files:,}{of} files"


# A column that is not wider is not broken, but for the last one.
_UNBROKEN_MAX: Final = 20
# A column is not broken into less than this; where that is too much, the terminal breaks the lines.
_BROKEN_MIN: Final = 8
_NOTHING: Final = frozenset({"", "-"})


def fit_table(lines: Sequence[TableLine], width: int) -> Iterator[str]:
    """Lay a table out again, in lines of at most `width` as far as it goes.

    Columns with nothing in them are left out, and what is too wide for its column goes on below, within it.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    if max(map(cell_len, lines)) <= width:
        yield from lines
        return
    columns = list(zip(*(line.cells for line in lines), strict=True))
    shown = [n for n, (_, *cells) in enumerate(columns) if not _NOTHING.issuperset(cells)]
    widths = {n: max(map(cell_len, columns[n])) for n in shown}
    whole = {n for n in shown[:-1] if widths[n] <= _UNBROKEN_MAX}
    if sum(widths[n] + 1 if n in whole else _BROKEN_MIN for n in shown) > width:
        yield from lines
        return
    for n in shown:
        side: Literal["left", "right"] = "right" if lines[0].right[n] else "left"
        made.add_column(Text(columns[n][0]), justify=side, overflow="fold", no_wrap=n in whole)
    for line in lines[1:]:
        made.add_row(*(Text(line.cells[n]) for n in shown))
    for parts in Console(width=width, color_system=None).render_lines(made, pad=False):
        yield "".join(part.text for part in parts).rstrip()


class _Screen(Console):
    @override
    def on_broken_pipe(self) -> None:
        # The library's own would end the process.
        self.quiet = True


class _Bytes(ProgressColumn):
    @override
    def render(self, task: Task) -> Text:
        of = f"/{human_bytes(int(task.total))}" if task.total else ""
        return Text(f"{human_bytes(int(task.completed))}{of}", no_wrap=True)


class _Left(ProgressColumn):
    @override
    def render(self, task: Task) -> Text:
        # What moved within the last seconds; before there are any, the plain average.
        elapsed_s, rate = task.elapsed or 0.0, task.speed
        if elapsed_s <= RATE_PERIOD_S:
            rate = task.completed / elapsed_s if elapsed_s > RATE_AGE_S_MIN else 0
        if not rate:
            return Text("")
        to_do = task.remaining or 0
        left = f" {human_duration(1000 * int(to_do / rate))} left" if to_do > 0 else ""
        return Text(f"{human_bytes(int(rate))}/s{left}", no_wrap=True)
