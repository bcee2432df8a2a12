"""When buckets are stepped, and what a step is."""
