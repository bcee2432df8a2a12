"""The verbs of torch's private overlap code, under the same names without the underscore. One file per family."""

from instep.functional.comm_hooks import OptimInBackwardHookState as OptimInBackwardHookState
from instep.functional.comm_hooks import OptimizerHookState as OptimizerHookState
from instep.functional.comm_hooks import apply_optim_in_backward_hook as apply_optim_in_backward_hook
from instep.functional.comm_hooks import hook_then_optimizer as hook_then_optimizer
from instep.functional.in_backward import apply_optimizer_in_backward as apply_optimizer_in_backward
from instep.functional.in_backward import get_in_backward_optimizers as get_in_backward_optimizers
from instep.functional.in_backward import param_to_optim_hook_handle_map as param_to_optim_hook_handle_map
from instep.functional.overlapped import OverlappedOptimizer as OverlappedOptimizer
from instep.functional.overlapped import as_overlapped_optim as as_overlapped_optim
from instep.functional.overlapped import register_overlapped as register_overlapped
from instep.functional.upcast import AllreduceUpcastHookState as AllreduceUpcastHookState
from instep.functional.upcast import reducer_allreduce_and_upcast_hook as reducer_allreduce_and_upcast_hook
