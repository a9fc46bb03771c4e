"""The pages for browsers: the sources of each are put together into one document that fetches nothing else."""
