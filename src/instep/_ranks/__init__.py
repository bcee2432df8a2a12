"""What ranks say to one another. Nothing here knows of autograd, or of a step."""
