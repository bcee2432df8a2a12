"""Imports run one way: see the table. A room may use those to its right."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import instep

ROOT = Path(instep.__file__).parent
ALLOWED = {
    "errors": set(),
    "comm_hooks": set(),
    "_signals": set(),
    "report": {"_signals"},
    "_core": {"errors"},
    "sources": {"_core", "_groups", "comm_hooks", "errors"},
    "_shards": {"_core"},
    "_wrappers": set(),
    "_groups": {"errors"},
    "_arguments": {"errors"},
    "_votes": {"_core", "_groups"},
    "_fsdp2_reset": {"_wrappers"},
    "_fsdp_state": {"_core", "_fsdp2_reset", "_wrappers"},
    "_validation": {"_wrappers", "sources", "_core", "errors"},
    "recording": {"_arguments", "_wrappers", "report", "_core", "errors", "_version"},
    "attachment": {
        "_arguments",
        "recording",
        "_validation",
        "_fsdp_state",
        "_shards",
        "_votes",
        "_wrappers",
        "sources",
        "_core",
        "errors",
    },
    "functional": {"attachment", "_arguments", "_shards", "_wrappers", "sources", "comm_hooks", "_core", "errors"},
    "verification": {"attachment", "_arguments", "_wrappers", "errors"},
    "checkpoint": {"attachment", "_arguments", "_shards", "_wrappers", "sources", "_core", "errors", "_version"},
    "replication": {"attachment", "_arguments", "sources", "errors"},
    "integrations": {"attachment", "sources", "_core", "errors"},
    "demo": {"attachment", "verification", "report", "_signals", "_version"},
    "planning": {"attachment", "sources", "report", "_core", "errors", "_version"},
    "cli": {"demo", "planning", "report", "_signals", "_version"},
}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_by(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


FILES = [path for path in sorted(ROOT.rglob("*.py")) if path.parent != ROOT or not path.stem.startswith("__")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_what_stands_below_it(path: Path) -> None:
    room = room_of(path)
    if room == "_version":
        return
    others = {name.split(".")[1] for name in imported_by(path) if name.startswith("instep.")} - {room}
    assert others <= ALLOWED[room], f"{room} must not import {others - ALLOWED[room]}"


def test_the_core_does_not_know_of_ranks() -> None:
    for path in ROOT.joinpath("_core").glob("*.py"):
        assert not any(name.startswith("torch.distributed") for name in imported_by(path)), path.name


def test_sources_do_not_know_one_another() -> None:
    for path in ROOT.joinpath("sources").glob("*.py"):
        others = {name for name in imported_by(path) if name.startswith("instep.sources.")}
        # No sources: what everything that is a DDP hook shares, what averages the gradients of a replicated model,
        # what divides parameters among ranks, what ranks tell each other, and in what order they send.
        shared = (
            "lane",
            "reductions",
            "hook_slot",
            "reducer_group",
            "rebuilding",
            "transient",
            "layout",
            "agreement",
            "state_shards",
            "messages",
        )
        others -= {f"instep.sources.{name}" for name in shared}
        assert not others, f"{path.name} imports {others}"


def test_the_public_names() -> None:
    assert instep.__all__ == [
        "AllreduceUpcastHookState",
        "Attachment",
        "Checkpoint",
        "ClipNorm",
        "ClipValue",
        "OptimInBackwardHookState",
        "OptimizerHookState",
        "OverlappedOptimizer",
        "Replicated",
        "Verification",
        "apply_optim_in_backward_hook",
        "apply_optimizer_in_backward",
        "as_overlapped_optim",
        "attach",
        "attached",
        "get_in_backward_optimizers",
        "hook_then_optimizer",
        "load",
        "record",
        "reducer_allreduce_and_upcast_hook",
        "register_overlapped",
        "replicate",
        "save",
        "verify",
    ]
    for name in instep.__all__:
        assert callable(getattr(instep, name))
    assert issubclass(instep.errors.InstepError, RuntimeError)
    with pytest.raises(AttributeError, match="no attribute 'detach'"):
        instep.detach  # noqa: B018


def test_the_command_line_does_not_wait_for_torch() -> None:
    loaded = "import sys, instep.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
