"""``instep demo`` with a signal at a named point. In the environment: ``POINT``, ``HOW``, and ``ONCE``, a file to make.

The demo's processes run this file, too, as the module that they were started from. Its models are of no size.
"""

import atexit
import os
import pkgutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

PARENT = __name__ == "__main__"
HOW = ("Ctrl-C", "SIGTERM", "SIGTERM to all")


def fire() -> None:
    """Send the signal, if no process has done so yet."""
    try:
        os.close(os.open(os.environ["ONCE"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    send()


def send() -> None:
    how = os.environ["HOW"]
    if how == "SIGTERM":
        os.kill(os.getpid() if PARENT else os.getppid(), signal.SIGTERM)
    else:  # a terminal sends Ctrl-C to every process
        os.killpg(0, signal.SIGINT if how == "Ctrl-C" else signal.SIGTERM)


def before(target: str) -> None:
    """Fire when ``target`` is called."""
    owner, name, real = _found(target)

    def call(*args: Any, **kwargs: Any) -> Any:
        fire()
        return real(*args, **kwargs)

    setattr(owner, name, call)


def after(target: str) -> None:
    """Fire when ``target`` has returned."""
    owner, name, real = _found(target)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        fire()
        return result

    setattr(owner, name, call)


def _found(target: str) -> tuple[Any, str, Any]:
    owner, _, name = target.rpartition(".")
    return pkgutil.resolve_name(owner), name, pkgutil.resolve_name(target)


def at_import(module: str) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == module:
                fire()

    sys.meta_path.insert(0, Finder)


def again_while_it_stops() -> None:
    before("instep_tools.demo.run._line")
    launch = pkgutil.resolve_name("instep_tools.demo.processes")
    stop = launch.Workers.stop

    def send_and_stop(started: Any) -> None:
        send()
        stop(started)
        send()

    launch.Workers.stop = send_and_stop


POINTS: dict[str, Callable[[], Any]] = {
    "imports": partial(at_import, "typer"),
    "imports torch": partial(at_import, "torch.nn"),
    "reads its text": partial(before, "instep_tools.demo.run.load_text"),
    "tries its files": partial(after, "instep_tools.report.files.Path.touch"),
    "makes its directory": partial(after, "instep_tools.demo.processes.tempfile.mkdtemp"),
    "starts its first process": partial(after, "multiprocessing.util.spawnv_passfds"),
    "starts a process": partial(before, "multiprocessing.spawn.get_command_line"),
    "started a process": partial(after, "multiprocessing.popen_spawn_posix.Popen._launch"),
    "started all processes": partial(after, "instep_tools.demo.processes.Workers.give"),
    "shows a step": partial(before, "instep_tools.demo.run._line"),
    "stops": again_while_it_stops,
    "makes its report": partial(before, "instep_tools.demo.run.page"),
    "writes its report": partial(before, "instep_tools.report.files.os.replace"),
    "ends": partial(atexit.register, fire),
}
IN_PROCESS: dict[str, Callable[[], Any]] = {
    "a process begins": fire,
    "a process imports torch": partial(at_import, "torch.nn"),
    "a loop has trained": partial(after, "instep_tools.demo.loops.train_alone"),
    "ranks meet": partial(before, "instep_tools.demo.processes.dist.init_process_group"),
    "ranks have met": partial(after, "instep_tools.demo.processes.dist.init_process_group"),
    "a rank has trained": partial(after, "instep_tools.demo.loops.train_in_lockstep"),
    "a rank leaves": partial(before, "instep_tools.demo.processes.dist.destroy_process_group"),
}
NEED_TWO_RANKS = ("ranks meet", "ranks have met", "a rank has trained", "a rank leaves")
AT_ONCE = ("imports", "imports torch", "ends")
"""Points at which nothing is there to clean up, and nothing is said."""


def with_small_models() -> None:
    """The parent hands them to its processes."""
    from instep_tools.demo import job

    job.SHAPES.update(dict.fromkeys(job.SHAPES, job.Shape(width=16, depth=2, heads=2)))


if __name__ in ("__main__", "__mp_main__"):
    (POINTS if PARENT else IN_PROCESS).get(os.environ["POINT"], lambda: None)()
if PARENT:
    with_small_models()
    from instep_tools.__main__ import main

    main()
