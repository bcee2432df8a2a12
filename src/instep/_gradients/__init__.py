"""Done to final gradients before they are applied."""
