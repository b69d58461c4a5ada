"""All mutants, by what they take the guard of.

To add a guard's: write the smallest change that takes it out, and name the fastest test that misses it.
"""

from tests.mutants.guards import journal, sampling, storing, tenants, training

MUTANTS = (*journal.MUTANTS, *training.MUTANTS, *storing.MUTANTS, *sampling.MUTANTS, *tenants.MUTANTS)
