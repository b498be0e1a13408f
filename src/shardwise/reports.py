"""Reports that calls return, and records that progress hooks receive.

One class for each; ``to_json()`` gives plain values for a file, and ``print`` shows a table.
"""

from .checkpoint.resume_report import ResumeReport
from .checkpoint.save import SaveReport
from .checkpoint.verify import VerifyReport
from .export.hub import ExportReport
from .loading.report import LoadReport
from .operations.records import Progress
from .phases.report import PlanReport
from .runs.convert import ConvertReport
from .runs.diff import DiffReport
from .store.copy import CopyReport

__all__ = [
    "ConvertReport",
    "CopyReport",
    "DiffReport",
    "ExportReport",
    "LoadReport",
    "PlanReport",
    "Progress",
    "ResumeReport",
    "SaveReport",
    "VerifyReport",
]
