"""RepNAS's gates: which branches of a network count, drawn at random in training and ranked otherwise."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dyrep.block import RepConv
from dyrep.branches import ORIGIN
from dyrep.scaling import GatedNorm


class Gates:
    """The gates of all blocks of a model, in one vector.

    Args:
        model: a model with gated blocks.
        keep: share of all branches that are open at a time.

    Attributes:
        names: of every gate, layer and branch (``"KxK"`` for the original kernel).
        kept: how many are open at a time.

    Example:
        >>> from dyrep.methods.conversion import convert_
        >>> model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1))
        >>> _ = convert_(model, "repnas", replace="conv")
        >>> gates = Gates(model, keep=0.34)
        >>> len(gates.names), gates.kept
        (7, 2)
    """

    def __init__(self, model: nn.Module, keep: float) -> None:
        self.names: list[tuple[str, str]] = []
        self._norms: list[GatedNorm] = []
        starts: list[int] = []
        blocks: list[int] = []
        for layer, block in model.named_modules():
            if not isinstance(block, RepConv) or not isinstance(block.origin_norm, GatedNorm):
                continue
            norms = {ORIGIN: block.origin_norm, **{name: b.norm for name, b in block.branch_modules().items()}}
            blocks += [len(starts)] * len(norms)
            starts.append(len(self.names))
            for name, norm in norms.items():
                assert isinstance(norm, GatedNorm)
                self.names.append((layer, name))
                self._norms.append(norm)
        self.kept = max(int(keep * len(self.names) + 1e-9), 1)
        device = self._norms[0].weight.device if self._norms else torch.device("cpu")
        self._block = torch.tensor(blocks, device=device, dtype=torch.long)
        self._origins = torch.tensor(starts, device=device, dtype=torch.long)

    def ranked(self, scores: Tensor) -> Tensor:
        """1 for the highest scores of the whole network, 0 for the others; a block left without any keeps its KxK."""
        mask = torch.zeros_like(scores).scatter(0, scores.topk(self.kept).indices, 1.0)
        open_in_block = torch.zeros(len(self._origins), device=scores.device, dtype=scores.dtype)
        open_in_block = open_in_block.index_add(0, self._block, mask)
        return mask.index_add(0, self._origins, (open_in_block == 0).to(mask.dtype))

    def draw(self, strengths: Tensor) -> Tensor:
        """Random gates, 0 or 1: the more often 1, the larger the strength, through which a gradient flows back."""
        uniform = torch.rand_like(strengths).clamp(1e-6, 1 - 1e-6)
        noisy = strengths + uniform.log() - (-uniform).log1p()  # logistic: the difference of two Gumbel variables
        soft = noisy.sigmoid()
        return self.ranked(noisy.detach()) + (soft - soft.detach())

    def set_drawn(self, values: Tensor | None) -> None:
        """Put the gates of a training step in place, or take them away."""
        parts = [None] * len(self._norms) if values is None else list(values.unbind())
        for norm, value in zip(self._norms, parts, strict=True):
            norm.drawn = value

    @torch.no_grad()
    def set_open(self, values: Tensor) -> None:
        """Set the gates that eval mode and folding go by."""
        gates = [norm.gate for norm in self._norms]
        torch._foreach_copy_(gates, list(values.to(gates[0].dtype).unbind()))


@torch.no_grad()
def settle_(model: nn.Module, open_gates: dict[str, list[str]]) -> dict[str, list[nn.Parameter]]:
    """End a search: drop every branch that is shut, and let the others be ordinary ones.

    Args:
        model: a model with gated blocks.
        open_gates: the branches to keep of every block, ``"KxK"`` being the original kernel.

    Returns:
        The parameters that are gone, by layer.
    """
    gone: dict[str, list[nn.Parameter]] = {}
    for layer, keep in open_gates.items():
        block = model.get_submodule(layer)
        assert isinstance(block, RepConv)
        before = list(block.parameters())
        branches = {name: branch for name, branch in block.branch_modules().items() if name in keep}
        block.set_branches_(branches)
        for norm in block.scalings():
            if isinstance(norm, GatedNorm):
                norm.open_for_good_()
        if ORIGIN not in keep:
            block.switch_origin_off_()
        left = set(map(id, block.parameters()))
        gone[layer] = [parameter for parameter in before if id(parameter) not in left]
    return gone
