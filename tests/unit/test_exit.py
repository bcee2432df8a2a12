"""However a script ends, it ends: with the plain loop's weights, exit code 0 and nothing said."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import instep

SECONDS = 140
ROOT = Path(__file__).parents[2]
SOURCE = Path(instep.__file__).parents[1]  # not of ROOT: a seeded defect stands in a copy

# Runs after all that instep and torch do at exit.
FIRST = """
import atexit, copy, ctypes, gc, hashlib, os, signal, sys, threading, warnings
from multiprocessing.util import Finalize
import torch
from torch import nn
warnings.simplefilter("ignore", ResourceWarning)  # torch 2.6 leaves a directory to the end
kept, places, daemons, enough = [], [], [], threading.Event()
def look_at(model):
    # Nobody is told of who reads at an address. A tensor there would have its parameters stepped at once.
    places.extend((p.data_ptr(), p.nbytes) for p in model.parameters())
def tell():
    enough.set()
    for daemon in daemons:
        daemon.join()
    with torch.no_grad():
        # First those of which nobody is told: asking for a parameter would see to its step.
        print([hashlib.sha256(ctypes.string_at(*place)).hexdigest()[:12] for place in places])
        print([p.double().sum().item().hex() for p in kept])
atexit.register(tell)
late = []  # called after all that instep and torch do at exit, and before what is told
atexit.register(lambda: [call() for call in late])
import instep
torch.set_num_threads(1)
LOOP = sys.argv[1]
FUSED = {"fused": True} if sys.argv[2] == "fused" else {}
OPTIONS = {
    "forward": {"schedule": "forward", "defer": True},
    "undo": {"schedule": "backward", "undo": True},
    "backward": {"schedule": "backward"},
}
def attach(model, optimizer, loop):
    if LOOP != "plain":
        instep.attach(model, optimizer, bucket_bytes=1, **OPTIONS[loop])
def make(loop=LOOP):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **FUSED)
    attach(model, optimizer, loop)
    return model, optimizer
def backward(model):
    model(torch.ones(2, 16)).square().mean().backward()
def step(model, optimizer):
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
"""
MODULE = """
model, optimizer = make()
kept += model.parameters()
look_at(model)
step(model, optimizer)
"""
STEP = "step(model, optimizer)"
SEVERAL = """
tried = make("undo")
for made in make("forward"), tried, (latest := make("forward")):
    kept += made[0].parameters()
    look_at(made[0])
    step(*made)
    step(*made)
late.append(lambda: step(*latest))
tried[1].zero_grad()
backward(tried[0])
"""
LAST = {
    "step": MODULE + STEP,
    "zero_grad": MODULE + STEP + "; optimizer.zero_grad()",
    "backward": MODULE + STEP + "; optimizer.zero_grad(); backward(model)",
    "forward": MODULE + STEP + "; output = model(torch.ones(2, 16))",
    "without gradients": MODULE + STEP + "; torch.set_grad_enabled(False)",
    "collector off": "gc.disable()\n" + MODULE + STEP,
    "in a function": """
def main():
    model, optimizer = make()
    kept.extend(model.parameters())
    step(model, optimizer)
    step(model, optimizer)
main()
""",
    "one parameter kept": """
def main():
    model, optimizer = make()
    step(model, optimizer)
    step(model, optimizer)
    return model[1].weight
kept.append(main())
""",
    "backward in a function": """
def main():
    model, optimizer = make()
    step(model, optimizer)
    optimizer.zero_grad()
    backward(model)
    return model[1].weight
kept.append(main())
""",
    "in a cycle": """
class Loop:
    pass
def main():
    loop = Loop()
    loop.itself = loop
    loop.made = make()
    kept.append(loop.made[0][0].weight)
    step(*loop.made)
    step(*loop.made)
main()
""",
    "in a dict": "everything = {}; everything['made'] = make(); kept += everything['made'][0].parameters()\n"
    "step(*everything['made']); step(*everything['made'])",
    "model dropped": MODULE + STEP + "; del model",
    "optimizer dropped": MODULE + STEP + "; del optimizer",
    "both dropped": MODULE + STEP + "; del model, optimizer",
    "a thread exits": MODULE
    + """
def work():
    step(model, optimizer)
    sys.exit(3)
thread = threading.Thread(target=work)
thread.start()
""",
    "a daemon trains": MODULE
    + """
def work():
    other = make()
    while not enough.is_set():
        step(*other)
daemons.append(threading.Thread(target=work, daemon=True))
daemons[0].start()
step(model, optimizer)
""",
    "atexit trains": MODULE + "atexit.register(step, model, optimizer)",
    "atexit trains last": MODULE + "late.append(lambda: step(model, optimizer))",
    "sys.exit": MODULE + STEP + "; sys.exit(0)",
    "a signal": MODULE
    + """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
step(model, optimizer)
os.kill(os.getpid(), signal.SIGTERM)
""",
    "fork": MODULE
    + STEP
    + """
sys.stdout.flush()
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
step(model, optimizer)
""",
}
SHARED = """
def work(shared):
    model = copy.deepcopy(shared) if "own" in sys.argv[3] else shared
    kept.extend(model.parameters())
    look_at(model)
    Finalize(None, tell, exitpriority=0)  # after instep's
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **FUSED)
    attach(model, optimizer, LOOP)
    step(model, optimizer)
    step(model, optimizer)
    optimizer.zero_grad()
    backward(model)
    if "steps" in sys.argv[3]:
        optimizer.step()
if __name__ == "__main__":
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).share_memory()
    child = torch.multiprocessing.get_context("%s").Process(target=work, args=(shared,))
    child.start()
    child.join()
    assert child.exitcode == 0, child.exitcode
    kept += shared.parameters()
    tell()
"""
BY_DEFAULT = [("step", "forward"), ("a daemon trains", "forward"), ("fork", "forward")]
CASES = [
    pytest.param(last, loop, kind, marks=[] if by_default else [pytest.mark.nightly])
    for last in LAST
    for loop in ("forward", "undo", "backward")
    for kind in ("unfused", "fused")
    if loop != "backward" or "backward" not in last  # which has stepped by then
    for by_default in [kind == "unfused" and (last, loop) in BY_DEFAULT]
]
BEFORE_INSTEP = (
    "    atexit.register(tell)\n",
    "    atexit.register(tell)\n    atexit.register(lambda: step(model, optimizer))\n",
)


def run(code: str, *arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    script = path / "script.py"
    script.write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)])}
    command = [sys.executable, "-W", "error", str(script), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment, cwd=path
    )


_plain: dict[tuple[str, ...], str] = {}


def plain_output(code: str, *arguments: str, path: Path) -> str:
    key = (code, *arguments)
    if key not in _plain:
        done = run(code, "plain", *arguments, path=path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "0x" in done.stdout
        _plain[key] = done.stdout
    return _plain[key]


def require_the_same(code: str, loop: str, *arguments: str, path: Path) -> None:
    done = run(code, loop, *arguments, path=path)
    plain = plain_output(code, *arguments, path=path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", plain)


@pytest.mark.parametrize(("last", "loop", "kind"), CASES)
def test_a_script_ends_with_the_plain_loop_s_weights(last: str, loop: str, kind: str, tmp_path: Path) -> None:
    require_the_same(FIRST + LAST[last], loop, kind, path=tmp_path)


@pytest.mark.parametrize("kind", ["unfused", pytest.param("fused", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("loop", ["forward", pytest.param("undo", marks=pytest.mark.nightly)])
def test_a_loop_that_trains_after_instep_s_own_end(loop: str, kind: str, tmp_path: Path) -> None:
    require_the_same(FIRST.replace(*BEFORE_INSTEP) + MODULE + STEP, loop, kind, path=tmp_path)


def test_several_models(tmp_path: Path) -> None:
    """As "step", "backward" and "atexit trains last" each by itself, in one process."""
    require_the_same(FIRST + SEVERAL, "forward", "unfused", path=tmp_path)


COMPILED = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.Linear(16, 16)
    def forward(self, x):
        return x + nn.functional.silu(self.inner(self.norm(x)))
torch.manual_seed(0)
model = nn.Sequential(Block(), Block())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **FUSED)
kept += model.parameters()
attach(model, optimizer, LOOP)
run = torch.compile(model, backend="eager")
step(run, optimizer)
"""


def test_a_compiled_model(tmp_path: Path) -> None:
    """What dynamo keeps of it goes after the names of instep's modules."""
    require_the_same(FIRST + COMPILED, "backward", "fused", path=tmp_path)


def test_an_error_is_the_last_act(tmp_path: Path) -> None:
    code = FIRST + MODULE + STEP + "; raise ZeroDivisionError('of the loop')"
    plain, done = (run(code, loop, "unfused", path=tmp_path) for loop in ("plain", "forward"))
    assert plain.returncode == done.returncode == 1
    assert (done.stdout, done.stderr) == (plain.stdout, plain.stderr)
    assert "0x" in done.stdout


@pytest.mark.parametrize("kind", ["unfused", pytest.param("fused", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("loop", "end"),
    [
        ("forward", "steps"),  # at once, since the parent has the memory
        ("forward", "steps its own"),
        pytest.param("undo", "steps", marks=pytest.mark.nightly),
        ("undo", "backward"),
    ],
)
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_a_child_of_multiprocessing_leaves_the_plain_loop_s_weights(
    start: str, loop: str, end: str, kind: str, tmp_path: Path
) -> None:
    """Under fork it ends without ``atexit``."""
    require_the_same(FIRST.replace("atexit.register(tell)", "None") + SHARED % start, loop, kind, end, path=tmp_path)
