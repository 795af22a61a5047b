"""Three ways to run one block, with the same parameters: eager, fused and folded."""

from dyrep.execution.dispatch import choose, forward
from dyrep.execution.settings import EXECUTIONS, SIGMA_GRADIENTS, Clock, Execution, eagerly

__all__ = ["EXECUTIONS", "SIGMA_GRADIENTS", "Clock", "Execution", "choose", "eagerly", "forward"]
