"""Take the pictures in docs/pictures of what a user sees: a terminal, and pages in a browser.

    python scripts/take_pictures.py docs/pictures                  # all of them, several minutes
    python scripts/take_pictures.py docs/pictures schedules plan

Every picture is of what the project's own commands print or write. Pages need Chromium and
pngquant, that of TensorBoard the command `tensorboard`, and that of a profile the extra `tpu`.
"""

import argparse
import os
import pty
import re
import socket
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

COLUMNS, LINES = 100, 40
CHARACTER, LINE, MARGIN = 7.83, 18, 14  # pixels
DARK = "@media(prefers-color-scheme:dark){rect{fill:#12161c}text{fill:#cbd5e1}}"
STEP = "model.embed_dim=1024 model.mlp_dim=4096 model.num_layers=8 model.dtype=bfloat16"


def python(module: str, *words: str) -> list[str]:
    """Return a command of the project."""
    return [sys.executable, "-m", f"maxpipe.{module}", *words]


def shown_on_terminal(command: list[str], until: str) -> list[str]:
    """Return the lines on a terminal when a command has written `until`; end the command.

    Raises:
      RuntimeError: it has ended before.
    """
    terminal, inside = pty.openpty()
    termios.tcsetwinsize(terminal, (LINES, COLUMNS))
    written = b""
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside) as process:
        os.close(inside)
        try:
            while until.encode() not in written:
                written += os.read(terminal, 65536)
        except OSError as error:  # nobody writes any more
            raise RuntimeError(f"no {until!r} in:\n{written.decode(errors='ignore')}") from error
        finally:
            process.kill()
            os.close(terminal)
    lines: list[str] = []
    for line in written.decode(errors="ignore").split("\n"):
        shown = ""
        for piece in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).split("\r"):
            shown = piece + shown[len(piece) :]
        lines.append(shown.rstrip())
    return lines


def as_svg(lines: list[str], title: str) -> str:
    """Return lines of a terminal as a picture."""
    width = 2 * MARGIN + CHARACTER * max(map(len, lines))
    height = 2 * MARGIN + LINE * len(lines)
    texts = "".join(
        f'<text x="{MARGIN}" y="{MARGIN + LINE * (i + 0.75):.1f}" xml:space="preserve" '
        f'textLength="{CHARACTER * len(line):.1f}">{escape(line)}</text>\n'
        for i, line in enumerate(lines)
        if line
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img"><title>{escape(title)}</title>\n'
        f"<style>rect{{fill:#f8fafc}}text{{font:13px monospace;fill:#1e293b}}{DARK}</style>\n"
        f'<rect width="100%" height="100%" rx="8"/>\n{texts}</svg>\n'
    )


def photograph(address: str, picture: Path, height: int, milliseconds: int = 3000) -> None:
    """Write a picture of a page, 1100 pixels wide, after it has had some time to draw itself.

    Raises:
      RuntimeError: there is none.
    """
    picture.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                "chromium",
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size=1100,{height}",
                f"--virtual-time-budget={milliseconds}",
                f"--screenshot={picture.absolute()}",
                address,
            ],
            check=True,
            timeout=300,
            stderr=subprocess.DEVNULL,
        )
    if not picture.exists():
        raise RuntimeError(f"chromium has written no {picture}")
    # A third of the bytes.
    smaller = ["pngquant", "--strip", "--force", "--output", picture, picture]
    subprocess.run(smaller, check=True)


def page_of(command: list[str], option: str, picture: Path, height: int) -> None:
    """Let a command write its page, and take a picture of that."""
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / f"{picture.stem}.html"
        # There, since pages show the command that has made them.
        subprocess.run([*command, option, page.name], check=True, cwd=directory)
        photograph(page.as_uri(), picture, height)


def terminal(directory: Path) -> None:
    """The first run, three quarters through."""
    with tempfile.TemporaryDirectory() as runs:
        command = python("train", "base", f"output_dir={runs}")
        lines = shown_on_terminal(command, "step 160/200")
        lines = [line.replace(runs, "runs") for line in lines if line]
    first = "$ python -m maxpipe.train configs/base.yml"
    svg = as_svg([first, *lines], "the first run on a terminal")
    (directory / "terminal.svg").write_text(svg, encoding="utf-8")


def tensorboard(directory: Path) -> None:
    """The first run's curves in TensorBoard."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as runs:
        subprocess.run(python("train", "base", f"output_dir={runs}"), check=True)
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        command = ["tensorboard", "--logdir", runs, "--port", port]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
            try:
                address = f"http://localhost:{port}/"
                wait_for(lambda: urllib.request.urlopen(address + "data/runs").read() != b"[]")
                address += "?darkMode=false#scalars&tagFilter=loss&_smoothingWeight=0"
                photograph(address, directory / "tensorboard.png", 490, 20_000)
            finally:
                server.terminate()


def wait_for(is_ready: Callable[[], bool], seconds: float = 120) -> None:
    """Wait until something is ready; errors of connections mean that it is not."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if is_ready():
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise TimeoutError(f"not ready after {seconds:g} s")


def schedules(directory: Path) -> None:
    """Three schedules on one page."""
    words = ["lockstep_1f1b", "circular", "zb_h2", "stages=4", "microbatches=8"]
    page_of(python("schedule", *words), "--html", directory / "schedules.png", 745)


def plan(directory: Path) -> None:
    """Where a model would train fastest."""
    words = ["llama3-8b", "--topology", "v5p:2x2x4", "--no-compile"]
    page_of(python("plan", *words), "--html", directory / "plan.png", 545)


def profile(directory: Path) -> None:
    """Where a predicted step goes."""
    words = ["base", *STEP.split(), "compile.topology=v5p:2x2x1"]
    page_of(python("compile", *words), "--profile", directory / "profile.png", 870)


PICTURES = {act.__name__: act for act in (terminal, tensorboard, schedules, plan, profile)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", metavar="PICTURE", help=", ".join(PICTURES))
    flags = parser.parse_args()
    if unknown := set(flags.names) - PICTURES.keys():
        parser.error(f"no pictures {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    flags.directory.mkdir(parents=True, exist_ok=True)
    for name in flags.names or PICTURES:
        PICTURES[name](flags.directory)
        print(f"{name} taken")


if __name__ == "__main__":
    main()
