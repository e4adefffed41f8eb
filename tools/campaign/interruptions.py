"""Kills and faults at write events: the files left must be whole, and the next start must end as if undisturbed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from campaign import writes
from campaign.forks import Ended, Violation, command, in_child
from campaign.scene import Scene, Workflow, broken_files, differences, same_output

Inputs = Iterator[tuple[str, list[Violation]]]
_LONG = ("audit", "reproduce")
_KILLED = (-9, -25)  # SIGKILL that we sent, or SIGXFSZ for a file that grew too large


def try_kill(scene: Scene, number: int, rng: random.Random) -> Inputs:
    """Kills a workflow at a write event, or within a write, one to three times; then runs it again undisturbed.

    Cases take all events of all workflows in turn. Each kill comes before or after an event, or within a write.
    """
    workflow, event = _event_of(scene, number, rng, "events")
    name, found = workflow.name, []
    with scene.folder_from(workflow.start) as folder:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if rng.random() < 0.3:
                size = rng.randrange(workflow.largest)
                how, ended = f"at byte {size}", _run(workflow, folder, _die_within(size))
            else:
                behind = rng.random() < 0.5
                how, ended = f"at event {event}", _run(workflow, folder, _die(folder, event, behind))
            name += f", killed {how}"
            if ended.status not in _KILLED:
                found += ended.violations()
            found += broken_files(folder)
            event = rng.randrange(1, workflow.events + 1)
        found += _next_start(workflow, folder)
    yield name, found


def try_fault(scene: Scene, number: int, rng: random.Random) -> Inputs:
    """Runs a workflow in which the operating system refuses an access, once or from then on; then again undisturbed."""
    workflow, event = _event_of(scene, number, rng, "accesses")
    found = []
    with scene.folder_from(workflow.start) as folder:
        if rng.random() < 0.3:
            size = rng.randrange(workflow.largest)
            name, work = f"no file above {size} bytes", lambda: writes.limit_file_size(size, deadly=False)
        else:
            fault, lasting = rng.choice((*writes.FAULTS, "MemoryError")), rng.random() < 0.5
            name = f"{fault} at access {event}{' and later' if lasting else ''}"
            work = _fail(folder, event, fault, lasting)
        ended = _run(workflow, folder, work)
        found += [
            one for one in ended.violations() if one.kind != "memory"
        ]  # the fault may be a lack of memory
        if ended.status == workflow.ended.status:
            found += differences(workflow, folder)
        elif ended.status not in (2, 4, None):
            found.append(Violation("status", f"status {ended.status} for a fault: {ended.last_words}"))
        found += broken_files(folder)
        found += _next_start(workflow, folder)
    yield f"{workflow.name}, {name}", found


def _event_of(scene: Scene, number: int, rng: random.Random, which: str) -> tuple[Workflow, int]:
    """The workflow and event of a case: workflows in turn, long ones less often; events in mixed order."""
    names = [name for name in scene.workflows if name not in _LONG]
    turn, place = divmod(number, 3 * len(names) + len(_LONG))
    cycle = [*names * 3, *(name for name in scene.workflows if name in _LONG)]
    name = cycle[place % len(cycle)]
    workflow = scene.workflows[name]
    count = getattr(workflow, which)
    order = random.Random(name).sample(range(1, count + 1), count)
    return workflow, order[(turn * cycle.count(name) + cycle[:place].count(name)) % count]


def _run(workflow: Workflow, folder: Path, prepare: Callable[[], Any]) -> Ended:
    def work() -> None:
        prepare()
        command(*workflow.words)()

    return in_child(work, folder=folder)


def _die(folder: Path, event: int, behind: bool) -> Callable[[], None]:
    return lambda: writes.watch(folder, *writes.die_at(event, behind=behind))


def _die_within(size: int) -> Callable[[], None]:
    return lambda: writes.limit_file_size(size, deadly=True)


def _fail(folder: Path, event: int, fault: str, lasting: bool) -> Callable[[], None]:
    hook = writes.fail_at(event, fault, from_then_on=lasting)
    return lambda: writes.watch(folder, hook, reads=True)


def _next_start(workflow: Workflow, folder: Path) -> list[Violation]:
    """Runs the same command undisturbed, and returns what is wrong afterwards."""
    ended = in_child(command(*workflow.words), folder=folder)
    found = ended.violations()
    if not found and ended.status != workflow.ended.status:
        found.append(Violation("lost", f"the next start ends with {ended.status}: {ended.last_words}"))
    elif not found and not same_output(ended.out, workflow.ended.out) and "finished" not in ended.out:
        found.append(Violation("lost", f"the next start says {ended.out[-200:]!r}"))
    return found + differences(workflow, folder)
