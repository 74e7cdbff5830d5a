"""Pieces of a page that stands alone: no script, no image, no font, no address; it asks nobody for anything.

Whatever a name in it says, it is text: `tell` escapes, and the policy in the head lets nothing else in. Light or dark
is the reader's choice; what is wider than the screen scrolls inside its own frame.
"""

from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import Final

from index.text import printable, shortened

TEXT_LENGTH_MAX: Final = 400
# A text of a table that is not longer stands in one line.
SHORT_LENGTH_MAX: Final = 24
# A table with more rows is folded: a plot tells the same, and the next section is not a mile away.
ROWS_SHOWN_MAX: Final = 12

# Made with `str.format`, so that braces stand there twice.
_HEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ --text: #1f262b; --soft: #53616b; --line: #dfe5ea; --back: #fff; --raised: #f5f8fa; --accent: #1b6ca8;
  --bad: #b3261e; --good: #1b7a55; }}
@media (prefers-color-scheme: dark) {{ :root {{ --text: #e6eaed; --soft: #a6b2bb; --line: #37424b; --back: #12171b;
  --raised: #1b2329; --accent: #72b5e8; --bad: #ff8f84; --good: #6fcfa4; }} }}
* {{ box-sizing: border-box; }}
body {{ font: 15px/1.5 sans-serif; color: var(--text); background: var(--back); max-width: 62rem; margin: 0 auto;
  padding: 1.5rem 1rem 4rem; }}
h1 {{ margin: 0 0 .3rem; }}
h1, h2, h3, h4 {{ line-height: 1.25; overflow-wrap: anywhere; }}
h2 {{ border-top: 2px solid var(--accent); padding-top: .6rem; margin-top: 2.5rem; }}
h3 {{ margin: 1.6rem 0 .3rem; }}
h4 {{ margin: 1.2rem 0 .3rem; }}
p {{ margin: .3rem 0 .6rem; overflow-wrap: anywhere; }}
a {{ color: var(--accent); }}
code {{ font: 13px/1.4 monospace; overflow-wrap: anywhere; }}
.wide {{ overflow-x: auto; margin: .4rem 0 1rem; }}
table {{ border-collapse: collapse; font-size: 14px; }}
th, td {{ text-align: left; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }}
th {{ color: var(--soft); font-weight: 600; white-space: nowrap; }}
td {{ max-width: 34rem; min-width: 3rem; overflow-wrap: break-word; }}
td.short {{ white-space: nowrap; }}
td.number, th.number {{ text-align: right; white-space: nowrap; }}
svg {{ display: block; font: 12px sans-serif; }}
svg .ink {{ fill: var(--text); }}
svg .soft {{ fill: var(--soft); }}
svg .axis {{ stroke: var(--text); }}
svg .grid {{ stroke: var(--line); }}
svg .alarm {{ fill: var(--bad); }}
svg .hollow {{ fill: var(--back); }}
.bad {{ color: var(--bad); }}
.good {{ color: var(--good); }}
.note {{ color: var(--soft); font-size: 14px; }}
.key {{ display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; padding: 0; list-style: none; }}
.tiles li {{ background: var(--raised); border-radius: .5rem; padding: .6rem 1rem; min-width: 9rem; flex: 1; }}
.tiles b {{ display: block; font-size: 1.3rem; font-weight: 600; white-space: nowrap; }}
summary {{ cursor: pointer; color: var(--accent); }}
nav a {{ margin-right: 1rem; white-space: nowrap; display: inline-block; }}
</style></head><body>
<h1>{title}</h1>
"""


def make_page(title: str, body: Iterable[str]) -> str:
    """The page as HTML.

    Args:
        title: A text of ours or anybody's.
        body: HTML, of the functions here and in `engine.report.svg`.
    """
    return _HEAD.format(title=tell(title)) + "\n".join(body) + "\n</body></html>\n"


def tell(text: str) -> str:
    """A text of anybody's, as what it is: a text."""
    return escape(shortened(printable(text), TEXT_LENGTH_MAX))


def paragraph(text: str, style: str = "") -> str:
    """A paragraph of text; `style` is one of the page's: note, bad, good."""
    return f"<p{f' class={style}' if style else ''}>{tell(text)}</p>"


def items(texts: Iterable[str], style: str = "note") -> str:
    """A list of texts."""
    return f"<ul class={style}>{''.join(f'<li>{tell(text)}</li>' for text in texts)}</ul>"


def key(colour: str, name: str) -> str:
    """What a colour of a plot means."""
    return f'<span class=key style="background:{colour}"></span>{escape(name)}'


def framed(html: str, label: str) -> str:
    """What may be wider than the screen, in a frame that scrolls, also by the keyboard."""
    return f'<div class=wide tabindex=0 role=group aria-label="{tell(label)}">{html}</div>'


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    label: str,
    numbers: Collection[str] = frozenset(),
    folds: bool = True,
) -> str:
    """A table of texts.

    Args:
        headers: Of the columns.
        rows: As many texts each.
        label: What it is a table of, for who cannot see it.
        numbers: Headers of the columns that are aligned to the right.
        folds: Whether it is folded if it is long.
    """
    told = list(rows)
    head = "".join(f"<th scope=col{_style(is_number=header in numbers)}>{tell(header)}</th>" for header in headers)
    are_numbers = [header in numbers for header in headers]
    body = "".join(
        f"<tr>{''.join(_cell(cell, is_number=n) for n, cell in zip(are_numbers, row, strict=True))}</tr>"
        for row in told
    )
    framed_table = framed(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", label)
    if not folds or len(told) <= ROWS_SHOWN_MAX:
        return framed_table
    return f"<details><summary>{tell(label)}: {len(told):,} rows</summary>{framed_table}</details>"


def _cell(told: str, *, is_number: bool) -> str:
    return f"<td{_style(is_number=is_number, is_short=len(told) <= SHORT_LENGTH_MAX)}>{tell(told)}</td>"


def _style(*, is_number: bool, is_short: bool = False) -> str:
    if is_number:
        return " class=number"
    return " class=short" if is_short else ""
