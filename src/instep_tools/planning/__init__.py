"""``instep plan``: what a training run will need and take, before there is one."""
