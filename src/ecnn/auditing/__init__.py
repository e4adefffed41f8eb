"""Auditing: whether to believe a robustness number, and why."""

from ecnn.attacks.base import Cost
from ecnn.auditing.adaptive import (
    Coded,
    FeatureDistance,
    InDouble,
    InnerScores,
    OwnTransfer,
    Relay,
    Voting,
    Within,
)
from ecnn.auditing.auditor import audit
from ecnn.auditing.bpda import straight_through
from ecnn.auditing.budgets import BUDGETS, Budget, resolve_budget
from ecnn.auditing.certificates import Certificate, certify
from ecnn.auditing.diagnostics import CHECKS, diagnose, read_evidence
from ecnn.auditing.findings import Finding
from ecnn.auditing.report import AUDIT_VERSION, Audit, AuditSummary, Stage, load_audit
from ecnn.auditing.smoothing import Smoothed, SmoothedCertificate
from ecnn.auditing.subject import Subject
from ecnn.auditing.suite import estimate_cost
from ecnn.auditing.surrogates import Examples
from ecnn.auditing.traits import Traits, find_traits

__all__ = [
    "AUDIT_VERSION",
    "Audit",
    "AuditSummary",
    "BUDGETS",
    "Budget",
    "CHECKS",
    "Certificate",
    "Subject",
    "Coded",
    "Cost",
    "Examples",
    "FeatureDistance",
    "Finding",
    "InDouble",
    "InnerScores",
    "OwnTransfer",
    "Relay",
    "Smoothed",
    "SmoothedCertificate",
    "Stage",
    "Traits",
    "Voting",
    "Within",
    "audit",
    "certify",
    "diagnose",
    "estimate_cost",
    "find_traits",
    "load_audit",
    "read_evidence",
    "resolve_budget",
    "straight_through",
]
