"""What is run on a cluster by `ray job submit`; see cluster/README.md."""
