"""Auditing: whether to believe a robustness number, and why."""

from ecnn.auditing.adaptive import (
    Averaged,
    Coded,
    FeatureDistance,
    InDouble,
    InnerScores,
    OwnTransfer,
    Pursuit,
    Relay,
    Voting,
    Within,
)
from ecnn.auditing.auditor import audit
from ecnn.auditing.bpda import straight_through
from ecnn.auditing.budgets import BUDGETS, Budget, resolve_budget
from ecnn.auditing.diagnostics import CHECKS, diagnose, read_evidence
from ecnn.auditing.findings import Finding
from ecnn.auditing.report import Audit, Stage, load_audit
from ecnn.auditing.subject import Subject
from ecnn.auditing.suite import Cost, Traits, estimate_cost, find_traits
from ecnn.auditing.surrogates import Examples

__all__ = [
    "Audit",
    "Averaged",
    "BUDGETS",
    "Budget",
    "CHECKS",
    "Subject",
    "Coded",
    "Cost",
    "Examples",
    "FeatureDistance",
    "Finding",
    "InDouble",
    "InnerScores",
    "OwnTransfer",
    "Pursuit",
    "Relay",
    "Stage",
    "Traits",
    "Voting",
    "Within",
    "audit",
    "diagnose",
    "estimate_cost",
    "find_traits",
    "load_audit",
    "read_evidence",
    "resolve_budget",
    "straight_through",
]
