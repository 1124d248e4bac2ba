#!/usr/bin/env python3
"""Draws the pictures in README.md: a run in a terminal as SVG, and a report as PNG. Called by
pictures.sh, which brings rich, pyte and a headless Chromium."""

import fcntl
import os
import pathlib
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios

import pyte
from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 40
ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs/pictures"


def style(char):
    words = [name for name in ("bold", "italics", "underscore", "reverse") if getattr(char, name)]
    words = [{"italics": "italic", "underscore": "underline"}.get(word, word) for word in words]
    if char.fg != "default":
        is_hex = len(char.fg) == 6 and all(digit in "0123456789abcdef" for digit in char.fg)
        words.append("#" + char.fg if is_hex else {"brown": "yellow"}.get(char.fg, char.fg))
    return " ".join(words)


def lines(screen):
    """What is on the screen, without the empty lines at its end."""
    shown = []
    for row in range(screen.lines):
        line = Text()
        for column in range(screen.columns):
            char = screen.buffer[row][column]
            line.append(char.data, style(char))
        line.rstrip()
        shown.append(line)
    while shown and not shown[-1].plain:
        shown.pop()
    return shown


def run(command, folder):
    """Runs a command in a terminal. Gives its progress bar half-way, and the last screen."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    bars = []
    while True:
        select.select([terminal], [], [])
        try:
            written = os.read(terminal, 4096)
        except OSError:
            break
        if not written:
            break
        stream.feed(written)
        bars += [line for line in lines(screen) if "ETA" in line.plain]
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit("\n".join(line.plain for line in lines(screen)))
    return bars[len(bars) // 2], lines(screen)


def main():
    PICTURES.mkdir(exist_ok=True)
    trommel = ROOT / "target/debug/trommel"
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        examples = sorted((ROOT / "models/digits/examples").rglob("*.png"))
        for copy in range(60):
            for number, example in enumerate(examples):
                link = folder / f"photos/{copy:02}/{number:03}-{example.parent.name}.png"
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(example)
        (folder / "photos/broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
        (folder / "digits").symlink_to(ROOT / "models/digits")
        words = ["classify", "photos", "--model", "digits", "--output", "results.parquet"]
        bar, screen = run([str(trommel), *words], folder)
        console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))
        console.print(Text("$ ", "bold green") + Text(" ".join(["trommel", *words]), "bold"))
        for line in [bar, *screen]:
            console.print(line)
        console.save_svg(str(PICTURES / "run.svg"), title="trommel")

        subprocess.run(
            [trommel, "classify", ROOT / "models/digits/examples", folder / "photos/broken.png", "--model", "digits",
             "--output", "few.parquet", "--quiet"], cwd=folder, check=True)
        subprocess.run([trommel, "report", "few.parquet", "-o", "report.html"], cwd=folder, check=True)
        subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,900",
             f"--screenshot={PICTURES / 'report.png'}", f"file://{folder}/report.html"],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
