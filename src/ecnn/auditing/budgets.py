"""Budgets of an audit: how many images it takes, and how much each attack may ask of the model."""

from __future__ import annotations

from dataclasses import dataclass

from ecnn.checks import check_choice


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The size of an audit.

    Attributes:
        images: how many images are audited, the first of the split, unless the caller sets a limit.
        steps: steps of each gradient attack in the adaptive suite.
        restarts: starts of each gradient attack, each with its own random numbers.
        targets: how many other classes targeted attacks try, those with the highest scores first.
        autoattack: whether all of AutoAttack runs, with its own settings; otherwise its APGD attacks and Square run
            with the settings of this budget.
        probe_images: how many images the diagnostics use.
        probe_steps: steps of the diagnostics' gradient attacks.
        queries: queries per image of Square (unless `autoattack`) and of the diagnostics' black-box attacks.
        eot: passes over which attacks average if the model is random.
        answers: queries per image of the long search that uses answers alone. A short search comes first, on every
            image that is still classified correctly, with a tenth of the queries, but at least 1,000.
        searched: the long search takes all images if no more than so many are audited, and otherwise a random share
            of `searched / images`. If diagnostics raise doubts, it is repeated on all that are still right.
        race: whether `ecnn.attacks.Race` replaces the APGD attacks on the scores.
        turns: how often, at most, the effort is doubled on images that are still classified correctly, with the attacks
            for what diagnostics doubt, or a single attack if they doubt nothing; 0 for never.
    """

    name: str
    images: int
    steps: int
    restarts: int
    targets: int
    autoattack: bool
    probe_images: int
    probe_steps: int
    queries: int
    eot: int
    answers: int = 1000
    searched: int = 400
    race: bool = False
    turns: int = 2


BUDGETS: dict[str, Budget] = {
    "quick": Budget(
        name="quick", images=100, steps=30, restarts=1, targets=3, autoattack=False,
        probe_images=32, probe_steps=30, queries=200, eot=8, answers=1000,
    ),
    "fast": Budget(
        name="fast", images=1000, steps=20, restarts=1, targets=3, autoattack=False,
        probe_images=32, probe_steps=20, queries=100, eot=8, answers=200, race=True, turns=1,
    ),
    "standard": Budget(
        name="standard", images=1000, steps=100, restarts=1, targets=9, autoattack=True,
        probe_images=128, probe_steps=100, queries=1000, eot=20, answers=10_000, turns=3,
    ),
    "thorough": Budget(
        name="thorough", images=10_000, steps=200, restarts=5, targets=9, autoattack=True,
        probe_images=512, probe_steps=200, queries=5000, eot=50, answers=50_000, searched=2000, turns=3,
    ),
}  # fmt: skip


def resolve_budget(budget: str | Budget) -> Budget:
    """The budget of that name, or the given `Budget` itself."""
    if isinstance(budget, Budget):
        return budget
    check_choice("budget", budget, BUDGETS)
    return BUDGETS[budget]
