"""An emulated accelerator, which shows what stream code leaves to chance, and the tests that run on it.

With ``INSTEP_TEST_ACCELERATOR=cuda`` the same bodies run on that device in its place, and nothing is recorded.
"""

import os

EMULATED = "emu"
ACCELERATOR = os.environ.get("INSTEP_TEST_ACCELERATOR", EMULATED)
"""The type of device that a session on an accelerator, and its ranks, run on."""
