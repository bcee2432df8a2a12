"""A save that is stopped in the middle leaves the last checkpoint, whole."""

import errno
import hashlib
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import instep
from instep.checkpoint.files import checkpoints_in
from instep.errors import CheckpointError
from tests.checkpoint.loops import everything, load_from, made, require_same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork beside threads


def start(seed: int = 0) -> Any:
    return made(seed=seed, build=lambda: nn.Linear(16, 10))


def learn(loop: Any, step: int) -> None:
    """Without a backward, whose threads do not go with fork."""
    generator = torch.Generator().manual_seed(step)
    for p in loop[0].parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    loop[1].step()


def digest(loop: Any) -> str:
    """Of everything of a training run."""
    found = hashlib.sha256()
    for name, value in everything(*loop):
        found.update(name.encode())
        found.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return found.hexdigest()


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a fork of this process, which it may end; the child's id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(directory: Path, said: int) -> None:
    """Go on from what is there, and save after every step, for ever."""
    loop = start(seed=1)
    done = instep.load(directory, *loop)
    step = done.step if done else 0
    if done is None:
        loop = start()
    while True:
        step += 1
        learn(loop, step)
        instep.save(directory, *loop, step=step)
        os.write(said, b"%d\n" % step)


def killed_at_random(directory: Path, kills: int, seed: int) -> None:
    """Each time training goes on from what is there, and is killed some saves later, at any moment of one."""
    rng = random.Random(seed)
    expected = start()
    digests = [digest(expected)]
    for kill in range(kills):
        reads, writes = os.pipe()
        child = in_child(lambda: train(directory, writes))  # noqa: B023
        os.close(writes)
        with open(reads) as heard:
            try:
                lines = [heard.readline() for _ in range(rng.randint(1, 6))]
                time.sleep(rng.random() * 0.03)  # a save takes about as long
            finally:
                os.kill(child, signal.SIGKILL)
            lines += heard.read().splitlines()
        assert status_of(child) == -signal.SIGKILL
        said = max(int(line) for line in lines)
        loop = start(seed=kill + 1)
        found = instep.load(directory, *loop)
        assert found is not None
        # What save() has returned from is on the disk; one more may be, that nobody was told of.
        assert said <= found.step <= said + 1
        assert len(checkpoints_in(directory)) <= 3, "older ones are removed"
        while len(digests) <= found.step:
            learn(expected, len(digests))
            digests.append(digest(expected))
        assert digest(loop) == digests[found.step], "as if nothing had happened"


def test_killed_at_random(tmp_path: Path) -> None:
    killed_at_random(tmp_path, 10, 0)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 9))
def test_killed_at_random_many_times(tmp_path: Path, seed: int) -> None:
    killed_at_random(tmp_path, 25, seed)


# At every system call of a save, in turn.

CALLS = ("os.mkdir", "os.open", "os.write", "os.fsync", "os.close", "os.rename", "os.scandir", "os.rmdir", "os.unlink")


class Counted:
    """Calls of the operating system, of which the one with the number ``stop`` does not return."""

    def __init__(self, stop: int | None, effect: Callable[[], Any]) -> None:
        self.count, self.stop, self.effect = 0, stop, effect

    def __enter__(self) -> "Counted":
        self._patches = [patch(name, self._counting(getattr(os, name.removeprefix("os.")))) for name in CALLS]
        for one in self._patches:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._patches:
            one.stop()

    def _counting(self, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.stop:
                self.effect()
            return call(*args, **kwargs)

        return counted


@pytest.fixture
def loop() -> Any:
    loop = start()
    learn(loop, 1)
    return loop


def test_killed_at_every_system_call(tmp_path: Path, loop: Any) -> None:
    before = list(everything(*loop))
    instep.save(tmp_path / "before", *loop, step=1)
    instep.save(tmp_path / "before", *loop, step=2)
    learn(loop, 3)
    loaded, status, number = [], -signal.SIGKILL, 0
    while status == -signal.SIGKILL:
        number += 1
        directory = Path(shutil.copytree(tmp_path / "before", tmp_path / str(number)))
        with Counted(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            status = status_of(in_child(lambda: instep.save(directory, *loop, step=3) and None))  # noqa: B023
        other = start(seed=1)
        found = instep.load(directory, *other)
        assert found is not None
        require_same(list(everything(*loop)) if found.step == 3 else before, other, f"killed at call {number}")
        loaded.append(found.step)
        assert instep.save(directory, *loop, step=4)
        assert checkpoints_in(directory)[0].step == 4
        assert not [p for p in directory.iterdir() if p.name.startswith(".")], "the next save clears what was left"
    assert status == 0
    assert loaded == sorted(loaded), "from one call on it is there"
    assert set(loaded) == {2, 3}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_every_system_call_fails_in_turn(tmp_path: Path, loop: Any, error: int) -> None:
    """It raises, and the last checkpoint stays the newest; or it has been saved, and all that failed is cleaning up."""

    def fail() -> None:
        raise OSError(error, os.strerror(error))

    instep.save(tmp_path, *loop, step=1)
    raised, number = 0, 1
    while True:
        with Counted(number, fail) as counted:
            saved = True
            try:
                instep.save(tmp_path, *loop, step=1 + number)
            except CheckpointError as failed:
                saved = os.strerror(error) not in str(failed)
        found = instep.load(tmp_path, *start(seed=1))
        assert found is not None
        assert (found.step == 1 + number) == saved, f"call {number}"
        raised += not saved
        if counted.count < number:
            break
        number += 1
    assert raised > 8


def test_short_writes(tmp_path: Path, loop: Any) -> None:
    write = os.write
    with patch("os.write", lambda file, data: write(file, data[: max(1, len(data) // 2)])):
        instep.save(tmp_path, *loop, step=1)
    other = start(seed=1)
    instep.load(tmp_path, *other)
    require_same(loop, other, "written little by little")
    with patch("os.write", lambda file, data: 0), pytest.raises(CheckpointError, match="nothing could be written"):
        instep.save(tmp_path, *loop, step=2)
    assert load_from(tmp_path, *other).step == 1


def test_a_limit_of_the_operating_system(tmp_path: Path, loop: Any) -> None:
    """No injection: the kernel itself refuses to write on."""
    instep.save(tmp_path, *loop, step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, hard))
        with pytest.raises(CheckpointError, match="File too large"):
            instep.save(tmp_path, *loop, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.step for p in checkpoints_in(tmp_path)] == [1]
    assert load_from(tmp_path, *loop).step == 1


def test_interrupted(tmp_path: Path, loop: Any) -> None:
    instep.save(tmp_path, *loop, step=1)
    with patch("os.fsync", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        instep.save(tmp_path, *loop, step=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000000001"]


def test_flushed_before_it_is_named(tmp_path: Path, loop: Any) -> None:
    """Each file, then the directory, then the name, then the directory of the name."""
    calls: list[tuple[str, str]] = []
    opened: dict[int, str] = {}
    os_open, fsync, rename = os.open, os.fsync, os.rename

    def note_open(path: Any, *args: Any, **kwargs: Any) -> int:
        file = os_open(path, *args, **kwargs)
        opened[file] = Path(path).name
        return file

    def note_fsync(file: int) -> None:
        calls.append(("fsync", opened[file]))
        fsync(file)

    def note_rename(source: Any, target: Any) -> None:
        calls.append(("rename", Path(target).name))
        rename(source, target)

    with patch("os.open", note_open), patch("os.fsync", note_fsync), patch("os.rename", note_rename):
        path = instep.save(tmp_path, *loop, step=1)
    unfinished = calls[3][1]
    assert unfinished.startswith(".saving-1-")
    assert calls == [
        ("fsync", "rank-00000.safetensors"),
        ("fsync", "manifest.json"),
        ("fsync", "manifest.json.sha256"),
        ("fsync", unfinished),
        ("rename", path.name),
        ("fsync", tmp_path.name),
    ]
