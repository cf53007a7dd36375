"""The output of a process as complete lines and as rows that it is still drawing. Pure: bytes in, lines out.

A progress bar writes a carriage return and the bar anew, again and again, and a newline only at its end; bars in several
rows also move the cursor up. So a stream is read as a small screen: rows that can still change are kept apart from lines
that are done. The memory is bounded, whatever a process writes.
"""

from __future__ import annotations

import codecs
import re

#: A row of more characters is taken for lines of this length.
LONGEST = 1 << 16
#: Rows that may still change; of more the first is done.
MOST_ROWS = 16
#: Returns within one visit of a row after which the rows above it are done (clearing a bar takes two).
SETTLED = 3

_MOVES = re.compile(r"[\r\b]|\x1b\[\d*[ABK]")
_TOKEN = re.compile(r"(\n|\x08|\x1b\[[0-9;?]*[A-Za-z])")
_PARTIAL = re.compile(r"\x1b(\[[0-9;?]{0,16})?\Z")


class Screen:
    """One stream of one process."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._escape = ""  #: the beginning of a control sequence whose end has not come
        self._rows = [""]
        self._redrawn = [False]  #: was written again after a carriage return
        self._at = 0
        self._column = 0
        self._returned = False
        self._visits = 0
        self._done: list[str] = []
        self._seen: tuple[str, ...] = ()

    def news(self) -> tuple[str, ...] | None:
        """The rows being drawn, if they have changed since the last call; else None."""
        rows = self.rows
        if rows == self._seen:
            return None
        self._seen = rows
        return rows

    @property
    def rows(self) -> tuple[str, ...]:
        """The rows being drawn; empty when all lines are complete."""
        return tuple(row.rstrip() for row in self._rows if row.strip())

    @property
    def drawing(self) -> bool:
        """Whether rows are redrawn, rather than a line without its newline yet."""
        return any(self._redrawn)

    def feed(self, data: bytes, last: bool = False) -> list[str]:
        """Take output; the lines that are complete now. `last`: the output has ended, so all lines are complete."""
        text = self._escape + self._decoder.decode(data, last)
        self._escape = ""
        cut = None if last else _PARTIAL.search(text)
        if cut:
            text, self._escape = text[: cut.start()], cut.group()
        plain = len(self._rows) == 1 and self._column == len(self._rows[0]) and not (self._redrawn[0] or self._returned)
        if plain and not _MOVES.search(text):
            self._take_lines(text)
        else:
            self._take_drawing(text)
        if last:
            self._settle(len(self._rows))
        done, self._done = self._done, []
        return done

    def _take_lines(self, text: str) -> None:
        first, *others = text.split("\n")
        whole = [self._rows[0] + first, *others]
        for line in whole[:-1]:
            self._finish(line)
        rest = whole[-1]
        self._done += [rest[at : at + LONGEST] for at in range(0, len(rest) - LONGEST, LONGEST)]
        self._rows[0] = rest[max(0, -(-len(rest) // LONGEST) - 1) * LONGEST :]
        self._column = len(self._rows[0])

    def _take_drawing(self, text: str) -> None:
        for piece in _TOKEN.split(text.replace("\r\n", "\n")):
            if piece == "\n":
                self._down(True)
            elif piece == "\b":
                self._column = max(0, self._column - 1)
            elif piece.startswith("\x1b["):
                self._control(piece)
            elif piece:
                self._overwrite(piece.split("\r"))

    def _overwrite(self, drawn: list[str]) -> None:
        """Texts with a carriage return between each two. One that hides all before it is enough: bars come in thousands."""
        whole = max(1, len(drawn) - 1)  # the last may be cut off where reading ended
        if whole > SETTLED + 1 and len(drawn[whole - 1]) >= max(len(self._rows[self._at]), *map(len, drawn[:whole])):
            drawn = ["", *drawn[whole - SETTLED - 1 :]]
        for place, text in enumerate(drawn):
            if place:
                self._return()
            if text:
                self._write(text)

    def _return(self) -> None:
        self._column, self._returned = 0, True
        self._visits += 1
        if self._visits >= SETTLED:
            self._settle(self._at)
        if not self._rows[self._at].strip():
            self._rows[self._at], self._redrawn[self._at] = "", False  # wiped: what follows may be a line

    def _write(self, text: str) -> None:
        row = self._rows[self._at]
        self._redrawn[self._at] |= self._column < len(row)
        row = row[: self._column] + text + row[self._column + len(text) :]
        self._column, self._returned = self._column + len(text), False
        if len(row) > LONGEST:
            self._rows[self._at] = ""
            self._settle(self._at)
            self._finish(row)
            self._column = 0
        else:
            self._rows[self._at] = row

    def _control(self, sequence: str) -> None:
        how, count = sequence[-1], int(sequence[2:-1]) if sequence[2:-1].isdigit() else 1
        if how == "A":
            for _ in range(min(count, MOST_ROWS)):
                self._up()
        elif how == "B":
            for _ in range(min(count, MOST_ROWS)):
                self._down(False)
        elif how == "K":
            row = self._rows[self._at]
            self._rows[self._at] = "" if sequence[2:-1] == "2" else row[: self._column]
        elif how == "m" and not self._redrawn[self._at] and self._column == len(self._rows[self._at]):
            self._write(sequence)  # a colour: kept in lines, which nothing is counted in

    def _up(self) -> None:
        if self._at:
            self._at -= 1
        elif len(self._rows) < MOST_ROWS:
            self._rows.insert(0, "")
            self._redrawn.insert(0, False)
        self._column, self._visits = min(self._column, len(self._rows[self._at])), 0

    def _down(self, newline: bool) -> None:
        self._visits, self._returned = 0, False
        if self._at + 1 < len(self._rows):
            self._at += 1
        elif newline and not self._redrawn[self._at]:
            self._settle(len(self._rows), newline)
        else:
            self._rows.append("")
            self._redrawn.append(False)
            self._at += 1
            if len(self._rows) > MOST_ROWS:
                self._settle(1)
        self._column = 0

    def _settle(self, count: int, newline: bool = False) -> None:
        """The first rows are done; those that are blank say nothing, unless a newline was written in one."""
        for place, row in enumerate(self._rows[:count]):
            if row.strip() or (newline and place == count - 1):
                self._finish(row.rstrip() if self._redrawn[place] else row)
        del self._rows[:count], self._redrawn[:count]
        self._at = max(0, self._at - count)
        if not self._rows:
            self._rows, self._redrawn, self._at, self._column, self._returned = [""], [False], 0, 0, False

    def _finish(self, line: str) -> None:
        self._done += [line[at : at + LONGEST] for at in range(0, max(len(line), 1), LONGEST)]
