"""A report on trained models for people: one HTML file with everything in it."""

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
