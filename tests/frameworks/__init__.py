"""Frameworks as their users call them, unmodified and with instep: ``pip install 'instep[frameworks]'``, then
``pytest -m nightly tests/frameworks``."""

import os

# Hugging Face's libraries read these when they are imported: nothing is downloaded, and no thread reports anything.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
