"""The only wiring: from a request to a finished run folder, to outcomes, to a verdict."""

from ecnn.pipeline.auditing import AuditPlan, AuditRequest, audit_run, load_module, plan_audit
from ecnn.pipeline.common import parse_settings
from ecnn.pipeline.evaluating import EvaluateRequest, evaluate_run, make_attack
from ecnn.pipeline.training import (
    OBJECTIVES_OF,
    Plan,
    TrainedRun,
    TrainRequest,
    join_processes,
    leave_processes,
    plan,
    train_run,
    training_attack,
)

__all__ = [
    "AuditPlan",
    "AuditRequest",
    "EvaluateRequest",
    "OBJECTIVES_OF",
    "Plan",
    "TrainRequest",
    "TrainedRun",
    "audit_run",
    "evaluate_run",
    "join_processes",
    "leave_processes",
    "load_module",
    "make_attack",
    "parse_settings",
    "plan",
    "plan_audit",
    "train_run",
    "training_attack",
]
