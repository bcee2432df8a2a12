"""No error that instep raises refers to itself: else all that the loop holds stays until Python's collector comes."""

import ast
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._step.deferred_buckets import DeferredBucket
from instep.errors import InstepError, TornStepError
from tests.inside import after_updates, schedule_of
from tests.living import no_gc

SOURCE = Path(instep.__file__).parent
SMALL = 1  # bytes: a bucket for each parameter


def raised_and_kept(node: ast.AST, cleared: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Where a local variable is raised that is there when the frame is left: the error has a traceback, that has the
    frame, and that has the error."""
    if isinstance(node, ast.Try):
        deleted = [target for one in node.finalbody if isinstance(one, ast.Delete) for target in one.targets]
        inside = cleared.union(target.id for target in deleted if isinstance(target, ast.Name))
        for child in ast.iter_child_nodes(node):
            yield from raised_and_kept(child, cleared if child in node.finalbody else inside)
        return
    if isinstance(node, ast.ExceptHandler) and node.name is not None:
        cleared = cleared | {node.name}  # Python does
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id not in cleared:
        yield node.lineno, node.exc.id
    for child in ast.iter_child_nodes(node):
        yield from raised_and_kept(child, cleared)


def test_no_frame_keeps_the_error_that_it_raises() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, name in raised_and_kept(ast.parse(path.read_text(encoding="utf-8")))
        if name.islower()
    ]
    assert not found


class Nothing:
    """The parts of one rank alone."""

    def wait(self) -> None: ...

    def write(self) -> None: ...


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> list["weakref.ref[Any]"]:
    """All that are handed over, and their gradients."""
    made: list[weakref.ref[Any]] = []
    init = DeferredBucket.__init__

    def noted(self: DeferredBucket, *args: Any) -> None:
        init(self, *args)
        made.extend([weakref.ref(self), weakref.ref(self.step), *map(weakref.ref, self.gradients)])

    monkeypatch.setattr(DeferredBucket, "__init__", noted)
    return made


@pytest.mark.parametrize("by", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("here", [True, False], ids=["on the loop's thread", "on the worker's"])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_an_update_that_is_stopped_keeps_no_gradient(
    by: type[BaseException], here: bool, optimizers: int, buckets: list["weakref.ref[Any]"]
) -> None:
    def stop(_: list[torch.Tensor]) -> None:
        raise by("in the update")

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    parts = [model] if optimizers == 1 else list(model)
    made = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9, foreach=False) for part in parts]
    with instep.attach(model, made, schedule="forward", defer=True, bucket_bytes=SMALL) as overlap:
        if here:  # as with shard_state: this rank's part is updated, and sent, in step()
            schedule_of(overlap).gather = lambda parameters: Nothing()
        for optimizer in made:
            optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        overlap.synchronize()
        buckets.clear()
        with no_gc(), after_updates(stop):
            model(torch.ones(2, 3)).sum().backward()
            told = []
            for optimizer in made:
                try:
                    optimizer.step()
                except (by, InstepError) as error:
                    told.append(type(error))
            for _ in range(2):
                try:
                    overlap.synchronize()
                except (by, InstepError) as error:
                    told.append(type(error))
            assert by in told
            assert TornStepError in told
            for optimizer in made:
                optimizer.zero_grad()
            overlap.accept_torn()
            assert buckets
            assert [kind for one in buckets if (kind := one()) is not None] == []
