"""Compile the emulated accelerator, once for each machine. ``python -m tests.accelerator.building`` does so ahead."""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_SOURCES = Path(__file__).with_name("emulator")
_OLDEST = (2, 6)
_ERROR_LINES = 12


class CannotBuildError(RuntimeError):
    """The message is the reason."""


def why_not() -> str | None:
    """The reason why the emulated accelerator cannot be built here, or None once it is built."""
    return _result()[1]


def build() -> Path:
    """The compiled library. Takes half a minute the first time."""
    made, reason = _result()
    if made is None:
        raise CannotBuildError(reason)
    return made


@functools.cache  # a compilation that failed fails again
def _result() -> tuple[Path | None, str | None]:
    try:
        return _build(), None
    except CannotBuildError as error:
        return None, str(error)


def _build() -> Path:
    command = _command()
    made = _folder() / f"emulator-{_key(command)}.so"
    with open(made.parent / "lock", "w") as lock:  # ranks and pytest's workers compile it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            part = made.with_suffix(f".{os.getpid()}.part")
            ran = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True)
            if ran.returncode:
                part.unlink(missing_ok=True)
                raise CannotBuildError("the compiler says:\n" + _end_of(ran.stderr))
            os.replace(part, made)
    return made


def compiler() -> str | None:
    """The C++ compiler of this machine."""
    return shutil.which("g++") or shutil.which("c++")


def _command() -> list[str]:
    if sys.platform != "linux":
        raise CannotBuildError(f"the emulated accelerator is built on Linux, not on {sys.platform}")
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST:
        raise CannotBuildError(f"the emulated accelerator needs torch 2.6, not {torch.__version__}")
    found = compiler()
    if found is None:
        raise CannotBuildError("there is no C++ compiler: neither g++ nor c++ is on the path")
    include, lib = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    if not (include / "ATen" / "ATen.h").exists():
        raise CannotBuildError(f"torch's headers are not in {include}")
    return [
        found,
        f"-std=c++{20 if _compiles_cpp20(found) else 17}",
        "-O1",
        "-DNDEBUG",  # as torch: without it, assertions of torch's headers fail on members that torch does not set
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{include}",
        f"-I{include}/torch/csrc/api/include",
        str(_SOURCES / "emulator.cpp"),
        f"-L{lib}",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{lib}",
    ]


def _compiles_cpp20(program: str) -> bool:
    command = [program, "-std=c++20", "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def _key(command: list[str]) -> str:
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout
    sources = [path.name + path.read_text() for path in sorted(_SOURCES.iterdir())]
    return hashlib.sha256("\0".join([torch.__version__, version, *command, *sources]).encode()).hexdigest()[:16]


def _folder() -> Path:
    default = Path(tempfile.gettempdir()) / f"instep-emulator-{os.getuid()}"
    folder = Path(os.environ.get("INSTEP_EMULATOR_CACHE") or default)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _end_of(errors: str) -> str:
    said = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()
    return "\n".join(said[-_ERROR_LINES:])


def main() -> None:
    """Where there is no compiler the tests are skipped, and say so. An error of the compiler's ends the program."""
    try:
        _command()
    except CannotBuildError as error:
        print(f"not compiled here: {error}")
        return
    print(build())


if __name__ == "__main__":
    main()
