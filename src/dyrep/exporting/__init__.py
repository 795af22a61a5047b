"""Write a model to an ONNX or torch.export file, folded, and only if the file computes what the model does."""

from dyrep.exporting.formats import FORMATS
from dyrep.exporting.report import ExportReport
from dyrep.exporting.writing import export

__all__ = ["FORMATS", "ExportReport", "export"]
