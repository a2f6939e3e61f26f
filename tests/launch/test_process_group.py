# SPDX-License-Identifier: Apache-2.0
"""The near end alone, with far ends that do as the test wishes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest

from orchestra.launchers import process_group
from orchestra.launchers.process_group import News, ProcessGroup


class Deaf:
    """A far end that notes what it is told, and ends when it is hung up on or at a word.

    `signals` are sent to this process, each when the far end is told the word before it: the launcher listens by then.
    """

    def __init__(
        self, rank: int, news: News, at: str | None = None, status: int = 0, *, signals: Sequence[tuple[str, int]] = ()
    ) -> None:
        self.rank, self.news, self.at, self.status = rank, news, at, status
        self.signals = [*signals]
        self.told: list[str] = []
        self.ended = False

    def send(self, word: str) -> None:
        self.told.append(word)
        if self.signals and self.signals[0][0] == word:
            os.kill(os.getpid(), self.signals.pop(0)[1])
        if word == self.at:
            self.end(self.status)

    def close(self) -> None:
        self.end(137)

    def end(self, status: int) -> None:
        if not self.ended:
            self.ended = True
            self.news.put((self.rank, ("end", status)))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_PULSE", 0.05), ("_NOTICE", 0.2), ("_KILLED", 0.2)):
        monkeypatch.setattr(process_group, name, seconds)


def run(*links: Deaf, names: str = "abcd") -> int:
    found = ProcessGroup(list(names[: len(links)]), links[0].news, grace=0.2)
    return found.run({link.rank: link for link in links})


class Third(Deaf):
    """Ends at the third word."""

    def send(self, word: str) -> None:
        super().send(word)
        if len(self.told) == 3:
            self.end(0)


def test_far_ends_are_told_that_we_are_there() -> None:
    news = News()
    first, second = Third(0, news), Third(1, news)
    assert run(first, second) == 0
    assert first.told == second.told == ["", "", ""]


def test_who_does_not_hear_is_asked_then_killed_then_hung_up_on() -> None:
    news = News()
    stubborn = Deaf(0, news)
    news.put((1, ("end", 9)))
    assert run(stubborn, Deaf(1, news)) == 9
    assert [word for word in stubborn.told if word] == ["SIGTERM", "SIGKILL"]
    assert stubborn.ended


@pytest.mark.parametrize(("number", "word", "code"), [(signal.SIGINT, "SIGINT", 130), (signal.SIGHUP, "SIGTERM", 143)])
def test_a_signal_is_passed_on_once(number: int, word: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    news = News()
    first = Deaf(0, news, at=word, status=code, signals=[("", number)])
    second = Deaf(1, news, at=word, status=code)
    assert run(first, second) == code
    assert [w for w in second.told if w] == [word]
    told = "asked all to stop, and waits for those that save first"  # whether a script saves is not known
    assert capfd.readouterr().err.count(told) == 1


def test_what_all_are_asked_is_what_they_can_do(capfd: pytest.CaptureFixture[str]) -> None:
    for asking in ("stop, and waits for those that save first", "stop"):
        group = ProcessGroup(["here"], News(), asking=asking)
        group._stop(signal.SIGINT)
        assert capfd.readouterr().err == f"orchestra: asked all to {asking}; a second signal kills them\n"


def test_a_second_signal_kills_and_a_deaf_host_does_not_keep_us() -> None:
    news = News()
    deaf = Deaf(0, news, signals=[("", signal.SIGINT), ("SIGINT", signal.SIGINT)])
    assert run(deaf) == 130
    assert [word for word in deaf.told if word] == ["SIGINT", "SIGKILL"]


def test_signals_are_as_before_when_it_is_over() -> None:
    before = signal.getsignal(signal.SIGINT)
    news = News()
    news.put((0, ("end", 3)))
    assert run(Deaf(0, news)) == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_was_asked_to_stop_is_not_the_cause(capfd: pytest.CaptureFixture[str]) -> None:
    news = News()
    links = Deaf(0, news), Deaf(1, news, at="SIGTERM", status=143)
    news.put((0, ("end", 6)))
    assert run(*links) == 6
    assert "rank 0 on a failed first: exit status 6" in capfd.readouterr().err


def test_lines_of_all_processes_are_whole(capfd: pytest.CaptureFixture[str]) -> None:
    news = News()
    for rank, kind, said in ((1, "out", b"hal"), (0, "out", b"\xff0"), (1, "err", b"x\ny"), (1, "out", b"f\nrest")):
        news.put((rank, (kind, said)))  # type: ignore[arg-type]
    for rank in (1, 0):
        news.put((rank, ("end", 0)))
    assert ProcessGroup(["a", "b"], news).run({rank: Deaf(rank, news) for rank in (0, 1)}) == 0
    out, err = capfd.readouterr()
    assert out == "\ufffd0"  # rank 0 as it is
    assert err.splitlines() == ["b | x", "b | half", "b | rest", "b | y"]


def test_lines_of_rank_0_are_whole_as_well(capfd: pytest.CaptureFixture[str]) -> None:
    news = News()
    for rank, said in ((0, b"half "), (1, b"x\n10%\r50%\r100%\ny"), (0, b"a line\nnot"), (1, b"z\n"), (0, b" ended")):
        news.put((rank, ("err", said)))
    for rank in (1, 0):
        news.put((rank, ("end", 0)))
    assert ProcessGroup(["a", "b"], news).run({rank: Deaf(rank, news) for rank in (0, 1)}) == 0
    assert capfd.readouterr().err == "b | x\nb | 100%\nhalf a line\nb | yz\nnot ended"


@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        ([(0, 10), (2, 10), (1, 5)], 1),  # the others were told by it
        ([(0, 10), (1, 4), (2, 10)], 1),
        ([(0, 6), (1, 4), (2, 137)], 2),
        ([(1, 10), (0, 6), (2, 10)], 0),
        ([(2, 10), (1, 10), (0, 10)], 2),  # all alike: the first that ended
    ],
)
def test_who_was_stopped_by_another_is_not_the_cause(
    ended: list[tuple[int, int]], cause: int, capfd: pytest.CaptureFixture[str]
) -> None:
    news = News()
    for rank, status in ended:
        news.put((rank, ("end", status)))
    assert run(*(Deaf(rank, news) for rank in range(3))) == dict(ended)[cause]
    assert f"rank {cause} on {'abc'[cause]} failed first" in capfd.readouterr().err


@pytest.mark.parametrize(("status", "cause"), [(2, 1), (1, 0)])
def test_who_says_what_is_wrong_with_the_command_is_named(
    status: int, cause: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """One process of each host says it; the others found it as well, and may have ended sooner."""
    news = News()
    news.put((0, ("end", status)))
    news.put((1, ("err", b"batch = -1\n")))
    news.put((1, ("end", status)))
    assert run(Deaf(0, news), Deaf(1, news)) == status
    err = capfd.readouterr().err
    assert f"rank {cause} on {'ab'[cause]} failed first: exit status {status}" in err
    assert err.count("batch = -1") == 1 + cause


def test_a_cause_that_takes_its_time_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    """It has more to do than those it stopped, and may have been asked to stop by then."""
    news = News()
    news.put((0, ("end", 10)))
    assert run(Deaf(0, news), Deaf(1, news, at="SIGTERM", status=5), Deaf(2, news, at="SIGTERM", status=143)) == 5
    assert "rank 1 on b failed first: exit status 5" in capfd.readouterr().err
