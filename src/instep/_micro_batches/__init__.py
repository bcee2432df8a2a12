"""``overlap.micro_batches``: the forwards of all micro-batches, then one backward that frees each gradient."""
