"""Optimizer state, and the step, divided among the ranks of DistributedDataParallel."""
