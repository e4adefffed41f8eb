"""How much an audit may ask of the model."""

from __future__ import annotations

from dataclasses import dataclass

from ecnn.checks import check_choice


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The size of an audit.

    Attributes:
        images: how many, the first of the split, unless the caller says.
        steps: of each gradient attack in the adaptive suite.
        restarts: of each, from fresh random points.
        targets: other classes that targeted attacks try, the best ones first.
        autoattack: whether the whole of AutoAttack runs, with its own settings; else its two APGD attacks, with these.
        probe_images: how many images the diagnostics look at.
        probe_steps: of the gradient attacks that diagnostics make.
        queries: of black-box attacks in diagnostics.
        eot: passes that are averaged when the model is random.
        answers: questions per image of the search by answers alone. A tenth of them, 1,000 at least, goes to every
            image that stands, and all of them to
        searched: so many of the audited images, chosen by chance, if there are more; what diagnostics doubt is searched
            again, on all that stand.
        race: whether `ecnn.attacks.Race` stands in for the APGD attacks on the scores.
        turns: how often the effort is doubled at most, on what stands, where diagnostics doubt; 0 never doubles it.
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
    """The budget of that name, or the one given."""
    if isinstance(budget, Budget):
        return budget
    check_choice("budget", budget, BUDGETS)
    return BUDGETS[budget]
