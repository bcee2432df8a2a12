"""DistributedDataParallel's gradients that are on their way across iterations."""
