"""Measures what half precision does to a training step: `diagnose`."""

from jmpscale._diagnosis.api import diagnose
from jmpscale._diagnosis.report import Diagnosis, DiagnosisRow

__all__ = ["Diagnosis", "DiagnosisRow", "diagnose"]
