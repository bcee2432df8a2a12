"""Gradients that DistributedDataParallel has averaged."""
