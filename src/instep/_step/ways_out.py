"""How messages end that say what the plain loop does and ``schedule="backward"`` does not: with what works instead."""

KEEP = "`with overlap.keep_gradients():`"
_AS_IT_IS = "attach with schedule='forward', which takes the loop as it is; so does undo=True, with copies"

LEAVE_IT = f"put {KEEP} around that backward, which leaves its step to optimizer.step(). Or {_AS_IT_IS}"
ANY_LOOP = f"Or {LEAVE_IT}"
"""Ways that work whatever the loop has done with the gradients or weights of one backward."""

KEEP_ALL = f"Or put {KEEP} around all backwards of the step, which leaves them to optimizer.step(). Or {_AS_IT_IS}"
"""The same, for a step of several backwards."""

WRITE_LATER = f"Or put {KEEP} around that backward, or attach with schedule='forward': nothing is written before step()"
"""For writes of which nobody is told, and which ``undo`` does not know of in time."""

MICRO_BATCHES = "Wrap all but the last micro-batch in `with overlap.accumulate():` (DDP: no_sync())"
