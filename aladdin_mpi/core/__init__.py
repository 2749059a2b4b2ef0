"""Arrays and models: the flat parameter vector, kernels, shards, schedules.  No MPI, no files."""
