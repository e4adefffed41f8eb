"""Figures, written where the caller says; the format follows the suffix."""

from ecnn.plots.audit_figure import plot_audit
from ecnn.plots.code_figure import plot_code
from ecnn.plots.evaluation_figures import plot_curve, plot_members, plot_transfer
from ecnn.plots.figures import check_figure_path, save_figure
from ecnn.plots.results_figure import plot_bars, plot_transfers

__all__ = [
    "check_figure_path",
    "plot_audit",
    "plot_bars",
    "plot_code",
    "plot_curve",
    "plot_members",
    "plot_transfer",
    "plot_transfers",
    "save_figure",
]
