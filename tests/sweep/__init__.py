"""A sweep over published optimizers, adapters and quantized weights: each beside the plain loop, in processes apart.

``python -m tests.sweep`` makes the environments, runs the cases of ``cases.py``, and writes the table of
docs/optimizers.md. It is no part of ``pytest``: it installs packages, and takes half an hour.
"""
