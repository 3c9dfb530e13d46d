"""Print what a command shows in a terminal after some keys, as HTML: `python show_a_terminal.py KEYS
COMMAND …`. Needs pyte, on which the project does not depend.
"""

from __future__ import annotations

import fcntl
import html
import os
import pty
import select
import struct
import sys
import termios
import time

import pyte

COLUMNS, ROWS = 150, 44
START, PER_KEY = 12.0, 1.5  # seconds to draw in
# a program asks a terminal for its cursor and its background before it draws
ANSWERS = {b"\x1b[6n": b"\x1b[1;1R", b"\x1b]11;?": b"\x1b]11;rgb:0000/0000/0000\x1b\\"}
PAGE = """<!doctype html><meta charset="utf-8"><body style="margin: 12px; background: #111; color: #ddd">
<pre style="margin: 0; font: 13.8px/1.42 'DejaVu Sans Mono', monospace">{}</pre>"""


def resize(descriptor: int, rows: int) -> None:
    """Give the terminal a size, so that the program redraws the screen."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))


def read(descriptor: int, stream: pyte.ByteStream, seconds: float) -> None:
    """Feed what the program writes, and answer what it asks."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([descriptor], [], [], left)[0]:
            data = os.read(descriptor, 1 << 16)
            for question, answer in ANSWERS.items():
                if question in data:
                    os.write(descriptor, answer)
            stream.feed(data)


def styled(cell: pyte.screens.Char) -> str:
    """Return a cell in its colors."""
    ink, back = (cell.bg, cell.fg) if cell.reverse else (cell.fg, cell.bg)
    style = [
        f"{name}: {'#' * (len(color) == 6 and color not in ('yellow', 'orange'))}{color}"
        for name, color in (("color", ink), ("background", back))
        if color != "default"
    ]
    if cell.bold:
        style.append("font-weight: bold")
    if not cell.data.isascii():  # may come from a font of another width
        style.append("display: inline-block; width: 1ch")
    text = html.escape(cell.data)
    return f'<span style="{"; ".join(style)}">{text}</span>' if style else text


def main(keys: str, *command: str) -> None:
    process, descriptor = pty.fork()
    if process == 0:
        os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        os.execvp(command[0], command)
    resize(descriptor, ROWS)
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    read(descriptor, stream, START)
    for key in keys:
        os.write(descriptor, key.encode())
        read(descriptor, stream, PER_KEY)
    screen.reset()  # it knows fewer commands than programs use to draw what has changed
    for rows in (ROWS - 1, ROWS):
        resize(descriptor, rows)
        read(descriptor, stream, PER_KEY)
    lines = (
        "".join(styled(screen.buffer[row][column]) for column in range(COLUMNS))
        for row in range(ROWS)
    )
    print(PAGE.format("\n".join(lines)))
    os.kill(process, 9)


if __name__ == "__main__":
    main(*sys.argv[1:])
