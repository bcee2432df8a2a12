"""What ``.ci/run`` leaves out on the emulated accelerator catches no defect that the rest does not catch."""

import pytest

from tests import selection

pytestmark = pytest.mark.accelerator


def test_each_defect_that_is_caught_is_caught_in_ci(request: pytest.FixtureRequest) -> None:
    """Of the files that this session has collected."""
    if any("::" in arg for arg in request.config.args):
        pytest.skip("files were collected in part")
    collected = request.config.stash[selection.COLLECTED]
    files = set(map(selection.file_of, collected))
    in_ci = request.config.stash[selection.IN_CI]
    for defect, tests in selection.killers("accelerator").items():
        here = {nodeid for nodeid in tests if selection.file_of(nodeid) in files}
        assert not here or here & in_ci, defect
