"""Checkpoints: everything that a training run is resumed from, bit for bit, at the last committed step."""

from instep.checkpoint.loading import Checkpoint as Checkpoint
from instep.checkpoint.loading import load as load
from instep.checkpoint.saving import save as save
