"""Recovery after the state server lost its data: records from manifests, and backups of all else."""
