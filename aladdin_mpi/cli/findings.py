"""What a check of ``aladdin-mpi doctor`` found, and one list from the findings of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

__all__ = ["Finding", "Level", "merge", "name_ranks"]

MUST_AGREE = ("aladdin_mpi", "MPI library")
"""Findings that may not differ: training cannot work then."""


class Level(IntEnum):
    """How serious a finding is."""

    OK = 0
    WARNING = 1
    ERROR = 2


class Finding(NamedTuple):
    """One line: what was looked at, what was found, and what to do about it, if anything.

    ``same`` is what must be equal on all ranks, for instance a version; empty: nothing.
    """

    level: Level
    what: str
    found: str
    advice: str = ""
    same: str = ""


def merge(ranks: Sequence[Sequence[Finding]], who: Sequence[str]) -> Iterator[Finding]:
    """One list from those of all ranks: what most have, and the odd ones by name.

    Parameters
    ----------
    ranks : sequence of sequences of Finding
        For each rank; each ``what`` at most once.
    who : sequence of str
        How each rank is called, such as ``"rank 3 on node7"``.
    """
    for what in dict.fromkeys(finding.what for findings in ranks for finding in findings):
        groups: dict[str, list[tuple[str, Finding]]] = {}
        for name, findings in zip(who, ranks, strict=True):
            for finding in findings:
                if finding.what == what:
                    key = f"{finding.level.name} {finding.same}"
                    groups.setdefault(key, []).append((name, finding))
        usual = max(groups.values(), key=len)  # of groups of one size the first, with rank 0
        first = usual[0][1]
        if len(usual) < len(ranks) and len(groups) == 1:  # the others have nothing to say
            yield first._replace(found=f"{name_ranks([name for name, _ in usual])}: {first.found}")
            continue
        yield first
        for group in groups.values():
            if group is not usual:
                yield _odd(group, first, len(groups) == 2)


def _odd(group: list[tuple[str, Finding]], usual: Finding, others: bool) -> Finding:
    finding = group[0][1]
    rest = f"{'all others' if others else 'most'} {usual.same or usual.found}"
    found = f"{name_ranks([name for name, _ in group])}: {finding.same or finding.found}, {rest}"
    if finding.same == usual.same:
        return finding._replace(found=found)
    differs = Level.ERROR if finding.what in MUST_AGREE else Level.WARNING
    advice = finding.advice or "make it the same on all ranks: one environment, the same modules"
    return Finding(max(differs, finding.level), finding.what, found, advice)


def name_ranks(names: Sequence[str], most: int = 4) -> str:
    """The first few of these names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
