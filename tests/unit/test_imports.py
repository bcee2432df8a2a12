"""Imports run one way: see the table. A room may use those to its right."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import instep

ROOT = Path(instep.__file__).parent
BELOW = {
    "errors": "",
    "comm_hooks": "",
    "buckets": "",
    "_arguments": "errors",
    "_torch": "errors",
    "master_weights": "errors _torch",
    "_optim": "buckets errors _torch master_weights",
    "_ranks": "buckets _torch errors _optim",
    "_gradients": "errors _torch _optim _ranks",
    "_step": "buckets errors _torch _optim _ranks _gradients",
    "sources": "buckets errors _torch _optim _step",
    "sources.ddp": "buckets errors comm_hooks _torch _optim _ranks sources",
    "sources.zero": "buckets errors comm_hooks _torch _optim _ranks _step sources sources.ddp",
    "sources.replicate": "buckets errors comm_hooks _torch _optim _ranks _step sources sources.ddp",
    "sources.fsdp": "buckets errors _torch _optim sources",
    "options": "buckets errors _torch _optim _gradients sources.ddp",
    "target": "_optim sources.ddp sources.replicate sources.fsdp",
    "naming": "sources.replicate",
    "_refusals": "errors _arguments _torch master_weights _optim _gradients sources.ddp sources.replicate sources.fsdp "
    "options target",
    "_wiring": "buckets errors _torch _optim _ranks _gradients _step sources sources.ddp sources.zero "
    "sources.replicate sources.fsdp options target naming",
    "_micro_batches": "errors _torch _optim _step sources.ddp sources.fsdp _wiring",
    "attachment": "buckets errors _arguments _torch _optim _step options target _refusals _wiring _micro_batches",
    "attaching": "errors _arguments _gradients sources.ddp options target attachment",
    "replication": "errors _arguments sources.replicate attachment",
    "functional": "errors comm_hooks _arguments _torch _optim _step sources sources.ddp sources.fsdp attachment "
    "attaching",
    "checkpoint": "errors _arguments _torch _optim sources.fsdp naming attachment target _version",
    "integrations": "errors _torch _gradients sources.ddp options attachment attaching",
}
ALLOWED = {room: set(below.split()) for room, below in BELOW.items()}
# From the ground up: a room stands on those before it.
FLOORS = list(ALLOWED)


TOOLS = ROOT.parent / "instep_tools"
LOADS_TOOLS = {"__init__.py", "__main__.py", "attachment.py", "_wiring/verbs.py"}
"""``verify`` and ``record`` are names of instep, and tools."""
PUBLIC = {"instep", "instep.errors"}


def room_of(module: str) -> str:
    """Of a module under instep. Each kind of source is a room of its own; so are the protocols that they share."""
    parts = module.split(".")
    return next(name for name in (".".join(parts[:2]), parts[0]) if name in ALLOWED)


@cache
def imports_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_by(path: Path) -> set[str]:
    found: set[str] = set()
    for node in imports_of(path):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        else:
            found.update(alias.name for alias in node.names)
    return found


FREE = {ROOT / name for name in ("__init__.py", "__main__.py", "_version.py")}
FOLDERS = sorted({path.parent for path in ROOT.rglob("*.py")})


def _must_not_import(path: Path) -> set[str]:
    """The rooms that this file imports, and that do not stand below its own."""
    room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    others = {name.removeprefix("instep.") for name in imported_by(path) if name.startswith("instep.")} - {"_version"}
    return {room_of(name) for name in others} - {room} - ALLOWED[room]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_room_imports_only_what_stands_below_it(folder: Path) -> None:
    found = {path: _must_not_import(path) for path in sorted(folder.glob("*.py")) if path not in FREE}
    assert not {str(path): rooms for path, rooms in found.items() if rooms}


def test_nothing_stands_on_the_tools() -> None:
    def uses(path: Path) -> bool:
        return any(name.partition(".")[0] == TOOLS.name for name in imported_by(path))

    assert {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if uses(path)} == LOADS_TOOLS


def test_tools_stand_on_public_names() -> None:
    inside: dict[str, set[str]] = {}
    for path in TOOLS.rglob("*.py"):
        for name in imported_by(path):
            if name.partition(".")[0] == "instep" and name not in PUBLIC:
                inside.setdefault(path.relative_to(TOOLS).parts[0], set()).add(name)
    assert inside == {"recording": {"instep._wiring.recorded"}}  # a type, which is not imported when it runs


def test_every_room_stands_on_those_below() -> None:
    for number, room in enumerate(FLOORS):
        assert ALLOWED[room] <= {*FLOORS[:number], "_version"}, room


@pytest.mark.parametrize("room", ["_torch", "_optim", "_gradients", "_step"])
def test_the_step_does_not_know_how_ranks_communicate(room: str) -> None:
    for path in ROOT.joinpath(room).glob("*.py"):
        assert not any(name.startswith("torch.distributed") for name in imported_by(path)), path.name


def test_the_public_names() -> None:
    assert " ".join(instep.__all__) == (
        "AllreduceUpcastHookState Attachment ClipNorm ClipValue OptimInBackwardHookState OptimizerHookState "
        "OverlappedOptimizer Replicated Verification apply_optim_in_backward_hook "
        "apply_optimizer_in_backward as_overlapped_optim attach attached draw_key get_in_backward_optimizers "
        "hook_then_optimizer masters record reducer_allreduce_and_upcast_hook register_overlapped replicate verify"
    )
    for name in instep.__all__:
        assert callable(getattr(instep, name))
    assert issubclass(instep.errors.InstepError, RuntimeError)
    with pytest.raises(AttributeError, match="no attribute 'detach'"):
        instep.detach  # noqa: B018


def test_the_command_line_does_not_wait_for_torch() -> None:
    loaded = "import sys, instep_tools.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("folder", sorted({path.parent for path in TESTS.rglob("*.py")}), ids=lambda path: path.name)
def test_no_test_module_is_imported_by_another(folder: Path) -> None:
    """What tests share is in a module that holds no tests. The command over seeded defects alone reads their table."""
    for path in folder.glob("*.py"):
        imports = [node for node in imports_of(path) if isinstance(node, ast.ImportFrom)]
        names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names} | imported_by(path)
        found = {name for name in names if name.startswith("tests.") and ".test_" in name}
        assert not found or path.name == "matrix.py", path
