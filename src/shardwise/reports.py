"""Reports that calls return, records that progress hooks receive, and a ledger of memory for ``shardwise report``.

One class for each report; ``to_json()`` gives plain values for a file, and ``print`` shows a table.
"""

from .checkpoint.resume_report import ResumeReport
from .checkpoint.save import SaveReport
from .checkpoint.verify import VerifyReport
from .export.hub import ExportReport
from .fit.pipelines import PipelinePlan, plan_pipeline
from .fit.plan import PlanReport
from .handover.receiver import PullReport
from .handover.sender import PublishReport
from .loading.load import LoadReport, load_report
from .operations.ledger import memory_ledger
from .operations.operation import Progress
from .publish.copy import CopyReport
from .runs.convert import ConvertReport
from .runs.diff import DiffReport

__all__ = [
    "ConvertReport",
    "CopyReport",
    "DiffReport",
    "ExportReport",
    "LoadReport",
    "PipelinePlan",
    "PlanReport",
    "Progress",
    "PublishReport",
    "PullReport",
    "ResumeReport",
    "SaveReport",
    "VerifyReport",
    "load_report",
    "memory_ledger",
    "plan_pipeline",
]
