"""Export of trained models, with a parity check against PyTorch before the file is written."""

from fastamp.inference.export.check import MIN_COSINE, ExportReport
from fastamp.inference.export.export_model import export
from fastamp.inference.export.formats import FORMATS
from fastamp.inference.export.options import TOLERANCE, ExportOptions
from fastamp.inference.export.quiet import ExportError

__all__ = ["FORMATS", "MIN_COSINE", "TOLERANCE", "ExportError", "ExportOptions", "ExportReport", "export"]
