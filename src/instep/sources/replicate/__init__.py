"""Data parallelism with buckets of the moment."""
