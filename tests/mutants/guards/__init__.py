"""All mutants, grouped by the subject of the guard they remove.

To add the mutant of a guard, write the smallest change that removes it, and name the fastest test that then fails.
"""

from tests.mutants.guards import (
    cost,
    edges,
    gpu_turns,
    hostile,
    journal,
    models,
    outages,
    polls,
    promotions,
    redispatch,
    retention,
    sampling,
    scale,
    scaling,
    servers,
    storing,
    tenants,
    training,
)

MUTANTS = (
    *journal.MUTANTS,
    *models.MUTANTS,
    *training.MUTANTS,
    *storing.MUTANTS,
    *sampling.MUTANTS,
    *scale.MUTANTS,
    *scaling.MUTANTS,
    *tenants.MUTANTS,
    *servers.MUTANTS,
    *edges.MUTANTS,
    *hostile.MUTANTS,
    *polls.MUTANTS,
    *promotions.MUTANTS,
    *retention.MUTANTS,
    *cost.MUTANTS,
    *gpu_turns.MUTANTS,
    *redispatch.MUTANTS,
    *outages.MUTANTS,
)
