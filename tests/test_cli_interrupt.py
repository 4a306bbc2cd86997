"""Ctrl-C at a real terminal: an answer stops, what was said stays, a chat goes on."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from paceline.loaders import hub

WAIT = 300.0  # seconds until the first word; the model may have to be read from disk on a busy machine
LONG = ("--temperature", "0", "--max-tokens", "4000")  # nothing ends this story before it is interrupted
QUESTION = "Tell me a very long story about a river."


@dataclass
class Terminal:
    """A paceline process whose stdin, stdout and stderr are one terminal."""

    process: subprocess.Popen[bytes]
    fd: int
    seen: str = ""

    def read_until(self, word: str, seconds: float = WAIT) -> str:
        end = time.monotonic() + seconds
        while word not in self.seen:
            assert time.monotonic() < end, f"no {word!r} in {self.seen!r}"
            self._read()
        before, _, self.seen = self.seen.partition(word)
        return before

    def read_at_least(self, num_characters: int) -> None:
        end = time.monotonic() + WAIT
        while len(self.seen) < num_characters:
            assert time.monotonic() < end, f"only {self.seen!r}"
            self._read()

    def _read(self) -> None:
        if select.select([self.fd], [], [], 0.2)[0]:
            try:
                self.seen += os.read(self.fd, 4096).decode("utf-8", "replace")
            except OSError:  # the process has closed its end
                time.sleep(0.05)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def type_until(self, text: str, word: str) -> None:
        """Again every few seconds: readline shows its prompt a moment before it listens."""
        end = time.monotonic() + WAIT
        while word not in self.seen:
            assert time.monotonic() < end, f"no {word!r} in {self.seen!r}"
            self.type(text)
            again = time.monotonic() + 5
            while word not in self.seen and time.monotonic() < again:
                self._read()

    def exit_status(self) -> int:
        end = time.monotonic() + WAIT
        while self.process.poll() is None and time.monotonic() < end:
            self._read()
        return self.process.wait(timeout=1)


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    hub.resolve("default", progress=False)
    yield from start(request.param, pty.openpty(), TERM="dumb", NO_COLOR="1")


def start(arguments: Sequence[str], ends: tuple[int, int], **environment: str) -> Iterator[Terminal]:
    """With these ends of a terminal, ours first; killed if it is still there at the end."""
    ours, theirs = ends
    code = "from paceline.cli.entry import main; raise SystemExit(main())"
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, **environment},
        start_new_session=True,
        preexec_fn=_own_terminal,
    )
    os.close(theirs)
    yield Terminal(process, ours)
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()
    os.close(ours)


def _own_terminal() -> None:
    """Make the terminal the child's controlling one, so that typing Ctrl-C signals it as it would a user's
    shell job.
    """
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [["generate", QUESTION, *LONG]], indirect=True, ids=["generate"])
def test_interrupted_generate_keeps_its_words_and_exits_130(terminal: Terminal) -> None:
    terminal.read_at_least(20)
    terminal.type("\x03")
    assert terminal.exit_status() == 130
    assert len(terminal.seen.strip()) >= 20
    assert "Traceback" not in terminal.seen


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [["chat", *LONG]], indirect=True, ids=["chat"])
def test_interrupted_chat_goes_on_with_the_session(terminal: Terminal) -> None:
    terminal.read_until("> ")
    terminal.type(QUESTION + "\n")
    terminal.read_until("\n")  # the echo of what was typed
    terminal.read_at_least(20)
    terminal.type("\x03")
    said = terminal.read_until("(stopped)")
    assert len(said.strip()) >= 20
    terminal.read_until("> ")
    terminal.type("/stats\n")
    terminal.read_until("1 answers (1 stopped)")
    terminal.read_until("> ")
    terminal.type_until("\x03", "Ctrl-D leaves")  # at the prompt it leaves nothing but a hint
    terminal.type("/exit\n")
    assert terminal.exit_status() == 0
    assert "Traceback" not in terminal.seen


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_an_interrupt_during_the_first_imports_leaves_no_traceback(seconds: float) -> None:
    code = "from paceline.cli.entry import main; print(flush=True); raise SystemExit(main())"
    command = [sys.executable, "-c", code, "generate", QUESTION, *LONG]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # from here on the interrupt is ours to handle
        time.sleep(seconds + 0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT)
    told = [line for line in errors.splitlines() if not line.startswith(b"paceline: ")]  # that it waits
    assert (process.returncode, told) == (130, [])
