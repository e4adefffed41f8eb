"""Connects all other rooms: from a spec to a finished run folder, to attack outcomes, to an audit's verdict."""

from ecnn.pipeline.auditing import AuditPlan, audit_run, plan_audit
from ecnn.pipeline.cells import Cell, read_cells, table_text
from ecnn.pipeline.costing import cost_text, estimate_tasks
from ecnn.pipeline.evaluating import (
    EvaluationPlan,
    attack_tables,
    evaluate_run,
    evaluation_spec,
    own_attacks,
    plan_evaluation,
    presets_for,
)
from ecnn.pipeline.opening import is_own, load_attacks, load_module, open_model
from ecnn.pipeline.publishing import write_report
from ecnn.pipeline.quickstart import QuickstartRow, Step, quickstart_rows, quickstart_steps
from ecnn.pipeline.reporting import draw_results, results_page
from ecnn.pipeline.reproducing import STAGES, Task, audit_again, run_task, tasks_of
from ecnn.pipeline.spreading import CLUSTERS, run_tasks
from ecnn.pipeline.threads import suitable_threads
from ecnn.pipeline.training import (
    Plan,
    TrainedRun,
    join_processes,
    leave_processes,
    load_own_data,
    load_spec_data,
    load_test_images,
    plan,
    train_run,
    training_attack,
    try_plan,
)

__all__ = [
    "AuditPlan",
    "CLUSTERS",
    "Cell",
    "EvaluationPlan",
    "Plan",
    "QuickstartRow",
    "STAGES",
    "Step",
    "Task",
    "TrainedRun",
    "attack_tables",
    "audit_again",
    "audit_run",
    "cost_text",
    "draw_results",
    "estimate_tasks",
    "evaluate_run",
    "evaluation_spec",
    "is_own",
    "join_processes",
    "leave_processes",
    "load_attacks",
    "load_module",
    "load_own_data",
    "load_spec_data",
    "load_test_images",
    "open_model",
    "own_attacks",
    "plan",
    "plan_audit",
    "plan_evaluation",
    "presets_for",
    "quickstart_rows",
    "quickstart_steps",
    "read_cells",
    "results_page",
    "run_task",
    "run_tasks",
    "suitable_threads",
    "table_text",
    "tasks_of",
    "train_run",
    "training_attack",
    "try_plan",
    "write_report",
]
