"""Reports on trained models: one HTML file that needs no other files."""

from ecnn.report.contents import RunContents, Samples, radius_of, read_run, read_runs, take_samples
from ecnn.report.page import RunReport, report_page

__all__ = [
    "RunContents",
    "RunReport",
    "Samples",
    "radius_of",
    "read_run",
    "read_runs",
    "report_page",
    "take_samples",
]
