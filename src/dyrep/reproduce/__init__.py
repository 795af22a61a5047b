"""Every table and figure of the paper, as something that can be run: our figures beside the paper's."""

from dyrep.reproduce.paper import STUDIES
from dyrep.reproduce.scales import SCALES
from dyrep.reproduce.studies import Row, Study, Training

__all__ = ["SCALES", "STUDIES", "Row", "Study", "Training"]
