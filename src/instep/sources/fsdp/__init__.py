"""Models that FSDP has sharded."""
