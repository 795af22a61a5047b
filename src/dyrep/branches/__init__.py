"""The branches a convolution can grow (Table 1 of the paper). The seventh, ``KxK``, is the convolution itself."""

from dyrep.branches.kinds import Branch, DepthwiseBranch, folded_conv
from dyrep.branches.making import make_branch, reset_conv_
from dyrep.branches.options import (
    BRANCHES,
    GAMMA,
    ORIGIN,
    BranchOption,
    branch_list,
    branch_option,
    branch_options,
    collapsed_kernel,
    is_branch,
    is_copy,
    pools_by_convolution,
)

__all__ = [
    "BRANCHES",
    "GAMMA",
    "ORIGIN",
    "Branch",
    "BranchOption",
    "DepthwiseBranch",
    "branch_list",
    "branch_option",
    "branch_options",
    "collapsed_kernel",
    "folded_conv",
    "is_branch",
    "is_copy",
    "make_branch",
    "pools_by_convolution",
    "reset_conv_",
]
